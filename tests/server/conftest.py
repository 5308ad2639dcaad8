"""A real server process on a free port, with the demo model, shared by the whole session."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import maga_transformer.demo
import openai
import pytest

from .chain_model import END, write_chain

SERVER_SETTINGS = {
    "DEVICE": "cpu",
    "MAX_SEQ_LEN": "256",
    "MAX_NUM_SEQS": "64",
    "KV_CACHE_MEM_MB": "128",
    "FT_SERVER_TEST": "1",
    "MAX_BODY_MB": "4",
}


@dataclass
class ServerProcess:
    process: "subprocess.Popen[str]"
    url: str = ""
    lines: list[str] = field(default_factory=list)  # all that it printed

    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: object = None, **options: object) -> httpx.Response:
        return self.client.post(self.url + path, **({"json": body} if body is not None else {}), **options)

    def stream(self, path: str, body: object) -> "contextlib.AbstractContextManager[httpx.Response]":
        return self.client.stream("POST", self.url + path, json=body)

    def raw(self, prompt: str, **fields: object) -> dict:
        answer = self.post("/", {"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def gauges(self) -> dict[str, float]:
        """Metrics by name and labels other than the model's."""
        found = {}
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*?)\})? (\S+)$", self.get("/metrics").text, re.MULTILINE):
            rest = ",".join(part for part in labels.split(",") if part and not part.startswith("model_name"))
            found[f"{name}{{{rest}}}" if rest else name] = float(value)
        return found


def demo_model() -> pathlib.Path:
    try:
        return maga_transformer.demo.demo_model()
    except SystemExit as missing:
        pytest.skip(str(missing))


@contextlib.contextmanager
def running_server(checkpoint: object, **settings: str) -> Iterator[ServerProcess]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAGA_")}
    environment.update({**SERVER_SETTINGS, "CHECKPOINT_PATH": str(checkpoint), "START_PORT": "0", **settings})
    process = subprocess.Popen(
        [sys.executable, "-m", "maga_transformer.start_server"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    server = ServerProcess(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip("\n"))
            if line.startswith("try "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(120), "the server did not get ready"
        addresses = [line.split()[-1] for line in server.lines if line.startswith("ready ")]
        assert addresses, "the server ended:\n" + "\n".join(server.lines)
        server.url = addresses[0]
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(10)
        server.client.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with running_server(demo_model(), ACT_TYPE="fp32") as process:  # exact, so that every machine's kernels give the same text
        yield process
        assert process.process.poll() is None, "the server died during the tests"
        assert not any("Traceback" in line for line in process.lines), "\n".join(process.lines)


TEMPLATE = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call }}{% endfor %}{% endfor %}Q"


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A tiny model for many bodies, whose answers are short whatever they ask for; afterwards it is as before."""
    folder = write_chain(tmp_path_factory.mktemp("fuzz") / "chain", ["Qab", END])
    settings = {"CHAT_TEMPLATE": TEMPLATE, "MAX_NUM_SEQS": "8", "MAX_SEQ_LEN": "96", "FT_SERVER_TEST": "0", "KV_CACHE_MEM_MB": "8"}
    with running_server(folder, THREADS="1", **settings) as server:
        yield server
        assert server.raw("Q", max_new_tokens=5, top_k=1)["response"] == "ab"
        gauges = server.gauges()
        assert gauges["maga_num_requests_running"] == gauges["maga_num_requests_waiting"] == 0
        assert gauges['maga_kv_pages{state="live"}'] == 0
        assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines[-40:])


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
