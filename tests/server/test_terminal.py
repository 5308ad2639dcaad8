"""`maga run`, `complete`, `chat` and `bench` on the terminal, in process and against a server."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from maga_transformer.cli.talk import printable
from settings_table import FILE, document

from .chain_model import write_chain
from .conftest import demo_model

LIMITS = ("--max-model-len", "256", "--kv-cache-mem-mb", "64")


def maga(*arguments, text=None, **environment):
    command = [sys.executable, "-m", "maga_transformer.cli", *map(str, arguments)]
    environment = {**os.environ, "DEVICE": "cpu", "NO_COLOR": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, input=text)


def test_docs_settings_is_what_the_config_says():
    assert FILE.read_text(encoding="utf-8") == document(), "python tests/settings_table.py writes it anew"


def test_help_is_in_groups_and_names_every_setting():
    told = maga("serve", "--help", COLUMNS="200")
    assert told.returncode == 0
    for group in ("The model", "Arithmetic", "Memory and batching", "The server", "Operation"):
        assert f"─ {group} ─" in told.stdout
    for flag in ("--model", "--dtype", "--max-model-len", "--no-enable-prefix-caching", "--ssl-certfile", "START_PORT"):
        assert flag in told.stdout
    assert "--tensor-parallel-size" not in told.stdout
    short = maga("chat", "--help", COLUMNS="200").stdout
    assert "--system-prompt" in short and "--max-model-len" in short and "--ssl-certfile" not in short


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serve", "/x", "--max-seq", "3"], ["--max-seq", "--max-seq-len"]),
        (["srve"], ["srve", "serve"]),
        (["serve", "/x", "-tp", "2"], ["--tensor-parallel-size=2", "valid: 1"]),
        (["serve", "/x", "--enable-lora"], ["--enable-lora", "not supported yet"]),
        (["serve", "/x", "--revision", "main"], ["--revision=main", "files on this machine"]),
        (["serve", "/x", "--ssl-keyfile", "k"], ["ssl_keyfile=k", "ssl_certfile"]),
        (["config", "/x", "--metrics-prefix", "9"], ["9"]),
        (["chat", "--url", "http://127.0.0.1:9", "--message", "a"], ["http://127.0.0.1:9", "no server answers"]),
        (["complete", "/nowhere/x.gguf", "a"], ["/nowhere/x.gguf"]),
    ],
)
def test_mistakes(arguments, words):
    told = maga(*arguments)
    assert told.returncode == 2 and "Traceback" not in told.stderr
    for word in words:
        assert word in told.stderr


def test_vllms_other_flags_are_taken_where_they_ask_for_nothing(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("port: 4\nmax-model-len: 77\nlog-level: warning\n")
    told = maga("config", "/x", "-tp", "1", "--enforce-eager", "--no-enable-prefix-caching", "--port", "5", MAGA_CONFIG=str(file))
    assert told.returncode == 0, told.stderr
    assert "--enforce-eager has no effect here" in told.stderr and "-tp" not in told.stderr
    lines = {line.split()[0]: line for line in told.stdout.splitlines()}
    assert re.search(r" False +flag", lines["reuse_cache"]) and re.search(r" 5 +flag port", lines["port"])
    assert str(file) in lines["max_seq_len"] and " WARNING " in lines["log_level"]
    assert "# Operation" in told.stdout


def test_complete_in_process_and_by_a_server_say_the_same(server):
    local = maga("complete", demo_model(), *LIMITS, "--dtype", "fp32", "--max-tokens", "8", text="1 2 3 4\n\nOne day\n")
    remote = maga("complete", "--url", server.url + "/v1", "--max-tokens", "8", text="1 2 3 4\n\nOne day\n")
    assert local.returncode == remote.returncode == 0, local.stderr + remote.stderr
    assert local.stdout == remote.stdout and local.stdout.startswith(" 5 6")
    assert maga("run", server.url, "1 2 3 4", "--max-tokens", "8").stdout == local.stdout.splitlines(True)[0]


def test_a_chat_with_a_server_keeps_the_conversation(server):
    told = maga(
        "chat", server.url, "--temperature", "0", "--max-tokens", "12", text="Hello\n/bogus\n/clear\nHello\nAnd now?\n/exit\nno\n"
    )
    assert told.returncode == 0, told.stderr
    turns = []
    for words in ("Hello", "And now?"):
        turns.append({"role": "user", "content": words})
        answer = server.post("/v1/chat/completions", {"messages": turns, "temperature": 0, "max_tokens": 12}).json()
        turns.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    first, second = turns[1]["content"], turns[3]["content"]
    assert told.stdout == f"{first}\n{first}\n{second}\n" and "/clear begins anew" in told.stderr


@pytest.mark.parametrize("where", ["local", "remote"])
def test_an_error_ends_its_turn_and_not_the_chat(server, where):
    """The message that is too long is no part of what comes after it."""
    speaker = [server.url] if where == "remote" else [demo_model(), *LIMITS, "--act-type", "fp32"]
    told = maga("chat", *speaker, "--temperature", "0", "--max-tokens", "12", text=f"Hello\n{'word ' * 400}\nAnd now?\n")
    turns = []
    for words in ("Hello", "And now?"):
        turns.append({"role": "user", "content": words})
        answer = server.post("/v1/chat/completions", {"messages": turns, "temperature": 0, "max_tokens": 12}).json()
        turns.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    errors = [line for line in told.stderr.splitlines() if line.startswith("error: ")]
    assert told.stdout == f"{turns[1]['content']}\n{turns[3]['content']}\n", told.stderr
    assert len(errors) == 1 and "256 tokens" in errors[0] and "Traceback" not in told.stderr
    assert told.returncode == 2, "a script must see that not all was answered"


def test_a_servers_refusal_is_one_line(server):
    told = maga("chat", server.url, "--model-name", "nobody", "--message", "a")
    assert told.returncode == 2 and told.stderr.startswith("error: the server answered 404") and "nobody" in told.stderr


def test_what_a_model_says_does_not_command_the_terminal(tmp_path):
    assert printable("a\x1b[31mb\x07\x9b2J\n\tc\u009d") == "a[31mb2J\n\tc"
    path = write_chain(tmp_path / "escape", ["go", 27, "]0;x", 7, "!", "<|endoftext|>"])
    assert maga("run", path, "g", "--max-tokens", "20").stdout == "o]0;x!\n"


def test_on_a_terminal_an_answer_can_be_stopped(server):
    """Ctrl-C ends the answer, not the chat; Ctrl-D ends the chat."""
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "maga_transformer.cli", "chat", server.url, "--temperature", "0", "--max-tokens", "200"]
    process = subprocess.Popen(
        command,
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "TERM": "dumb"},
        # Tests that run in the background of a shell inherit that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(other)
    seen = ""

    def until(pattern):
        nonlocal seen
        end = time.monotonic() + 90
        while not re.search(pattern, seen):
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")

    try:
        until("> $")
        os.write(terminal, b"Write a very long story about the sea.\n")
        until(r"sea\.\r\n.{20}")
        process.send_signal(signal.SIGINT)
        until(r"\[stopped\][^>]*> $")
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)


def test_bench_tells_speed_and_share_of_the_limit(server):
    options = ("--num-prompts", "4", "--max-concurrency", "2", "--input-len", "8", "--output-len", "6")
    for told in (maga("bench", demo_model(), *LIMITS, *options), maga("bench", "--url", server.url, *options)):
        assert told.returncode == 0, told.stderr
        lines = {line[:15].strip(): line[16:] for line in told.stdout.splitlines()}
        assert "4 requests, 2 at once, 8 tokens in, 6 out" in lines["load"] and "note" not in lines
        assert float(lines["output"].split()[0].replace(",", "")) > 0
        assert lines["first token"].startswith("p50 ") and lines["between tokens"].startswith("p50 ")
        share = re.match(r"(\d+)%: the steps took", lines["of the limit"])
        assert share and int(share[1]) > 0
    assert json.loads(server.get("/worker_status").text)["onflight_requests"] == 0
