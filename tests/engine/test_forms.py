"""The engine over the CPU backend with every form of weights and every precision of keys and values, on a tiny model: what a
request gets does not depend, by a single bit, on how its prompt is cut, what runs beside it, or what the prefix cache holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import engine_cases
import numpy as np
import pytest
from engine_cases import Model, Results
from folders import tiny_model
from jobs import Job, assert_equal
from maga_transformer import _core, kv_cache
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from safetensors.torch import load_file, save_file

WEIGHTS = ("fp32", "bf16", "int8", "int4", "fp8")
KV = ("fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "adaptive")
TEXT = np.random.default_rng(1).integers(0, 96, 110).tolist()


def adaptive(backend: _core.Backend, folder: Path, quantization: str) -> list[str]:
    """Layers of several precisions, as a budget that int8 everywhere would break gives them."""
    checkpoint = open_checkpoint(str(folder))
    program, _ = build_program(checkpoint)
    weights = load_weights(backend, program, checkpoint, quantization=quantization)
    logits = functools.partial(kv_cache.logits_of, backend, program, weights, TEXT[:40], engine_cases.PAGE_TOKENS)
    layers = len(program.cache_layers)
    chosen = kv_cache.choose_dtypes(logits, layers, "fp32", 0.9 * kv_cache.choose_dtypes(logits, layers, "fp32", 0.5).error)
    assert len(set(chosen.dtypes)) > 1
    return chosen.dtypes


class FormModel(Model):
    def __init__(self, folders: dict[str, Path], weights: str, kv: str) -> None:
        folder = folders["bf16" if weights == "bf16" else "fp32"]
        quantization = weights if weights in ("int8", "int4", "fp8") else ""
        backend = _core.cpu_backend(threads=1, quantize_activations=bool(quantization))
        kv_dtype = adaptive(backend, folder, quantization) if kv == "adaptive" else kv
        super().__init__(backend, open_checkpoint(str(folder)), TEXT, kv_dtype, quantization)

    def assert_agrees(self, found: Results, jobs: Sequence[Job], expected: Results) -> None:
        assert_equal(found, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    both = {name: tmp_path_factory.mktemp(name) for name in ("fp32", "bf16")}
    for name, folder in both.items():
        tiny_model("llama", folder, hidden_size=64, intermediate_size=96)
        if name == "bf16":
            file = folder / "model.safetensors"
            save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file)
    return both


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_requests_do_not_see_each_other(weights: str, kv: str, folders: dict[str, Path]) -> None:
    model = FormModel(folders, weights, kv)
    engine_cases.batched_and_chunked_equal_alone(model, {})
    engine_cases.batched_and_chunked_equal_alone(model, {"max_sequences": 3, "token_budget": 5})
    engine_cases.prefix_hit_equals_miss_at_every_length(model)
    engine_cases.decoded_pages_are_as_good_as_prefilled_ones(model)
