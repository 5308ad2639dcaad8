"""Line 13: the code blocks of README and docs, run as they stand; only paths, ports and sizes are put in."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quantize.tiny import model_folder

from ..conftest import demo_model

ROOT = Path(__file__).parents[3]
BLOCKS = [
    pytest.param(language, block, id=f"{page.name} line {text[:at].count(chr(10)) + 1}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for text in [page.read_text()]
    for at, language, block in [
        (match.start(), match[1], match[2])
        for match in re.finditer(r"^```(bash|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
]
# What would take minutes is cut down, and nothing else.
SHORTER = {
    "--num-prompts 64": "--num-prompts 4 --output-len 8",
    "--method gptq": "--method gptq --calibration text.txt --samples 2 --sample-length 64",
    "--method awq": "--method awq --calibration text.txt --samples 2 --sample-length 64",
    "maga eval": "maga eval --text text.txt",
    "maga_choices,maga_text,maga_answers": "maga_choices",  # all of them in test_lm_eval.py
    "max_new_tokens=100": "max_new_tokens=10",
    '"max_new_tokens": 1000': '"max_new_tokens": 10',
}
# Lines that start what runs already, or that CI runs itself.
SERVES = re.compile(r"CHECKPOINT_PATH=\S+ python3 -m maga_transformer\.start_server$")
ELSEWHERE = re.compile(r"make |\. \.venv/bin/activate|pip install ")
CLIENTS = ("lm_eval", "guidellm")


def as_here(text, server, folder):
    for written, short in SHORTER.items():
        text = text.replace(written, short)
    text = text.replace("http://localhost:8088", server.url).replace("/models/SmolLM2-135M-Instruct.Q4_1.gguf", str(demo_model()))
    text = re.sub(r"\bPATH\b", str(demo_model()), text).replace("MODEL", demo_model().stem)
    return re.sub(r"\bOUT\b", str(folder / "out"), re.sub(r"\bIN\b", str(folder / "in"), text))


def run(command, folder, **more):
    """In a folder of its own, with `maga` as this Python has it, found and installed or not."""
    (folder / "bin").mkdir(exist_ok=True)
    maga = folder / "bin" / "maga"
    maga.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m maga_transformer.cli "$@"\n')
    maga.chmod(0o755)
    environment = {**os.environ, "DEVICE": "cpu", "MAX_SEQ_LEN": "200", "KV_CACHE_MEM_MB": "128", "NO_PROXY": "localhost"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    environment["PATH"] = os.pathsep.join([str(maga.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    packages = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in packages if part)
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, **more)


@pytest.mark.parametrize("language, block", BLOCKS)
def test_13_an_example_works(request, server, tmp_path, language, block):
    if language == "python":
        done = run([sys.executable, "-c", as_here(block, server, tmp_path)], tmp_path)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        return
    (tmp_path / "text.txt").write_text("Alice was beginning to get very tired of sitting by her sister on the bank. " * 20)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    if re.search(r"\bTOKENIZER\b", block):
        block = re.sub(r"\bTOKENIZER\b", str(request.getfixturevalue("demo_folder")), block)
    (tmp_path / "prompts.txt").write_text("One, two,\nRed, green,\n")
    if re.search(r"\bIN\b", block):
        model_folder("llama", tmp_path / "in", hidden_size=128, intermediate_size=256)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in filter(None, block.replace("\\\n", " ").splitlines()):
        if ELSEWHERE.match(line):
            assert not line.startswith("make ") or line.split()[1] in targets, line
        elif not SERVES.match(line):
            _run_line(line, server, tmp_path)


def _run_line(line, server, folder):
    command = as_here(line, server, folder)
    name = command.split()[0]
    assert name in ("maga", "curl", *CLIENTS), f"no way to run this example: {line}"
    if shutil.which(name) is None and name != "maga":
        assert name == "curl" or name in CLIENTS
        return
    if name == "maga" and "quantize" in command:
        shutil.rmtree(folder / "out", ignore_errors=True)
    done = run(["sh", "-c", command], folder, **({"input": "Hi\n"} if " chat " in command else {"stdin": subprocess.DEVNULL}))
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    if " quantize " in command:
        assert (folder / "out" / "config.json").is_file()
    else:
        assert ('"response"' if name == "curl" else "") in done.stdout and done.stdout.strip(), line
