"""Starting: a user's mistake is one line on stderr and status 2, before the port opens; closed streams are no mistake."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import httpx
import pytest
from checkpoints import gguf_from_model
from folders import tiny_model
from maga_transformer import LLM
from maga_transformer.config import Config, ConfigError
from maga_transformer.server import serve
from maga_transformer.tokenizer.bytelevel import LETTER_OF

from .chain_model import write_chain
from .conftest import demo_model

COMMAND = "maga_transformer.cli"


def start(*arguments, module="maga_transformer.start_server", **environment):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "DEVICE": "cpu", **environment})


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, ["CHECKPOINT_PATH"]),
        ({"CHECKPOINT_PATH": "/nowhere/model.gguf"}, ["/nowhere/model.gguf"]),
        ({"CHECKPOINT_PATH": "DEMO", "MODEL_TYPE": "lama"}, ["lama", "llama", "qwen_2"]),
        ({"CHECKPOINT_PATH": "DEMO", "TOKENIZER_PATH": "/nowhere"}, ["/nowhere"]),
        ({"CHECKPOINT_PATH": "DEMO", "TP_SIZE": "2"}, ["TP_SIZE=2"]),
        ({"CHECKPOINT_PATH": "DEMO", "MAX_SEQ_LEN": "100000"}, ["MAX_SEQ_LEN=100000", "8192"]),
        ({"CHECKPOINT_PATH": "DEMO", "KV_CACHE_MEM_MB": "1", "MAX_SEQ_LEN": "4096"}, ["KV_CACHE_MEM_MB", "MAX_SEQ_LEN=4096"]),
        ({"CHECKPOINT_PATH": "DEMO", "KV_CACHE_MEM_MB": "99999999"}, ["KV_CACHE_MEM_MB=99999999", "available"]),
        ({"CHECKPOINT_PATH": "DEMO", "STOP_WORDS_LIST": "[[999999]]"}, ["STOP_WORDS_LIST", "999999"]),
        ({"CHECKPOINT_PATH": "DEMO", "FORCE_STOP_WORDS_STR": '[""]'}, ["FORCE_STOP_WORDS_STR", "empty"]),
        ({"CHECKPOINT_PATH": "DEMO", "ISA": "z80"}, ["z80"]),
        ({"CHECKPOINT_PATH": "DEMO", "DEVICE": "cpu", "ACT_TYPE": "fp16"}, ["ACT_TYPE=fp16", "auto, fp32"]),
        ({"CHECKPOINT_PATH": "DEMO", "DEVICE": "cuda:99"}, ["DEVICE=cuda:99"]),
        ({"CHECKPOINT_PATH": "DEMO", "LOAD_FORMAT": "dummy"}, ["LOAD_FORMAT=dummy", "config.json"]),
        ({"CHECKPOINT_PATH": "DEMO", "MAGA_FAULT": "x"}, ["x"]),
        ({"CHECKPOINT_PATH": "DEMO", "GENERATION_CONFIG_PATH": "/nowhere"}, ["GENERATION_CONFIG_PATH=/nowhere"]),
        ({"CHECKPOINT_PATH": "DEMO", "MAGA_HOST": "no.such.host.invalid"}, ["no.such.host.invalid"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_mistakes(environment, words):
    environment = {name: str(demo_model()) if value == "DEMO" else value for name, value in environment.items()}
    result = start(**{"START_PORT": "0", **environment})
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ") or "\nerror: " in result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("port", ["abc", "0", "65536"])
def test_the_demo_names_a_wrong_port(port):
    result = start(module="maga_transformer.demo", START_PORT=port)
    assert result.returncode == 1 and result.stderr == f"START_PORT={port}: must be a port from 1 to 65535\n"


def test_a_chat_template_that_does_not_parse(tmp_path):
    """sglang #892."""
    file = tmp_path / "broken.jinja"
    for template, word in (("{{ messages }}\n{% if %}", "line 2"), ("{{ messages | shuffle }}", "No filter named 'shuffle'")):
        file.write_text(template)
        result = start(CHECKPOINT_PATH=str(demo_model()), CHAT_TEMPLATE=str(file), START_PORT="0")
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert str(file) in result.stderr and word in result.stderr


