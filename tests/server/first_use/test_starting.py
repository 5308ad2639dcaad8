"""Lines 2 to 7: a start from nothing but a path, what it tells, and what it says about mistakes and odd machines."""

import os
import re
import shutil
import subprocess
import sys

import httpx
import pytest
from maga_transformer import startup
from maga_transformer.config import Config, ConfigError

from ..chain_model import write_chain
from ..conftest import demo_model, running_server
from ..test_start import start

ORDER = ["maga_transformer", "device", "model", "tokens", "chat", "K/V", "context", "memory", "page", "ready", "try"]


def test_02_a_folder_alone_is_enough(demo_folder):
    with running_server(demo_folder, KV_CACHE_MEM_MB="64") as server:
        assert server.raw("1 2 3 4 5 6", max_new_tokens=4, temperature=0, top_k=1)["response"].startswith(" 7 8")


def test_02_what_is_missing_is_named_with_an_example():
    result = start()
    (line,) = result.stderr.strip().splitlines()
    assert result.returncode == 2 and line.startswith("error: CHECKPOINT_PATH is not set") and "CHECKPOINT_PATH=/models/" in line


def test_03_the_start_tells_what_runs_in_this_order_and_its_command_works(server):
    told = [line.split()[0] for line in server.lines if line.split() and line.split()[0] in ORDER]
    assert told[: len(ORDER)] == ORDER
    lines = {line.split()[0]: line for line in server.lines if line.split()}
    assert re.search(r"avx|AVX|generic|neon|NEON", lines["device"]) and "q4_1" in lines["model"].lower()
    assert "checkpoint" in lines["tokens"] and "tokenizer.chat_template" in lines["chat"]
    assert re.search(r"weights [\d.]+%, K/V [\d.]+%", lines["memory"])
    assert re.search(r"\d+ sequences of that length fit", lines["context"])
    assert re.fullmatch(r"ready +http://localhost:\d+", lines["ready"])
    if shutil.which("curl"):
        command = lines["try"].removeprefix("try").strip()
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env={**os.environ, "NO_PROXY": "localhost"})
        assert '"response"' in done.stdout, done.stderr


def test_03_sampling_defaults_of_the_model_are_told(tmp_path):
    folder = write_chain(tmp_path / "chain", ["a", "b"])
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    with running_server(folder, GENERATION_CONFIG_PATH=str(tmp_path)) as server:
        assert any(re.match(r"sampling +temperature=0.25$", line) for line in server.lines)


def test_04_too_little_memory_lowers_the_context_with_both_numbers(caplog):
    small = {"checkpoint_path": str(demo_model()), "device": "cpu", "kv_cache_mem_mb": 8}
    startup.load_runtime(Config.without_environment(**small)).close()
    (warning,) = [record.getMessage() for record in caplog.records if "context is lowered" in record.getMessage()]
    held = int(re.search(r"holds (\d+) tokens", warning)[1])
    assert f"from {8192} to" in warning and 0 < held < 8192 and "MAX_SEQ_LEN" in warning
    with pytest.raises(ConfigError, match=r"MAX_SEQ_LEN=8192 needs [\d.]+ MiB; raise KV_CACHE_MEM_MB or lower MAX_SEQ_LEN"):
        startup.load_runtime(Config.without_environment(**small, max_seq_len=8192))


def test_05_without_a_chat_template_chats_work_and_are_marked(tmp_path):
    folder = write_chain(tmp_path / "chain", ["\n", "hi", "<|endoftext|>"])
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 5}
    with running_server(folder) as server:
        answer = server.post("/v1/chat/completions", body)
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert answer.headers["x-maga-chat-template"] == "chatml (the model has none)"
        assert any("no chat template" in line and "plain" in line for line in server.lines)
        assert server.post("/v1/messages", body).headers["x-maga-chat-template"].startswith("chatml")
    with running_server(folder, CHAT_TEMPLATE="plain") as server:
        assert "x-maga-chat-template" not in server.post("/v1/chat/completions", body).headers
        assert server.post("/chat/render", body).json()["input_prompt"] == "User: x\nAssistant:"
    refused = start(CHECKPOINT_PATH=str(folder), CHAT_TEMPLATE="nosuch", START_PORT="0")
    assert refused.returncode == 2 and "CHAT_TEMPLATE=nosuch" in refused.stderr and "chatml, llama-2, llama-3" in refused.stderr


def _pointer(folder):
    (folder / "model.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    return folder / "model.gguf", "Git LFS pointer"


def _half(folder):
    (folder / "model.gguf").write_bytes(demo_model().read_bytes()[: 50 << 20])
    return folder / "model.gguf", "truncated"


def _shard(folder):
    write_chain(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}')
    return folder, "model-00002-of-00002.safetensors"


def _page(folder):
    (folder / "model.gguf").write_text("<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n")
    return folder / "model.gguf", "HTML"


def _architecture(folder):
    write_chain(folder)
    config = (folder / "config.json").read_text().replace("LlamaForCausalLM", "ZebraForCausalLM").replace('"llama"', '"zebra"')
    (folder / "config.json").write_text(config)
    return folder, "zebra"


@pytest.mark.parametrize("make", [_pointer, _half, _shard, _page, _architecture], ids=lambda make: make.__name__.strip("_"))
def test_06_a_wrong_file_is_named_before_anything_is_allocated(tmp_path, monkeypatch, make):
    path, word = make(tmp_path)
    monkeypatch.setattr(startup, "make_backend", lambda *_: pytest.fail("the device was asked for"))
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        startup.load_runtime(Config.without_environment(checkpoint_path=str(path), device="cpu"))
    assert str(tmp_path) in str(error.value) and word.lower() in str(error.value).lower() and "\n" not in str(error.value)


# Taken and unknown addresses: tests/server/test_start.py; a control group's limit: test_memory.py; instruction sets: tests/ops.
ODD = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
os.execv(sys.executable, [sys.executable, "-m", "maga_transformer.start_server"])
"""


def test_07_one_core_no_shared_memory_a_home_that_cannot_be_written_and_ipv6(tmp_path):
    command = [sys.executable, "-c", ODD]
    hidden = (
        shutil.which("unshare")
        and subprocess.run(["unshare", "-m", "umount", "-l", "/dev/shm"], capture_output=True).returncode == 0
    )
    if hidden:
        command = ["unshare", "-m", "sh", "-c", 'umount -l /dev/shm && exec "$@"', "sh", *command]
    environment = {**os.environ, "HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "DEVICE": "cpu", "START_PORT": "0"}
    environment |= {"MAGA_HOST": "::1", "CHECKPOINT_PATH": str(write_chain(tmp_path / "chain", ["a", "b"])), "ISA": "generic"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("try "):
                break
        addresses = [line.split()[-1] for line in lines if line.startswith("ready")]
        assert addresses and addresses[0].startswith("http://[::1]:"), "".join(lines)
        with httpx.Client(trust_env=False, timeout=60) as client:
            assert client.post(addresses[0], json={"prompt": "a", "max_new_tokens": 1, "top_k": 1}).json()["response"] == "b"
    finally:
        process.terminate()
        assert process.wait(60) == 0
