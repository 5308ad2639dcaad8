"""Tiny random models of every family give the logits of transformers, whichever way the tokens are cut into steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from models_table import check_features
from runner import Runner

LENGTH = 60
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rope(kind: dict, **more) -> dict:
    return {"rope_theta": 5000.0, **kind, **more}


CASES = {
    "llama": ("llama", {}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 6}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    "llama-linear": ("llama", {"rope_parameters": rope({"rope_type": "linear", "factor": 3.0})}),
    "llama-dynamic": ("llama", {"max_position_embeddings": 24, "rope_parameters": rope({"rope_type": "dynamic", "factor": 2.0})}),
    "llama-llama3": ("llama", {"rope_parameters": rope(LLAMA3)}),
    "llama-yarn": ("llama", {"rope_parameters": rope(YARN)}),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": rope(YARN, attention_factor=1.3)}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": rope(YARN, mscale=0.7, mscale_all_dim=0.4)}),
    "llama-yarn-betas": ("llama", {"rope_parameters": rope(YARN, beta_fast=8.0, beta_slow=2.0, truncate=False)}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": rope(YARN)}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
}


def backends() -> dict[str, _core.Backend]:
    return {"reference": _core.reference_backend(), "cpu": _core.cpu_backend(threads=1, quantize_activations=False)}


def random_ids(count: int, vocab: int = 96, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def expected_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, backend: str, tmp_path: Path) -> None:
    kind, settings = CASES[case]
    model = tiny_model(kind, tmp_path, **settings)
    ids = random_ids(LENGTH)
    expected = expected_logits(model, ids)
    runner = Runner(backends()[backend], open_checkpoint(str(tmp_path)), length=LENGTH, tokens=LENGTH)
    check_features(runner.program, runner.family)
    whole = runner.logits(ids)
    assert np.abs(expected).max() > 0.5  # random weights of visible size: equality means something
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    for chunks in ([13, 1, 30, 16], [20, *[1] * 40]):  # chunked prefill; prefill, then decode
        np.testing.assert_allclose(runner.logits(ids, chunks), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 0.4}, {"beta_fast": 8.0}])
def test_yarn_by_every_name_over_its_whole_context(more: dict, tmp_path: Path) -> None:
    """vllm #10293: `type` is the old name of `rope_type`, rope_scaling that of rope_parameters; neither may shorten the context."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, **more}
    new = rope({"rope_type": "yarn", **scaling})
    model = tiny_model("llama", tmp_path, max_position_embeddings=64, num_hidden_layers=2, rope_parameters=new)
    ids = random_ids(200)
    expected = expected_logits(model, ids)
    for config in (
        {"rope_parameters": new},
        {"rope_scaling": {"rope_type": "yarn", **scaling}, "rope_theta": 5000.0, "rope_parameters": None},
        {"rope_scaling": {"type": "yarn", **scaling}, "rope_theta": 5000.0, "rope_parameters": None},
    ):
        edit_config(tmp_path, **config)
        runner = Runner(backends()["cpu"], open_checkpoint(str(tmp_path)), length=200, tokens=200)
        np.testing.assert_allclose(runner.logits(ids), expected, rtol=0, atol=1e-4)
        assert runner.program.max_positions == 256
