"""Mixtures of experts whose weights stay codes on the card: whole models near the reference backend's with the same codes, and the
same whether tokens come one by one, in pieces or all at once."""

from pathlib import Path

import numpy as np
import pytest
from cards import CARDS, card, needs_card
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from runner import Runner

pytestmark = needs_card

LENGTH = 90
SETTINGS = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
}
MODELS = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 24, "moe_intermediate_size": 160, "norm_topk_prob": True},
}
# Root mean square, relative to the logits'. fp8: linears beside the experts round tokens to e4m3 on some cards; and where logits of
# a router are close, one arithmetic takes another expert than the next.
TOLERANCE = {"int4": 0.2, "int8": 0.2, "fp8": 0.35}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("method", TOLERANCE)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_logits(compute: str, kind: str, method: str, tmp_path: Path) -> None:
    tiny_model(kind, tmp_path, **SETTINGS, **MODELS[kind])
    checkpoint = open_checkpoint(str(tmp_path))
    ids = np.random.default_rng(0).integers(0, 512, LENGTH).tolist()
    model = Runner(card(compute), checkpoint, length=LENGTH, tokens=LENGTH, kv_dtype=compute, quantization=method)
    whole = model.logits(ids)
    exact = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH, quantization=method).logits(ids)
    assert relative(whole, exact) < TOLERANCE[method]
    for chunks in ([1] * LENGTH, [64, 26], [5, 85]):
        assert relative(model.logits(ids, chunks), whole) < TOLERANCE[method]


@pytest.mark.skipif(not CARDS or CARDS[0].capability < 80, reason="widened before sm_80")
@pytest.mark.parametrize(("method", "bits"), [("int4", 4), ("int8", 8), ("fp8", 8)])
def test_experts_stay_codes(method: str, bits: int, tmp_path: Path) -> None:
    tiny_model("mixtral", tmp_path, **SETTINGS, **MODELS["mixtral"])
    checkpoint = open_checkpoint(str(tmp_path))
    program, _ = build_program(checkpoint)
    weights = load_weights(card("bf16"), program, checkpoint, quantization=method)
    stacks = [(shape, weight) for (_, _, shape), weight in zip(program.weights, weights, strict=True) if len(shape) == 3]
    assert stacks
    for shape, weight in stacks:
        codes = int(np.prod(shape)) * bits // 8
        assert weight.widened == "" and codes < weight.bytes < 1.1 * codes
