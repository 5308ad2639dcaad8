"""A server that is being attacked, and the check behind every attack: it says the same as before, holds nothing back, has grown by
little, has told nothing of itself, and nobody beside has noticed."""

import contextlib
import http.client
import json
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..conftest import ServerProcess

KEY, ADMIN = "sk-canary-7", "sk-admin-9"
SECRET = re.compile(rb'Traceback|File "|0x[0-9a-f]{6,}|sk-canary|sk-admin|/maga_transformer/|site-packages|\.py\b')
GROWTH = 16  # MiB
PATIENCE = 30.0  # seconds, for what takes two on a machine that does nothing else
PROBE = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
BESIDE = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    content: bytes

    def json(self):
        return json.loads(self.content)

    @property
    def error(self):
        """Code and message, of whatever shape."""
        told = self.json()
        found = told.get("error") or told.get("detail") or told
        return found.get("error_code") or found.get("code") or found.get("type"), found.get("message") or found.get("msg")


def wait_for(condition, seconds=PATIENCE):
    """Polls until the condition holds; the last value either way."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


@dataclass
class Target:
    server: ServerProcess
    key: str = KEY
    sent: bytearray = field(default_factory=bytearray)  # all that it answered

    @property
    def address(self):
        host, port = self.server.url.removeprefix("http://").split(":")
        return host, int(port)

    def ask(self, path, body=None, *, method="POST", headers=None, key=None):
        """`body`: bytes as they are, anything else as JSON. On a connection of its own."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        with contextlib.closing(connection):
            key = self.key if key is None else key
            own = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request(method, path, content, {**own, "Connection": "close", **(headers or {})})
            answer = connection.getresponse()
            said = Answer(answer.status, answer.headers, answer.read())
        self.note(str(answer.headers).encode() + said.content)
        return said

    def get(self, path, **options):
        return self.ask(path, method="GET", **options)

    def note(self, content):
        self.sent += content
        return content

    def head(self, path, length, more=""):
        """The beginning of a request, for sockets."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}{more}Content-Length: {length}\r\n\r\n".encode()

    def gauges(self):
        text = self.get("/metrics").content.decode()
        return {
            re.sub(r'model_name="[^"]*",?', "", name).removesuffix("{}").replace(",}", "}"): float(value)
            for name, value in re.findall(r"^([\w:]+(?:\{.*?\})?) (\S+)$", text, re.MULTILINE)
        }

    def idle(self):
        gauges = self.gauges()
        busy = ("maga_num_requests_running", "maga_num_requests_waiting", 'maga_kv_pages{state="live"}')
        return not any(gauges[name] for name in busy) and gauges

    def files(self):
        return len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir()))

    def memory(self):
        """MiB."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def probe(self):
        choice = self.ask("/v1/completions", PROBE).json()["choices"][0]
        return choice.get("token_ids") or choice["text"]

    @contextlib.contextmanager
    def live(self, growth=GROWTH):
        """Around an attack."""
        assert wait_for(self.idle), "busy before it began"
        before, files, memory = self.probe(), self.files(), self.memory()
        self.sent.clear()
        beside = _Beside(self)
        with beside:
            yield
        assert not beside.wrong, beside.wrong
        assert self.probe() == before
        assert wait_for(self.idle), self.gauges()
        assert wait_for(lambda: abs(self.files() - files) <= 2), (files, self.files())
        assert wait_for(lambda: self.memory() - memory < growth), (memory, self.memory())
        found = SECRET.search(self.sent)
        assert not found, bytes(self.sent[max(0, found.start() - 200) : found.end() + 200])
        assert self.server.process.poll() is None
        assert not any("Traceback" in line or KEY in line or ADMIN in line for line in self.server.lines), self.server.lines[-40:]


class _Beside:
    """A neighbour that streams all the time, and must get what it gets alone, without a long gap."""

    def __init__(self, target):
        self._target = target
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.wrong = ""

    def __enter__(self):
        self._alone = self._stream()
        self._thread.start()
        assert self._first.wait(PATIENCE)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.is_set():
            try:
                text = self._stream()
            except Exception as error:
                self.wrong = f"a neighbour's stream: {error!r}"
                self._first.set()
                return
            if text != self._alone:
                self.wrong = f"a neighbour got {text!r}, alone {self._alone!r}"

    def _stream(self):
        content = json.dumps(BESIDE).encode()
        text, ended = "", False
        connection = http.client.HTTPConnection(*self._target.address, timeout=PATIENCE)  # of silence
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {self._target.key}"} if self._target.key else {}
            connection.request("POST", "/v1/completions", content, headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                self._first.set()
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                ended |= line.startswith(b"data: [DONE]")
        assert ended, "it has no end"
        return text