def test_ggufs_that_lack_something(tmp_path):
    """ollama #10930: one line that names the file and what it lacks, before the port opens."""
    tokens = [*LETTER_OF.values(), "<s>", "</s>"]
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 2,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    tokens[0] = "ab"  # what the merge makes
    model = tiny_model("llama", tmp_path / "folder", vocab_size=258)
    whole = gguf_from_model(model, tmp_path / "whole.gguf", **vocabulary).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-33])  # up to 31 bytes at the end are padding
    without = {key: value for key, value in vocabulary.items() if key != "tokenizer.ggml.merges"}
    gguf_from_model(model, tmp_path / "merges.gguf", **without)
    gguf_from_model(model, tmp_path / "pre.gguf", **{**vocabulary, "tokenizer.ggml.pre": "martian"})
    for name, word in (("cut", "ends at byte"), ("merges", "tokenizer.ggml.merges is missing"), ("pre", "'martian' is not")):
        result = start(CHECKPOINT_PATH=str(tmp_path / f"{name}.gguf"), START_PORT="0")
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert f"{name}.gguf" in result.stderr and word in result.stderr
    with LLM(tmp_path / "whole.gguf", kv_cache_mem_mb=16) as llm:
        assert llm.generate("ab", max_new_tokens=2, ignore_eos=True).usage.output_tokens == 2


