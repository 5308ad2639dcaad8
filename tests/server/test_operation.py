"""What operators look at: logs, health, the watchdog, metrics, traces, and connections under TLS."""

import asyncio
import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from maga_transformer.config import Config, ConfigError
from maga_transformer.server.serve import serve
from maga_transformer.server.watchdog import Progress, where_everyone_is

from .conftest import demo_model, running_server
from .test_lifecycle import wait_for

BOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def test_progress_needs_marks_only_while_there_is_work():
    progress = Progress(10.0)
    assert not progress.stuck_seconds(5, False, 0)
    assert not progress.stuck_seconds(5, False, 100)  # idle
    assert not progress.stuck_seconds(5, True, 101)  # work has just come; idle time does not count
    assert not progress.stuck_seconds(6, True, 120)
    assert progress.stuck_seconds(6, True, 131) == 11
    assert not progress.stuck_seconds(7, True, 132)


def test_the_report_of_a_stall_has_every_thread():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="someone")
    thread.start()
    try:
        report = where_everyone_is()
    finally:
        waiting.set()
        thread.join()
    assert "thread someone:" in report and "waiting.wait" not in report.partition("thread someone:")[0]
    assert re.search(r"^task \d+ \S+.*: [A-Z]", report, re.MULTILINE)


@pytest.fixture(scope="module")
def stalling():
    """Its first ten steps take half a second more each, which it counts as a stall after 0.3 s."""
    with running_server(
        demo_model(), MAGA_FAULT="slow:forward:10", STALL_TIMEOUT="0.3", LOG_FORMAT="json", METRICS_PREFIX="vllm:"
    ) as server:
        yield server


def test_health_follows_the_engine_and_the_watchdog_names_the_place(stalling):
    assert stalling.get("/health/live").json() == stalling.get("/health/ready").json() == "ok"
    body = {"prompt": "SECRET words", "max_tokens": 12, "ignore_eos": True, "stream": True}
    with stalling.stream("/v1/completions", body) as answer:
        stuck = "stalled: the engine has made no step for"
        sick = wait_for(lambda: (health := stalling.get("/health/live")).json().startswith(stuck) and health)
        assert sick and sick.status_code == 503 and "phase run" in sick.json()
        assert "".join(answer.iter_text()).endswith("data: [DONE]\n\n")
    assert wait_for(lambda: stalling.get("/health").json() == "ok")
    stalls = next(line for line in stalling.lines if "phase run" in line)
    told = json.loads(stalls)
    assert told["level"] == "CRITICAL" and "thread MainThread:" in told["message"]
    assert re.search("1 running, 0 waiting|0 running, 1 waiting", told["message"])  # as after the last step, or before the first
    assert stalling.gauges()["vllm:watchdog_stalls_total"] >= 1


def test_json_lines_tell_of_requests_without_their_text(stalling):
    wait_for(lambda: stalling.get("/health").json() == "ok")
    stalling.post("/", {"prompt": "SECRET words", "max_new_tokens": 3, "ignore_eos": True}, headers={"X-Request-Id": "json-1"})
    stalling.post("/", {"prompt": "a", "temperature": "SECRET"}, headers={"X-Request-Id": "json-2"})

    def told(name):
        lines = [json.loads(line) for line in stalling.lines if name in line]
        return lines and lines[0]

    good, bad = wait_for(lambda: told("json-1")), wait_for(lambda: told("json-2"))
    assert good["level"] == "INFO" and good["path"] == "/" and good["status"] == 200
    assert (good["prompt_tokens"] >= 2, good["output_tokens"], good["finish"]) == (True, 3, "length")
    assert 0 <= good["queue_ms"] <= good["first_token_ms"] <= good["ms"]
    assert bad["status"] == 400 and bad["error"] == "parameter"
    assert not any("SECRET" in line for line in stalling.lines)


def test_metrics_by_the_names_of_vllm(stalling):
    stalling.raw("a", max_new_tokens=4, ignore_eos=True)
    gauges = stalling.gauges()
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "corrupted_requests_total",
    ):
        assert "vllm:" + name in gauges, name
    assert not any(name.startswith("maga_") for name in gauges)


