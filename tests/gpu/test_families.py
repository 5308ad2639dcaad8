"""Tiny models of every family on the card: the logits that they must give, whether tokens are prefilled or decoded."""

from pathlib import Path

import numpy as np
import pytest
from cards import COMPUTE, card, needs_card
from maga_transformer.checkpoint import open_checkpoint
from runner import Runner
from tiny_families import IDS, LENGTH, NATIVE, RELAID, native

from .test_logits import TOLERANCE, relative

pytestmark = needs_card


@pytest.fixture(scope="module", params=[*NATIVE, *RELAID])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("family")
    return folder, native(request.param, folder) if request.param in NATIVE else RELAID[request.param](folder)


@pytest.mark.parametrize("compute", COMPUTE)
def test_logits(compute: str, model: tuple[Path, np.ndarray]) -> None:
    folder, want = model
    runner = Runner(card(compute), open_checkpoint(str(folder)), length=LENGTH, tokens=LENGTH, kv_dtype=compute)
    for chunks in ([LENGTH], [13, 1, 30, 16], [20, *[1] * 40]):
        assert relative(runner.logits(IDS, chunks), want) < TOLERANCE[compute]
