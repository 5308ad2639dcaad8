"""What a request gets must not depend on what else an engine does: the cases, for any backend and any idea of sameness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pytest
from jobs import NEW_TOKENS, Harness, Job, Output
from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

PAGE_TOKENS = 16
Results = Sequence[Sequence[Output]]  # of each job, each sequence's
Draw = Callable[[Sequence[Job]], list[Job]]  # the same jobs, to be drawn by somebody
CUTS = [
    pytest.param({}, id="batched"),
    pytest.param({"max_sequences": 3, "token_budget": 5}, id="chunks of a few tokens"),
    pytest.param({"token_budget": 23}, id="chunks across pages"),
]


class Model(ABC):
    """Packed weights of a checkpoint, and what jobs give alone; each engine gets pages of its own. `text`: 97 ids or more."""

    def __init__(
        self, backend: _core.Backend, checkpoint: Checkpoint, text: list[int], kv_dtype: str | list[str], quantization: str = ""
    ) -> None:
        self.backend, self.text, self.kv_dtype = backend, text, kv_dtype
        self.program, _ = build_program(checkpoint)
        self.weights = load_weights(backend, self.program, checkpoint, quantization=quantization)
        self.jobs = [
            Job(text[:1], params={"temperature": 0}),
            Job(text[3:18], params={"temperature": 0}),
            Job(text[5:21], params={"temperature": 0.9, "seed": 1}),
            Job(text[:32], params={"temperature": 1.2, "seed": 2, "top_k": 20, "min_p": 0.01}),
            Job(text[:33], params={"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.3}),
            Job(text[20:61], sequences=3, params={"temperature": 1, "seed": 4, "top_p": 0.9}),
            Job(text[:97], params={"temperature": 0}),
        ]
        self.expected = [self.engine(prefix_cache=False).run([job])[0] for job in self.jobs]

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
        assert executable.limits.pages >= max(pages, 1)
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

    @abstractmethod
    def assert_agrees(
        self, found: Sequence[Sequence[Output]], jobs: Sequence[Job], expected: Sequence[Sequence[Output]]
    ) -> None: ...


def outputs_end_as_asked(model: Model) -> None:
    for outputs in model.expected:
        assert all(len(output.tokens) == len(output.logprobs) == NEW_TOKENS for output in outputs)
        assert len({tuple(output.tokens) for output in outputs}) == len(outputs), "each output draws from a stream of its own"


def batched_and_chunked_equal_alone(model: Model, options: dict[str, int], draw: Draw = list) -> None:
    jobs = draw(model.jobs[::-1])
    model.assert_agrees(model.engine(**options).run(jobs), jobs, model.expected[::-1])


def preempted_equals_undisturbed(model: Model, draw: Draw = list) -> None:
    preemptions = 0
    for pages in (7, 10, 12):
        engine = model.engine(pages=pages)
        jobs = draw(model.jobs)
        model.assert_agrees(engine.run(jobs), jobs, model.expected)
        preemptions += engine.stats()["preemptions"]
    assert preemptions > 0


def prefix_hit_equals_miss_at_every_length(model: Model) -> None:
    """vllm #40896, #5543."""
    lengths = range(PAGE_TOKENS, 2 * PAGE_TOKENS + 1)
    jobs = [Job([*model.text[:length], *model.text[50:55]], params={"temperature": 0, "max_new_tokens": 2}) for length in lengths]
    miss = model.engine(prefix_cache=False).run(jobs)
    engine = model.engine()
    engine.run([Job(model.text[:64], params={"temperature": 0})])
    hit = engine.run(jobs)
    model.assert_agrees(hit, jobs, miss)
    assert [outputs[0].cached_tokens for outputs in hit] == [length // PAGE_TOKENS * PAGE_TOKENS for length in lengths]


def decoded_pages_are_as_good_as_prefilled_ones(model: Model) -> None:
    """The next turn of a conversation finds the pages that decoding the answer wrote."""
    first = Job(model.text[:21], params={"temperature": 0, "max_new_tokens": 30})
    engine = model.engine()
    answer = engine.run([first])[0][0].tokens
    second = Job([*first.prompt, *answer, *model.text[30:40]], params={"temperature": 0})
    hit = engine.run([second])
    assert hit[0][0].cached_tokens == 48
    model.assert_agrees(hit, [second], model.engine(prefix_cache=False).run([second]))
