"""Clients that leave, queues that fill, servers that stop."""

import concurrent.futures
import json
import signal
import socket
import time

import pytest

from .conftest import demo_model, running_server

LONG = {"max_new_tokens": 240, "ignore_eos": True}
ABORTED = 'maga_request_success_total{finished_reason="abort"}'


def wait_for(condition, seconds=20.0):
    """Polls until the condition holds; the last value either way."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


def idle(server):
    gauges = server.gauges()
    return (
        gauges["maga_num_requests_running"] == gauges["maga_num_requests_waiting"] == gauges['maga_kv_pages{state="live"}'] == 0
    ) and gauges


def leave(server, body, *, path="/", after=0, version="1.1"):
    """Sends a request, reads at least `after` bytes of the answer, and closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        received = 0
        while received < after:
            received += len(connection.recv(4096))
        if not after:
            assert wait_for(lambda: server.get("/worker_status").json()["onflight_requests"]), "the request never started"


@pytest.mark.parametrize("stream, version", [(False, "1.1"), (True, "1.1"), (False, "1.0"), (True, "1.0")])
def test_a_client_that_leaves_frees_its_pages(server, stream, version):
    """vllm #10806, #9428."""
    before = wait_for(lambda: idle(server))
    assert before
    total = sum(before[f'maga_kv_pages{{state="{state}"}}'] for state in ("live", "cached", "free"))
    body = {"prompt": "Once upon a time", "yield_generator": stream, **LONG}
    leave(server, body, after=600 if stream else 0, version=version)
    after = wait_for(lambda: idle(server), 10)
    assert after, "the request still runs"
    assert sum(after[f'maga_kv_pages{{state="{state}"}}'] for state in ("live", "cached", "free")) == total
    assert wait_for(lambda: server.gauges()[ABORTED] == before[ABORTED] + 1)
    assert after["maga_generation_tokens_total"] - before["maga_generation_tokens_total"] < 240


def test_many_clients_leave_at_once_and_in_prefill(server):
    assert wait_for(lambda: idle(server))
    bodies = [
        {
            "prompt": f"{index} " + "word " * (150 if index % 2 else 5),
            "yield_generator": index % 3 == 0,
            "num_return_sequences": index % 4,
            "max_new_tokens": 100,
            "ignore_eos": True,
        }
        for index in range(20)
    ]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda body: leave(server, body), bodies))
    assert wait_for(lambda: idle(server)), server.gauges()
    assert server.raw("a", max_new_tokens=1)["finished"]


def test_openai_streams_that_are_left(server):
    before = wait_for(lambda: idle(server))
    leave(
        server,
        {"prompt": "Once", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 3},
        path="/v1/completions",
        after=2000,
    )
    assert wait_for(lambda: idle(server))
    assert wait_for(lambda: server.gauges()[ABORTED] == before[ABORTED] + 3)


