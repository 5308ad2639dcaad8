"""fp8 weights on the card, where it multiplies their codes: whole models near the reference backend's with the same codes, and the
same whether tokens come one by one, in pieces or all at once."""

from pathlib import Path

import numpy as np
import pytest
from cards import CARDS, card, needs_card
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from runner import Part, Runner

pytestmark = needs_card

LENGTH = 90
# Root mean square, relative to the logits'. Tokens are rounded to e4m3 before every linear, which is 1 to 2 % of its result, and
# with another scale where more than 64 go together: up to 11 % after the layers of these random models.
TOLERANCE = 1.5e-1


def relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def runner(backend: _core.Backend, folder: Path, compute: str) -> Runner:
    checkpoint = open_checkpoint(str(folder))
    return Runner(backend, checkpoint, length=LENGTH, tokens=3 * LENGTH, sequences=3, kv_dtype=compute, quantization="fp8")


def prompt(vocab: int, length: int = LENGTH, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_logits(compute: str, tiny_folder: Path) -> None:
    model = runner(card(compute), tiny_folder, compute)
    ids = prompt(model.program.vocab)
    whole = model.logits(ids)
    assert relative(whole, runner(_core.reference_backend(), tiny_folder, "fp32").logits(ids)) < TOLERANCE
    for chunks in ([1] * LENGTH, [64, 26], [70, 20], [5, 85]):
        assert relative(model.logits(ids, chunks), whole) < TOLERANCE


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_neighbours_change_nothing(compute: str, tiny_folder: Path) -> None:
    model = runner(card(compute), tiny_folder, compute)
    prompts = [prompt(model.program.vocab, length, seed=length) for length in (70, 1, 23)]
    together = model.step([Part(i, ids, 0, len(ids), range(len(ids))) for i, ids in enumerate(prompts)])
    starts = np.cumsum([0, *map(len, prompts)])
    for ids, begin in zip(prompts, starts, strict=False):
        assert relative(together[begin : begin + len(ids)], model.logits(ids)) < TOLERANCE


def test_which_weights_stay_codes() -> None:
    codes = np.full((32, 48), 0x38, np.uint8)  # ones
    scale = np.ones((32, 1), np.float32)

    def why(compute: str, codes: np.ndarray, block: tuple[int, int], scale: np.ndarray) -> str:
        return card(compute).pack_float8("w", codes.shape, codes, block=block, scale=scale).widened

    if CARDS[0].capability == 90:
        weight = card("bf16").pack_float8("w", (32, 48), codes, block=(1, 48), scale=scale)
        assert not weight.widened and weight.bytes == 32 * 48 + 32 * 4
        assert not why("fp16", codes, (32, 48), scale[:1])
        assert "bf16 or fp16" in why("fp32", codes, (1, 48), scale)
        assert "blocks of columns" in why("bf16", codes, (16, 16), np.ones((2, 3), np.float32))
    if CARDS[0].capability >= 80:
        # In units of 8 rows by 128 columns.
        weight = card("bf16").pack_float8("w", (30, 48), codes[:30], block=(1, 48), scale=scale[:30])
        assert not weight.widened and weight.bytes == 4 * (1024 + 32)
        assert not why("fp16", np.full((32, 300), 0x38, np.uint8), (16, 128), np.ones((2, 3), np.float32))
    else:
        assert "sm_80" in why("bf16", codes, (1, 48), scale)
