"""6.5, 6.6 and 6.13: bodies, files and addresses that nobody should send."""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

from server.conftest import ServerProcess
from soak.run import Soak, need, settled

NAMES = ["prompt", "max_tokens", "n", "stop", "temperature", "top_p", "logit_bias", "seed", "generate_config", "messages", "stream"]
ATOMS = [None, True, -1, 0, 2**31, 2**63, 1e308, "", "\0", "\ud800", "a" * 5000, [], {}, [[]], [None], {"a": {}}, [-1], "NaN"]
ROUTES = ["/", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize", "/detokenize", "/v1/embeddings"]


def hostile(run: Soak, server: ServerProcess) -> str:
    random_, statuses = random.Random(run.seed + 4), dict[int, int]()
    for _ in range(run.size(1000)):
        body = {random_.choice(NAMES): random_.choice(ATOMS) for _ in range(random_.randrange(1, 6))}
        body.setdefault("max_new_tokens", 2)
        path = random_.choice(ROUTES)
        status = server.client.post(server.url + path, content=json.dumps(body).encode()).status_code
        statuses[status] = statuses.get(status, 0) + 1
        need(status < 500, f"{status} for {path} {body}")
    settled(server)
    need(not any("Traceback" in line for line in server.lines), "a traceback in the log")
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())) + "; more: tests/server/test_fuzz.py"


def damaged(run: Soak) -> str:
    """A child process reads the files: should one of them kill it, that is seen."""
    count = run.size(5000)
    program = str(Path(__file__).with_name("damage.py"))
    child = subprocess.run(
        [sys.executable, program, str(run.scratch / "files"), str(run.seed), str(count)], capture_output=True, text=True
    )
    told = [json.loads(line) for line in child.stdout.splitlines()]
    need(child.returncode == 0 and told, f"status {child.returncode} at file {told and told[-1]}: {child.stderr[-400:]}")
    refused, loaded = told[-1]["refused"], told[-1]["loaded"]
    need(refused + loaded == count and refused and loaded, f"{refused} refused, {loaded} loaded")
    return f"{count} damaged GGUF, safetensors, .bin: {refused} refused by name, {loaded} loaded and ran; none over 2 s or 64 MiB"


def urls(http: int, canary: Path) -> list[str]:
    hosts = ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"]
    hosts += [
        "127.0.0.1.",
        "user:password@127.0.0.1",
        "example.com@127.0.0.1",
        "127.0.0.1%00.example.com",
        "\uff11\uff12\uff17.0.0.1",
    ]
    found = [f"http://{host}:{http}/x.png" for host in hosts]
    found += [f"HTTPS://{host}:{http}/x" for host in hosts]
    schemes = ("ftp", "gopher", "dict", "ws", "ldap", "tftp", "sftp", "jar:http", "git+http", "s3", "unix")
    found += [f"{scheme}://127.0.0.1:{http}/x" for scheme in schemes]
    found += [f"//127.0.0.1:{http}/x", f"http:\\\\127.0.0.1:{http}\\x", f"http:/127.0.0.1:{http}", f"http:127.0.0.1:{http}"]
    found += [f" http://127.0.0.1:{http}/", f"http://127.0.0.1:{http}/#@example.com", f"http://127.0.0.1:{http}/\r\nHost: x"]
    found += [f"file://{canary}", f"file://localhost{canary}", f"FILE:{canary}", f"file:///proc/self/root{canary}", str(canary)]
    found += [
        f"../../../../../../../..{canary}",
        f"/proc/self/root{canary}",
        f"~/..{canary}",
        f"{canary}\0.png",
        f"data:;base64,{canary}",
    ]
    return found


def shapes(url: str) -> list[tuple[str, dict[str, object]]]:
    """Every place of a request that may hold an address."""

    def chat(content: object, **more: object) -> tuple[str, dict[str, object]]:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}

    schema = {"type": "object", "properties": {"a": {"$ref": url}}, "$schema": url}
    return [
        chat([{"type": "image_url", "image_url": {"url": url}}]),
        chat("a", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
        chat("a", chat_template=f"{{% include '{url}' %}}", chat_template_kwargs={"template": url, "documents": [{"url": url}]}),
        ("/", {"prompt": "a", "images": [url], "generate_config": {"adapter_name": url, "max_new_tokens": 1}}),
    ]


def addresses(run: Soak) -> str:
    """Nothing that a request names is fetched or opened: listeners wait for connections, and the kernel for an open file."""
    folder = run.scratch / "canary"
    folder.mkdir()
    canary = folder / "secret.txt"
    canary.write_text("{}")
    watch = _Opened(folder)
    canary.read_text()
    need(watch.count() > 0, "an open file was not noticed")
    with _Listener() as listener:
        socket.create_connection(("127.0.0.1", listener.port)).close()
        need(listener.wait_for(1), "a connection was not noticed")
        forms, statuses = urls(listener.port, canary), dict[int, int]()
        with run.server() as server:
            for url in forms:
                for path, body in shapes(url):
                    status = server.post(path, body).status_code
                    statuses[status] = statuses.get(status, 0) + 1
                    need(status < 500, f"{status} for {path} {body}")
            settled(server)
        need(listener.connections == 1, f"{listener.connections - 1} connections at the listener")
        need(watch.count() == 0, "the file was opened")
    asked = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return f"{len(forms)} addresses in {len(shapes(''))} shapes of requests: no connection, no file opened; {asked}"


class _Listener:
    """Counts connections to one port of both families."""

    def __init__(self) -> None:
        self.connections = 0
        self._changed = threading.Condition()
        self._socket = (
            socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            if socket.has_dualstack_ipv6()
            else (socket.create_server(("127.0.0.1", 0)))
        )
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> _Listener:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return
            with self._changed:
                self.connections += 1
                self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.connections >= count, 10)


class _Opened:
    """Whether files of a folder are opened, by the kernel's word."""

    _OPEN, _NONBLOCK = 0x20, 0o4000

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(self._NONBLOCK)
        need(self._fd >= 0 and libc.inotify_add_watch(self._fd, os.fsencode(folder), self._OPEN) >= 0, "inotify does not work here")

    def count(self) -> int:
        """Bytes of news since the last call."""
        try:
            return len(os.read(self._fd, 65536))
        except BlockingIOError:
            return 0