def test_metrics_count_every_request(server):
    """vllm #55634, #31503: what is left or runs out of time is in every series of outputs, as are the tokens of it."""
    before = wait_for(lambda: idle(server))
    for _ in range(3):
        server.raw("a", max_new_tokens=2, ignore_eos=True)
    for _ in range(5):
        leave(server, {"prompt": "a", "yield_generator": True, **LONG}, after=600)
    server.post("/", {"prompt": "a", "temperature": -1})
    server.post("/", {"prompt": "a", "timeout_ms": 20, **LONG})
    after = wait_for(lambda: idle(server))

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('maga_request_success_total{finished_reason="length"}') == 3
    assert grown('maga_request_success_total{finished_reason="timeout"}') == 1
    assert grown(ABORTED) == 5
    assert grown('maga_request_rejected_total{reason="parameter"}') == 1
    for series in (
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert grown(f"maga_{series}_count") == 9, series
    assert grown("maga_request_generation_tokens_sum") == grown("maga_generation_tokens_total")
    assert grown("maga_request_prompt_tokens_sum") == 9
    assert grown("maga_prompt_tokens_total") in (8, 9)  # the late one may not have begun, as the metric's text says
    assert grown("maga_http_requests_received_total") == 10
    for outcome, count in (("finished", 3), ("rejected", 1), ("failed", 1), ("cancelled", 5)):
        assert grown(f'maga_http_requests_answered_total{{outcome="{outcome}"}}') == count
    for end, count in (("finished", 3), ("cancelled", 5), ("failed", 1)):
        assert grown(f'maga_requests_ended_total{{end="{end}"}}') == count


@pytest.fixture(scope="module")
def small():
    """One sequence runs, two requests wait."""
    with running_server(demo_model(), MAX_NUM_SEQS="1", MAX_QUEUE="2", SERVED_MODEL_NAME="first,second") as server:
        yield server


def test_a_full_queue_says_so_and_the_accepted_end(small):
    def ask(index):
        path, body = (
            ("/", {"prompt": "a", "max_new_tokens": 60, "ignore_eos": True})
            if index % 2
            else ("/v1/completions", {"prompt": "a", "max_tokens": 60, "ignore_eos": True})
        )
        return path, small.post(path, body)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    statuses = [answer.status_code for _, answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 2
    for path, answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error_code"] == 409 if path == "/" else answer.json()["error"]["code"] == "queue_full"
    assert wait_for(lambda: idle(small))


def test_a_batch_that_does_not_fit_the_queue_is_refused_whole(small):
    answer = small.post("/", {"prompt_batch": ["a", "b"], "num_return_sequences": 2})
    assert answer.status_code == 400 and "MAX_NUM_SEQS" in answer.json()["message"]
    assert small.post("/", {"prompt_batch": ["a"] * 3}).json()["error_code"] == 507
    assert wait_for(lambda: idle(small))


def test_several_served_names(small):
    assert [card["id"] for card in small.get("/v1/models").json()["data"]] == ["first", "second"]
    for name in ("first", "second"):
        assert small.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}).json()["model"] == name


def _stream(server, tokens, started):
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with server.stream("/v1/completions", body) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 1:
                started()
    return [line for line in lines if line]


def test_sigterm_lets_streams_finish():
    with running_server(demo_model(), DRAIN_TIMEOUT="200") as server:  # however busy the machine is
        started = []
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(_stream, server, 150, lambda: started.append(1)) for _ in range(4)]
            assert wait_for(lambda: len(started) == 4)
            server.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: server.get("/health").status_code == 503)
            assert server.get("/health").json() == "draining"
            refused = server.post("/", {"prompt": "a"})
            assert refused.status_code == 503 and refused.json()["error_code"] == 409 and refused.headers["retry-after"]
            for stream in streams:
                lines = stream.result()
                assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_sigterm_ends_streams_that_take_too_long():
    """vllm-omni #3683, sglang #22779; with children killed and 64 streams: hostile/test_events.py, H84."""
    with running_server(demo_model(), DRAIN_TIMEOUT="0.2") as server:
        started = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(_stream, server, 240, lambda: started.append(1))
            assert wait_for(lambda: started)
            server.process.send_signal(signal.SIGTERM)
            error = json.loads(stream.result()[-1][6:])["error"]
            assert error["code"] == "cancelled" and "shutting down" in error["message"]
        assert server.process.wait(20) == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


def test_a_second_signal_ends_at_once_and_the_port_is_free_again():
    with running_server(demo_model()) as server:
        started = []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(_stream, server, 240, lambda: started.append(1))
            assert wait_for(lambda: started)
            server.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: server.get("/health").status_code == 503)
            server.process.send_signal(signal.SIGINT)
            server.process.wait(20)
            stream.exception()
        port = server.url.rpartition(":")[2]
    with running_server(demo_model(), START_PORT=port) as again:
        assert again.url == server.url and again.raw("a", max_new_tokens=1)["finished"]