@pytest.mark.parametrize("streams", ["closed", "without a reader"])
def test_a_server_whose_output_nobody_takes_serves(tmp_path, streams):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    close = "<&- >&- 2>&-" if streams == "closed" else ""
    server = subprocess.Popen(
        ["sh", "-c", f'exec "$0" -m maga_transformer.start_server {close}', sys.executable],
        env={**os.environ, "DEVICE": "cpu", "CHECKPOINT_PATH": str(write_chain(tmp_path, ["ab"])), "START_PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    server.stdout.close()
    transport = httpx.HTTPTransport(retries=8)  # 0.5 s, 1 s, 2 s, ... between tries to connect
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=60) as client:
        while client.get("/health").status_code == 503:
            time.sleep(0.1)
        assert client.post("/", json={"prompt": "a", "max_new_tokens": 1, "top_k": 1}).json()["response"] == "b"
    server.terminate()
    assert server.wait(60) == 0


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = start(CHECKPOINT_PATH=str(demo_model()), START_PORT=str(port))
    assert result.returncode == 2 and str(port) in result.stderr and "START_PORT" in result.stderr


def test_a_port_that_another_listens_on_first_is_named(monkeypatch):
    """Until one of them listens, several processes may bind a port."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", 0))
        port = other.getsockname()[1]
        bind = serve._bind
        monkeypatch.setattr(serve, "_bind", lambda config: (bind(config), other.listen())[0])
        with pytest.raises(ConfigError, match=f"{port}.*START_PORT"):
            serve.serve(Config.without_environment(checkpoint_path="x", port=port))


def test_an_end_of_text_outside_the_vocabulary_is_named(tmp_path, caplog):
    write_chain(tmp_path, ["ab"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 320]}')
    with caplog.at_level("WARNING"), LLM(tmp_path, device="cpu", kv_cache_mem_mb=8) as llm:
        assert llm.generate("a", max_new_tokens=9, temperature=0).text == "b"
    named = "eos_token_id [320]: outside the model's vocabulary of 320 tokens"
    assert named in caplog.text
    for file in ("config.json", "tokenizer_config.json"):
        config = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({name: value for name, value in config.items() if "eos" not in name}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [320]}')
    with pytest.raises(ConfigError, match=re.escape(named)):
        LLM(tmp_path, device="cpu", kv_cache_mem_mb=8)


def test_ends_that_are_no_token_are_named_in_one_line(tmp_path, caplog):
    write_chain(tmp_path, ["ab"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>", -1, 2, true, 1.5]}')
    with caplog.at_level("WARNING"), LLM(tmp_path, device="cpu", kv_cache_mem_mb=8) as llm:
        assert llm.generate("a", max_new_tokens=9, temperature=0).text == "b"
    lines = [record.message for record in caplog.records if "eos_token_id" in record.message]
    assert len(lines) == 1 and "'</s>' (generation_config.json), -1 (generation_config.json), True" in lines[0], lines
    assert "1.5" in lines[0] and str(tmp_path) in lines[0]


WRONG = '{"temperature": -0.5, "top_p": "high", "top_k": 5, "repetition_penalty": 0, "eos_token_id": 2}'


def test_sampling_defaults_that_cannot_be_are_named(tmp_path, caplog):
    """Refused where they are to be used; a warning where the model brings them and nobody asked for them."""
    write_chain(tmp_path, ["ab"])
    (tmp_path / "generation_config.json").write_text(WRONG)
    with caplog.at_level("WARNING"), LLM(tmp_path, device="cpu", kv_cache_mem_mb=8) as llm:
        assert llm.generate("a", max_new_tokens=9, temperature=0).text == "b"
    lines = [record.message for record in caplog.records if "generation_config.json" in record.message]
    assert len(lines) == 1 and all(f"{name}=" in lines[0] for name in ("temperature", "top_p", "repetition_penalty")), lines
    assert "top_k" not in lines[0] and "-0.5" in lines[0] and "high" in lines[0]
    with pytest.raises(ConfigError, match=r"GENERATION_CONFIG_PATH=.*temperature=-0.5.*; .*top_p='high'.*; .*repetition_penalty=0"):
        LLM(tmp_path, device="cpu", kv_cache_mem_mb=8, generation_config_path=str(tmp_path))


def test_flags():
    result = start("--max_model_len", "9", "--port", "1", "/x", module="maga_transformer.cli")
    assert result.returncode == 2
    result = start("config", "/x", "--max_model_len", "9", "--act-type", "fp32", module="maga_transformer.cli", THREADS="3")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert " 9 " in lines["max_seq_len"] and "flag" in lines["max_seq_len"]
    assert "Without" not in result.stdout
    told = start(
        "config", "/x", "--served-model-name", "a", "org/b", "--api-key", "c", "--api-key", "d,e", module=COMMAND, WARM_UP="1"
    )
    assert "['a', 'org/b'] " in told.stdout and "3 set" in told.stdout and told.stdout.endswith("# Without effect here\nWARM_UP\n")
    told = start("config", "--served_model_name", "a", "b", "/x", module=COMMAND)
    assert "['a', 'b'] " in told.stdout and "checkpoint_path" in told.stdout and " /x " in told.stdout
    assert " 3 " in lines["threads"] and "environment THREADS" in lines["threads"]
    assert "fp32" in lines["act_type"] and "default" in lines["port"]
    assert start("serve", "--nonsense", module="maga_transformer.cli").returncode == 2


def test_run_and_explain():
    result = start(
        "run", str(demo_model()), "1 2 3 4 5 6", "--max-new-tokens", "4", "--max-model-len", "128", module="maga_transformer.cli"
    )
    assert result.returncode == 0 and result.stdout.startswith(" 7 8"), result.stderr
    result = start("explain", str(demo_model()), module="maga_transformer.cli")
    assert result.returncode == 0 and "linear" in result.stdout.lower(), result.stderr


def test_importing_the_package_is_light():
    """The engine, the server and the terminal come when they are used."""
    heavy = "('numpy', 'starlette', 'torch', 'typer')"
    code = f"import sys, maga_transformer, maga_transformer.start_server; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_server_needs_no_torch():
    code = "import sys, maga_transformer.server.serve; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False False"
