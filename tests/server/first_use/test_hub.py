"""Line 8: models by their name on the hub, against a hub of this test's own: cached, fetched, gated, unknown, out of reach."""

import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ..chain_model import write_chain
from ..conftest import running_server
from ..test_start import start

NAME = "org/chain"
COMMIT = "0" * 39 + "1"


class _Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub: what a model has, and its files. `org/gated` tells what it has, and gives nothing."""

    folder = None
    asked = 0

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        type(self).asked += 1
        parts = self.path.partition("?")[0].strip("/").split("/")
        files = sorted(path.name for path in self.folder.iterdir())
        if parts[:2] == ["api", "models"] and parts[3] in ("chain", "gated"):
            about = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
            self._answer(200, json.dumps(tree if "tree" in parts else about).encode())
        elif parts[0] == "org" and parts[1] == "gated":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted"})
        elif parts[:2] == ["org", "chain"] and parts[-1] in files:
            content = (self.folder / parts[-1]).read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """Its address."""

    class Hub(_Hub):
        folder = write_chain(tmp_path / "files", ["a", "b"])

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.handler = Hub
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _settings(home, port):
    return {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1", "START_PORT": "0"}


def test_08_a_model_is_fetched_once_and_then_starts_without_the_hub(hub, tmp_path):
    pytest.importorskip("huggingface_hub")
    settings = _settings(tmp_path / "home", hub.server_port)
    for first in (True, False):
        with running_server(NAME, **settings) as server:
            assert server.raw("a", max_new_tokens=1, top_k=1)["response"] == "b"
            assert server.get("/v1/models").json()["data"][0]["id"] == NAME
        asked, hub.handler.asked = hub.handler.asked, 0
        assert (asked > 0) == first


def test_08_a_cached_model_needs_neither_the_package_nor_the_net(tmp_path):
    cache = tmp_path / "hub" / "models--org--chain"
    write_chain(cache / "snapshots" / COMMIT, ["a", "b"])
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    hidden = tmp_path / "hidden"  # stands before the installed package
    hidden.mkdir()
    (hidden / "huggingface_hub.py").write_text("raise ImportError('hidden')")
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    with running_server(NAME, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", PYTHONPATH=path) as server:
        assert server.raw("a", max_new_tokens=1, top_k=1)["response"] == "b"
    shutil.rmtree(cache)
    told = start(CHECKPOINT_PATH=NAME, HF_HOME=str(tmp_path), PYTHONPATH=path, START_PORT="0")
    assert told.returncode == 2 and "pip install huggingface_hub" in told.stderr and "CHECKPOINT_PATH=/models/" in told.stderr


@pytest.mark.parametrize(
    "name, changes, words",
    [
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, ["HF_ENDPOINT", "HF_TOKEN", "CHECKPOINT_PATH=/models/"]),
        (NAME, {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE", "CHECKPOINT_PATH=/models/"]),
        ("org/gated", {}, ["/org/gated", "accept", "HF_TOKEN"]),
        ("org/nosuch", {}, ["/org/nosuch", "HF_TOKEN", "CHECKPOINT_PATH=/models/"]),
        (NAME + "/nosuch.gguf", {}, ["nosuch.gguf", "model.safetensors"]),
    ],
    ids=["out of reach", "offline", "gated", "unknown", "no such file"],
)
def test_08_what_cannot_be_had_is_one_line(hub, tmp_path, name, changes, words):
    pytest.importorskip("huggingface_hub")
    told = start(CHECKPOINT_PATH=name, **{**_settings(tmp_path / "home", hub.server_port), **changes})
    line = told.stderr.strip().splitlines()[-1]  # behind bars of progress
    assert "Traceback" not in told.stderr
    assert told.returncode == 2 and line.startswith("error: ") and name in line
    for word in words:
        assert word in line
