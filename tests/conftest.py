"""Fixtures that several folders of tests share."""

import sys
from pathlib import Path

import pytest
from maga_transformer.demo import demo_model

sys.path.insert(0, str(Path(__file__).parent))  # checkpoints.py, folders.py, jobs.py, runner.py


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return demo_model()


@pytest.fixture(scope="session")
def demo_folder(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in fp32 as a Hugging Face folder."""
    from folders import demo_folder as write_demo_folder

    return write_demo_folder(demo_gguf, tmp_path_factory.mktemp("smollm2"))
