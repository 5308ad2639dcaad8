"""Fixtures that several folders of tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from maga_transformer import _core
from maga_transformer.demo import demo_model

sys.path.insert(0, str(Path(__file__).parent))  # cards.py, checkpoints.py, folders.py, jobs.py, runner.py, tiny_families.py
import cards  # noqa: F401  looks for a GPU before it is hidden


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bodies", type=int, default=10_000, help="bodies that tests/server draws and sends, of all routes together")


@pytest.fixture(scope="session", autouse=True)
def no_gpu_by_itself() -> Iterator[None]:
    """DEVICE=auto is the CPU in tests, wherever they run; those in tests/gpu and tests/ops ask for the card by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "cuda_devices", lambda: ([], "hidden by tests/conftest.py"))
        yield


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return demo_model()


@pytest.fixture(scope="session")
def demo_folder(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in fp32 as a Hugging Face folder."""
    from folders import demo_folder as write_demo_folder

    return write_demo_folder(demo_gguf, tmp_path_factory.mktemp("smollm2"))
