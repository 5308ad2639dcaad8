"""Logits of whole models on the card: equal to transformers' there, and the same whether tokens are prefilled or decoded."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cards import COMPUTE, card, needs_card
from maga_transformer.checkpoint import open_checkpoint
from runner import Part, Runner

pytestmark = needs_card

LENGTH = 70
# Root mean square of the difference, relative to that of the logits. transformers rounds every value to the type, as the card does.
TOLERANCE = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 8e-3}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def prompt(vocab: int, length: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@functools.cache
def runner(folder: Path, compute: str) -> Runner:
    return Runner(card(compute), open_checkpoint(str(folder)), length=LENGTH, tokens=3 * LENGTH, sequences=3, kv_dtype=compute)


@functools.cache
def transformers_logits(folder: Path, compute: str) -> np.ndarray:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to("cuda").eval()
    ids = torch.tensor([prompt(model.config.vocab_size)], device="cuda")
    with torch.inference_mode():
        found: np.ndarray = model(ids).logits[0].float().cpu().numpy()
    return found


@pytest.mark.parametrize("compute", COMPUTE)
def test_logits_are_those_of_transformers(compute: str, tiny_folder: Path) -> None:
    want = transformers_logits(tiny_folder, compute)
    got = runner(tiny_folder, compute).logits(prompt(want.shape[1]))
    assert relative(got, want) < TOLERANCE[compute]


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [16] * 4 + [6], [69, 1], [1, 33, 36]], ids=["decoded", "by pages", "last", "odd"])
@pytest.mark.parametrize("compute", COMPUTE)
def test_decode_is_prefill(compute: str, chunks: list[int], tiny_folder: Path) -> None:
    model = runner(tiny_folder, compute)
    ids = prompt(model.program.vocab)
    assert relative(model.logits(ids, chunks), model.logits(ids)) < TOLERANCE[compute]


@pytest.mark.parametrize("compute", COMPUTE)
def test_neighbours_change_nothing(compute: str, tiny_folder: Path) -> None:
    model = runner(tiny_folder, compute)
    prompts = [prompt(model.program.vocab, length, seed=length) for length in (70, 1, 23)]
    together = model.step([Part(i, ids, 0, len(ids), range(len(ids))) for i, ids in enumerate(prompts)])
    starts = np.cumsum([0, *map(len, prompts)])
    for ids, begin in zip(prompts, starts, strict=False):
        assert relative(together[begin : begin + len(ids)], model.logits(ids)) < TOLERANCE[compute]
