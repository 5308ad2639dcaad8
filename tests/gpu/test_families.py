"""Every family on the card: in fp32 the reference backend's logits, prefilled, in chunks and decoded; in bf16 near them. That the
reference's are those of transformers, tests/models shows."""

from pathlib import Path

import numpy as np
import pytest
from cards import card, needs_card
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from runner import Runner, embedded
from tiny_embedders import KINDS, SCORERS, TEXTS, pooled, scored, sentence_transformer, tiny
from tiny_families import IDS, LENGTH, NATIVE, RELAID, native

pytestmark = needs_card


def relative(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape and np.isfinite(got).all()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", [*NATIVE, *RELAID])
def test_logits(case: str, tmp_path: Path) -> None:
    _ = native(case, tmp_path) if case in NATIVE else RELAID[case](tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    expected = Runner(_core.reference_backend(), checkpoint, length=LENGTH, tokens=LENGTH).logits(IDS)
    exact = Runner(card("fp32"), checkpoint, length=LENGTH, tokens=LENGTH)
    whole = exact.logits(IDS)
    assert relative(whole, expected) < 1e-4
    for chunks in ([13, 1, 30, 16], [20, *[1] * 40]):
        assert relative(exact.logits(IDS, chunks), whole) < 1e-5
    rounded = Runner(card("bf16"), checkpoint, length=LENGTH, tokens=LENGTH, kv_dtype="bf16")
    assert relative(rounded.logits(IDS), expected) < 0.1


@pytest.mark.parametrize("pooling", ["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(kind: str, pooling: str, tmp_path: Path) -> None:
    expected = pooled(tiny(kind, "Model", tmp_path), pooling)
    sentence_transformer(tmp_path, pooling)
    checkpoint = open_checkpoint(str(tmp_path))
    assert relative(embedded(card("fp32"), checkpoint, TEXTS), expected) < 1e-4
    assert relative(embedded(card("bf16"), checkpoint, TEXTS, "bf16"), expected) < 0.1


@pytest.mark.parametrize("kind", SCORERS)
def test_scores(kind: str, tmp_path: Path) -> None:
    expected = scored(tiny(kind, "ForSequenceClassification", tmp_path, num_labels=3))
    checkpoint = open_checkpoint(str(tmp_path))
    assert relative(embedded(card("fp32"), checkpoint, TEXTS), expected) < 1e-4
    assert relative(embedded(card("bf16"), checkpoint, TEXTS, "bf16"), expected) < 0.1
