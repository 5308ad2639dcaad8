"""Clients that leave, queues that overflow, signals, faults and tenants: H80 to H86."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import ServerProcess, running_server
from .live import Target, wait_for

RAW, COMPLETIONS, CHAT = "/", "/v1/completions", "/v1/chat/completions"
ABORTED = 'maga_request_success_total{finished_reason="abort"}'
FINISHED = ['maga_request_success_total{finished_reason="stop"}', 'maga_request_success_total{finished_reason="length"}']
SLOW = {"MAGA_FAULT": "slow:forward:1000000"}  # half a second a step
OWN = {"LOAD_FORMAT": "dummy", "MAX_SEQ_LEN": "256", "THREADS": "1", "MAX_NUM_SEQS": "64", "KV_CACHE_MEM_MB": "16"}


@contextlib.contextmanager
def serving(tiny, **more):
    with running_server(tiny, **{**OWN, **more}) as server:
        yield Target(server, key="")


class Left:
    """A request of a client that resets its connection."""

    def __init__(self, target, path, body, name="", sent=None):
        content = json.dumps(body).encode()
        more = "Connection: close\r\n" + (f"X-Request-Id: {name}\r\n" if name else "")
        self.socket = socket.create_connection(target.address, timeout=60)
        self.socket.sendall(target.head(path, len(content), more) + content[:sent])

    def reset(self, after=0):
        """Once so many bytes of the answer have come."""
        while after > 0 and (received := self.socket.recv(4096)):
            after -= len(received)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


LONG = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
CHUNKED = {**LONG, "prompt": "word " * 45, "stream": True}
LEAVE = {  # body, how much of it is sent, bytes of the answer before the reset, seconds before it
    "before its body is whole": (LONG, 30, 0, 0),
    "before the first byte": (LONG, None, 0, 0.01),
    "at once": ({**LONG, "stream": True}, None, 0, 0),
    "amid the stream": ({**LONG, "stream": True}, None, 3000, 0),
    "with the last token": ({**LONG, "stream": True, "max_tokens": 3}, None, 1000, 0),
    "in a chunk of its prompt": (CHUNKED, None, 0, 0.005),
    "forked": ({**LONG, "n": 4, "stream": True}, None, 2000, 0),
    "beams": ({**LONG, "n": 4, "use_beam_search": True, "temperature": 1}, None, 0, 0.01),
    "under a grammar": ({**LONG, "guided_regex": "[ab]{200}", "stream": True}, None, 1000, 0),
    "while it is tokenised": ({**LONG, "prompt": "a " * 100_000}, None, 0, 0.01),
}


def counted(gauges):
    return sum(gauges.get(name, 0) for name in (ABORTED, *FINISHED))


@pytest.mark.parametrize("when", LEAVE)
def test_h80_clients_that_leave(target, when):
    body, sent, after, seconds = LEAVE[when]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:

        def leave(_):
            left = Left(target, COMPLETIONS, body, sent=sent)
            time.sleep(seconds)
            left.reset(after)

        list(pool.map(leave, range(100 if when in ("at once", "amid the stream") else 30)))
    assert wait_for(target.idle)


def test_h80_clients_that_leave_while_they_wait_or_are_preempted(tiny):
    """Steps of half a second, four sequences, pages for fewer: 40 clients leave a server that has ended nothing yet."""
    with serving(tiny, **SLOW, MAX_NUM_SEQS="4", KV_CACHE_MEM_MB="1") as target:
        assert wait_for(target.idle)
        for path, body in (  # H31: a deadline amid a step of half a second
            (RAW, {"prompt": "a", "max_new_tokens": 50, "timeout_ms": 1}),
            (RAW, {"prompt_batch": ["a", "b"], "max_new_tokens": 50, "timeout_ms": 1, "num_return_sequences": 2}),
        ):
            answer = target.ask(path, body)
            assert (answer.status, answer.error[0]) == (504, 603) and wait_for(target.idle)
        before = target.gauges()
        waiting = [
            Left(target, COMPLETIONS, {**LONG, "prompt": f"{i:02}" * 100, "n": 1 + i % 4, "max_tokens": 50}) for i in range(40)
        ]
        assert wait_for(lambda: target.get("/worker_status").json()["onflight_requests"] == 40)
        for left in waiting:
            left.reset()
        assert wait_for(target.idle)
        after = target.gauges()
        assert after[ABORTED] - before.get(ABORTED, 0) == sum(1 + i % 4 for i in range(40))
        assert all(after.get(name, 0) == before.get(name, 0) for name in FINISHED)


def test_h82_names_of_requests(target):
    """They are echoed and logged, and are the key to nothing."""
    body = {**LONG, "max_tokens": 60}
    alone = target.ask(COMPLETIONS, body).json()["choices"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        same = [
            pool.submit(target.ask, COMPLETIONS, {**body, "seed": i, "temperature": i % 2}, headers={"X-Request-Id": "same"})
            for i in range(8)
        ]
        answers = [each.result() for each in same]
    assert {answer.headers["X-Request-Id"] for answer in answers} == {"same"}
    assert all(answer.json()["choices"] == alone for answer in answers[::2])
    assert len({answer.json()["id"] for answer in answers}) == 8
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gone = [Left(target, COMPLETIONS, body, name) for name in ("a", "ab", "abc")]
        stays = pool.submit(target.ask, COMPLETIONS, body, headers={"X-Request-Id": "ab"})
        for left in gone:
            left.reset()
        assert stays.result().json()["choices"] == alone
    for name in ("", "x" * 129, "a b", "a/b", "é"):
        answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 1}, headers={"X-Request-Id": name.encode()})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["X-Request-Id"])


def test_h83_more_than_the_queue_takes(tiny):
    """What waits is up to MAX_QUEUE; the excess is told to come again, at once and not in its turn."""
    with serving(tiny, **SLOW, MAX_NUM_SEQS="2", MAX_QUEUE="8", KV_CACHE_MEM_MB="1") as target:
        body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(80) as pool:
            answers = list(pool.map(lambda _: target.ask(COMPLETIONS, body), range(80)))
        refused = [answer for answer in answers if answer.status == 429]
        taken = [answer for answer in answers if answer.status == 200]
        assert len(taken) + len(refused) == 80 and len(taken) >= 8 and len(refused) >= 8
        assert all(int(answer.headers["Retry-After"]) >= 1 and answer.error[0] == "queue_full" for answer in refused)
        assert wait_for(target.idle)
        gauges = target.gauges()
        assert gauges['maga_request_rejected_total{reason="busy"}'] == len(refused) and counted(gauges) == len(taken)


def test_h83_a_prompt_larger_than_all_pages(tiny):
    with serving(tiny, MAX_SEQ_LEN="0", KV_CACHE_MEM_MB="1", SEQ_SIZE_PER_BLOCK="128") as target:
        context = target.get("/v1/models").json()["data"][0]["max_model_len"]
        answer = target.ask(COMPLETIONS, {"prompt": "a" * (context + 5000), "max_tokens": 1})
        assert answer.status == 400 and answer.error[0] == "context_length_exceeded"
        assert target.ask(COMPLETIONS, {"prompt": "a" * (context - 1), "max_tokens": 1}).status == 200


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.split()


def streams(target, count, body):
    """Runs them until they end; the last line of each."""

    def run(_):
        last = ""
        with contextlib.suppress(Exception), target.server.stream(COMPLETIONS, body) as answer:
            for line in answer.iter_lines():
                last = line or last
        return last

    pool = concurrent.futures.ThreadPoolExecutor(count)
    found = [pool.submit(run, i) for i in range(count)]
    assert wait_for(lambda: target.gauges()["maga_num_requests_running"] == count)
    return found


SHARED = Path("/dev/shm")


@pytest.mark.parametrize("how", ["drains", "runs out of time", "twice", "killed"])
def test_h84_signals_under_64_streams(tiny, how):
    """After the worst of them the same port serves again at once."""
    before = set(SHARED.iterdir()) if SHARED.exists() else set()
    body = {**LONG, "max_tokens": 8, "stream": True}
    with serving(tiny, **SLOW, DRAIN_TIMEOUT="120" if how == "drains" else "0.5") as target:
        process = target.server.process
        running = streams(target, 64, body)
        assert not children(process.pid), "one process serves: it leaves none behind"
        if how == "killed":
            process.kill()
        else:
            process.send_signal(signal.SIGTERM)
        if how == "twice":
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (-signal.SIGKILL if how == "killed" else 0) or how == "twice"
        ends = [each.result() for each in running]
        if how == "drains":
            assert set(ends) == {"data: [DONE]"}
        elif how == "runs out of time":
            assert all(json.loads(end[6:])["error"]["code"] == "cancelled" for end in ends), set(ends)
        assert not any("Traceback" in line for line in target.server.lines), "\n".join(target.server.lines)[-6000:]
    if how == "killed":
        port = target.server.url.rpartition(":")[2]
        with serving(tiny, START_PORT=port, MAX_QUEUE="256") as again, concurrent.futures.ThreadPoolExecutor(50) as pool:
            asked = pool.map(lambda i: again.ask(COMPLETIONS, {**LONG, "prompt": f"{i}", "max_tokens": 2}).status, range(200))
            assert again.server.url == target.server.url and set(asked) == {200}
    after = set(SHARED.iterdir()) if SHARED.exists() else set()
    assert not {each for each in after - before if "maga" in each.name}


FAULTS = ["throw:allocate:40", "throw:forward:5", "throw:sample:5", "no_pages:allocate:40", "nan:forward:3"]


@pytest.mark.parametrize("fault", FAULTS)
def test_h85_faults(tiny, fault):
    """Each ends what it meets with an error; then all is as before."""
    with serving(tiny, MAGA_FAULT=fault) as target:
        bodies = [{"prompt": f"{i} and", "max_tokens": 30, "ignore_eos": True, "temperature": 0, "logprobs": 2} for i in range(12)]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda body: target.ask(COMPLETIONS, body), bodies))
        assert all(answer.status in (200, 500) for answer in answers)
        failed = [answer for answer in answers if answer.status == 500]
        assert all(answer.error[0] == "execution_failed" for answer in failed)
        assert bool(failed) != fault.startswith("no_pages")
        if fault.startswith("nan"):
            assert {answer.error[1] for answer in failed} == {"non-finite logits"} and len(failed) == 3
        for _ in range(60):  # what is left of the fault
            target.ask(COMPLETIONS, {"prompt": "rest", "max_tokens": 1})
        assert wait_for(target.idle)
        alone = [target.ask(COMPLETIONS, body).json()["choices"] for body in bodies]
        for answer, again in zip(answers, alone, strict=True):
            assert answer.status == 500 or answer.json()["choices"] == again, "a neighbour of the fault changed"
        assert target.get("/health").json() == "ok"


TURNS = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 200}
RESPONSE = {"input": "a", "stream": True, "max_output_tokens": 200, "temperature": 0, "ignore_eos": True}
ENDS = {  # fault, route -> body, a word of one of the last two events
    ("throw", COMPLETIONS): ({**LONG, "stream": True}, '"code":"execution_failed"'),
    ("nan", CHAT): (TURNS, '"code":"execution_failed"'),
    ("nan", "/v1/messages"): (TURNS, '"type":"error"'),
    ("throw", "/v1/responses"): (RESPONSE, '"type":"response.failed"'),
    ("nan", RAW): ({"prompt": "a", "max_new_tokens": 200, "yield_generator": True, "ignore_eos": True}, '"error_code":606'),
}


@pytest.mark.parametrize("fault, path", ENDS)
def test_h85_streams_that_a_fault_ends(tiny, fault, path):
    """vllm-metal 199, LocalAI 2526: after the first tokens an error is an event of its route's kind, and the answer ends."""
    body, word = ENDS[fault, path]
    after = 35 if path == "/v1/messages" else 150  # there the model may end its turn, after 42 tokens
    with serving(tiny, MAGA_FAULT=f"{fault}:forward:1:{after}") as target:
        events = [event for event in target.ask(path, body).content.decode().replace("\r", "").split("\n\n") if event]
        assert len(events) > (after > 35) and word in "".join(events[-2:]).replace(" ", ""), events[-2:]
        assert wait_for(target.idle) and target.ask(path, body).status == 200