def test_gaps_are_one_fewer_than_the_tokens_of_each_output(server):
    before = wait_for(lambda: server.gauges())
    server.raw("a", max_new_tokens=6, num_return_sequences=2, ignore_eos=True)
    after = wait_for(lambda: server.gauges())

    def grown(name):
        return after[name] - before[name]

    assert grown("maga_inter_token_latency_seconds_count") == grown('maga_inter_token_latency_seconds_bucket{le="+Inf"}') == 10
    assert grown("maga_inter_token_latency_seconds_sum") > 0
    assert grown("maga_request_prefill_time_seconds_count") == grown("maga_request_decode_time_seconds_count") == 2
    least, busy = grown('maga_engine_least_seconds_total{part="all"}'), grown('maga_engine_seconds_total{part="model"}')
    assert 0 < least < 10 * busy


def test_a_row_that_is_not_finite_is_counted():
    with running_server(demo_model(), MAGA_FAULT="nan:forward:1") as broken:
        assert broken.post("/", {"prompt": "a"}).status_code == 500
        gauges = wait_for(lambda: broken.gauges())
        assert gauges["maga_corrupted_requests_total"] == 1
        assert gauges['maga_request_failure_total{err="execution"}'] == 1
        assert broken.raw("a", max_new_tokens=2)["finished"]


def test_every_metric_of_the_board_exists(server):
    """After a load that makes all of them appear."""
    server.raw("a", max_new_tokens=3, ignore_eos=True)
    server.post("/", {"prompt": 1})
    names = {name.partition("{")[0] for name in server.gauges()}
    panels = json.loads(BOARD.read_text())["panels"]
    used = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"\b(?:maga|process)_\w+", target["expr"])
    }
    assert len(used) > 15 and used <= names, used - names


def test_tls(tmp_path):
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"SSL_CERTFILE": str(tmp_path / "cert.pem"), "SSL_KEYFILE": str(tmp_path / "key.pem")}
    with running_server(demo_model(), **files) as server:
        assert server.url.startswith("https://localhost:")
        trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        with httpx.Client(verify=trust, base_url=server.url) as client:
            assert client.post("/", json={"prompt": "a", "max_new_tokens": 1}).json()["finished"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
    for wrong in ({"ssl_certfile": "/nowhere.pem"}, {"ssl_certfile": str(tmp_path / "ca.pem")}):
        with pytest.raises(ConfigError, match="SSL_CERTFILE"):
            serve(Config.without_environment(checkpoint_path="x", **wrong))


def test_a_span_of_every_request_reaches_the_collector(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with running_server(demo_model(), OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=endpoint, NO_PROXY="127.0.0.1") as server:
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            server.post("/", {"prompt": "SECRET", "max_new_tokens": 2, "ignore_eos": True}, headers={"traceparent": parent})
        collector.shutdown()
    assert [span.name for span in spans] == ["POST /"]
    assert spans[0].trace_id.hex() == "0af7651916cd43dd8448eb211c80319c" and spans[0].parent_span_id.hex() == "b7ad6b7169203331"
    values = {pair.key: pair.value for pair in spans[0].attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 2 and values["http.response.status_code"].int_value == 200
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert b"SECRET" not in spans[0].SerializeToString()


def test_a_blocked_event_loop_is_noticed():
    """By a watchdog that another thread asks."""
    from maga_transformer.server.watchdog import Watchdog

    class Engine:
        def stats(self):
            return dict.fromkeys(("running", "waiting", "steps", "pages_live", "pages_cached", "pages_free"), 0) | {"phase": "wait"}

    class Runtime:
        config = Config.without_environment(stall_timeout=1.0)
        engine = Engine()

    async def run():
        import time

        watchdog = Watchdog(Runtime())
        watchdog.start(asyncio.get_running_loop())
        await asyncio.sleep(0.5)
        assert not watchdog.stuck
        time.sleep(2.0)
        assert watchdog.stuck.startswith("the event loop has not turned") and watchdog.stalls == 1
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not watchdog.stuck:
                break
        assert not watchdog.stuck
        watchdog.stop()

    asyncio.run(run())