@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_h85_nowhere_to_log(tiny, where):
    """A full disk or a reader that is gone costs the lines, not the answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAGA_")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment |= {**OWN, "CHECKPOINT_PATH": str(tiny), "START_PORT": str(port), "FT_SERVER_TEST": "1", "LOG_LEVEL": "DEBUG"}
    environment |= {"DEVICE": "cpu"}
    reading, writing = os.pipe()
    os.close(reading)
    with open(where if where == "/dev/full" else os.devnull, "wb") as full:
        output = full if where == "/dev/full" else writing
        command = [sys.executable, "-m", "maga_transformer.start_server"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    os.close(writing)
    target = Target(ServerProcess(process, url=f"http://127.0.0.1:{port}"), key="")
    try:

        def up():
            with contextlib.suppress(OSError):
                return target.get("/health").status == 200

        assert wait_for(lambda: up() or process.poll() is not None, 120) and process.poll() is None
        assert target.ask(RAW, {"prompt": "a", "max_new_tokens": 3}).status == 200
        assert target.ask(RAW, {"prompt": "a", "temperature": -1}).status == 400
        assert target.get("/health").json() == "ok"
    finally:
        process.terminate()
        assert process.wait(60) == 0


CLOCK = """
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
/* The wall clock is an hour off once the file named by CLOCK_FILE exists, and right again when it is gone. */
int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (clock == CLOCK_REALTIME && access(getenv("CLOCK_FILE"), F_OK) == 0) now->tv_sec += 3600;
  return status;
}
"""


def test_h85_a_clock_that_jumps(tiny, tmp_path):
    """No deadline, stall or time in an answer is of the wall clock."""
    source, library, mark = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "mark"
    source.write_text("#define _GNU_SOURCE\n" + CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    own = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(mark), "STALL_TIMEOUT": "60", "FT_SERVER_TEST": "0"}
    with serving(tiny, **own) as target, target.live():
        body = {"prompt": "a", "max_new_tokens": 250, "ignore_eos": True, "timeout_ms": 60_000}
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                running = [pool.submit(target.ask, RAW, body) for _ in range(4)]
                mark.touch()
                time.sleep(0.1)
                mark.unlink()
                answers = [each.result() for each in running]
            assert all(answer.status == 200 for answer in answers)
            assert all(0 <= answer.json()["aux_info"]["cost_time"] < 60_000 for answer in answers)
            assert target.get("/health").json() == "ok"
        assert target.gauges()["maga_watchdog_stalls_total"] == 0


def test_h86_tenants(tiny, request):
    """One prompt, many tenants, pages for a few: nobody finds another's pages, and what each is told is what it is told alone.
    `--bodies` 100,000 and more: 5,000 requests."""
    tenants, count = 64, 5000 if request.config.getoption("--bodies") >= 100_000 else 640
    with serving(tiny, KV_CACHE_MEM_MB="1", MAX_NUM_SEQS="16") as target:
        prompt = "You work for us all. " * 6

        def ask(i):
            tenant = i % tenants
            own = {"cache_salt": f"tenant-{tenant}", "prompt": f"{prompt}{tenant % 8}", "max_tokens": 12, "ignore_eos": True}
            answer = target.ask(COMPLETIONS, {**own, "temperature": 0})
            assert answer.status == 200, answer.content
            told = answer.json()
            return tenant, told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = [ask(i) for i in range(tenants)]
        assert all(cached == 0 for _, _, cached in first), "a tenant met another's pages"
        expected = {tenant: text for tenant, text, _ in first}
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            told = list(pool.map(ask, range(count)))
        assert all(text == expected[tenant] for tenant, text, _ in told)
        own = [ask(5)[2] for _ in range(2)]
        assert own[1] > 0, "nor its own"
        for salt in ("", "\n/", "x" * (1 << 20), 5):
            answer = target.ask(COMPLETIONS, {"prompt": "a", "cache_salt": salt})
            assert answer.status == 400 and "cache_salt" in answer.error[1] and len(answer.content) < 500
        assert wait_for(target.idle)
