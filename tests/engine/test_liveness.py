"""Failures that users of other engines met, each where it would show in ours: text after a preemption, pools of any size, a cancel
in the last step, an output that meets the context's end, a mask that never comes, windows and the prefix cache."""

from __future__ import annotations

import threading
from pathlib import Path

import engine_cases
import numpy as np
import pytest
from engine_cases import Model, Results
from folders import tiny_model
from jobs import Job, assert_equal
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from simulation import World

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def test_a_preemption_at_every_step_and_again() -> None:
    """Pages of one token, so that every step of an answer of 64 wants one: it is refused twice at the step, then twice later."""
    world = World(page_tokens=1, pages=200, token_budget=16)
    params, others = Params(max_new_tokens=64, seed=5, repetition_penalty=1.2), Params(max_new_tokens=20, seed=6)
    expected, beside = world.simulate(prompt_of(5), params).tokens, world.simulate(prompt_of(7), others, stream=1).tokens
    for step in range(80):
        harness = world.engine(fault=f"no_pages:allocate:2:{step}")
        request, other = harness.submit(prompt_of(5), params), harness.submit(prompt_of(7), others, sequences=2)
        outputs = harness.run()
        assert outputs[request, 0].tokens == expected and outputs[other, 1].tokens == beside
        assert harness.engine.stats()["preemptions"] == 2


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_pools_of_one_to_forty_pages(page_tokens: int) -> None:
    """Random loads always end, and right, whatever fits at once."""
    for pages in range(1, 41):
        world = World(pages=pages, page_tokens=page_tokens, token_budget=12, max_sequences=5)
        if world.longest < 2:
            continue
        draw = np.random.default_rng(pages)
        harness = world.engine()
        harness.control.hold()
        wanted = {}
        for i in range(7):
            prompt = prompt_of(int(draw.integers(1, min(24, world.longest))), i)
            params, sequences = Params(max_new_tokens=int(draw.integers(1, 16)), seed=i), int(draw.integers(1, 4))
            wanted[harness.submit(prompt, params, sequences=sequences)] = (prompt, params, sequences)
        harness.control.release()
        outputs = harness.run()
        for request, (prompt, params, sequences) in wanted.items():
            for i in range(sequences):
                expected = world.simulate(prompt, params, stream=i)
                assert (outputs[request, i].tokens, outputs[request, i].finish) == (expected.tokens, expected.finish), pages


RETURNS = [
    {"logprobs": 5},
    {"prompt_logprobs": 3},
    {"return_logits": True},
    {"return_logits": True, "select_tokens": [1, 2]},
    {"logprobs": 5, "prompt_logprobs": 3, "return_logits": True},
    {"beam_width": 3},
]


@pytest.mark.parametrize("fields", RETURNS, ids=lambda fields: " ".join(fields))
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_cancel_in_the_last_step(fields: dict[str, object], tokens: int) -> None:
    """Of all outputs, of the first and of the last, amid whatever the step returns; the neighbour notices nothing."""
    world = World(pages=64, logit_rows=40)
    harness = world.engine()
    sequences = 3 if tokens > 1 or "beam_width" in fields else 2
    beside = Params(max_new_tokens=6, seed=2, logprobs=2)
    expected = world.simulate(prompt_of(6, 1), beside)
    for which in (-1, 0, sequences - 1):
        harness.control.hold()
        request = harness.submit(prompt_of(9), Params(max_new_tokens=tokens, seed=1, **fields), sequences=sequences)
        neighbour = harness.submit(prompt_of(6, 1), beside)
        harness.control.wait_until_held()
        if tokens > 1:
            harness.control.release()
            harness.wait_for(lambda request=request: (request, 0) in harness.outputs)
            harness.control.hold()
        harness.engine.cancel(request, which)
        harness.control.release()
        outputs = harness.run()
        ends = [outputs[request, i].finish for i in range(sequences)]
        assert set(ends) <= {"length", "cancelled"}, ends
        assert "cancelled" not in [end for i, end in enumerate(ends) if which not in (-1, i)]
        assert (outputs[neighbour, 0].tokens, outputs[neighbour, 0].logprobs) == (expected.tokens, expected.logprobs)


def test_the_end_of_the_context_ends_one_output() -> None:
    world = World(pages=64, max_sequence_length=20)
    harness = world.engine()
    harness.control.hold()
    wanted = {}
    for length in (19, 3, 15, 10):
        params = Params(max_new_tokens=9, seed=length)
        wanted[harness.submit(prompt_of(length), params)] = (length, params)
    harness.control.release()
    outputs = harness.run()
    for request, (length, params) in wanted.items():
        assert len(outputs[request, 0].tokens) == min(9, 20 - length)
        assert (outputs[request, 0].tokens, outputs[request, 0].finish) == (
            world.simulate(prompt_of(length), params).tokens,
            "length",
        )


@pytest.mark.parametrize("told", [0, 2])
def test_a_mask_that_never_comes_has_a_deadline(told: int) -> None:
    """`told`: how many come before. Others go on, and what was awaited comes to nobody."""
    world = World()
    harness = world.engine()
    queue, gone = harness.engine.masks(), threading.Event()

    def answer() -> None:
        left = told
        while masks := queue.take():
            for mask in masks:
                if left > 0:
                    queue.ready(mask, np.full(2, 0xFFFFFFFF, np.uint32))
                left -= 1
        gone.set()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    late = harness.submit(prompt_of(5), Params(max_new_tokens=50, seed=1), grammar=1, timeout_seconds=0.2)
    params = Params(max_new_tokens=12, seed=3)
    other = harness.submit(prompt_of(6), params)
    outputs = harness.run()
    assert (outputs[late, 0].finish, len(outputs[late, 0].tokens)) == ("timeout", told)
    assert outputs[other, 0].tokens == world.simulate(prompt_of(6), params).tokens
    harness.engine = None
    assert gone.wait(10)


class WindowModel(Model):
    def assert_agrees(self, found: Results, jobs: list[Job], expected: Results) -> None:
        assert_equal(found, expected)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
def test_windows_and_the_prefix_cache(kv_dtype: str, tmp_path: Path, device: str) -> None:
    """Every other layer sees a page and a half: a hit is a miss at every length, also of pages that decoding wrote or that were
    taken away."""
    if device == "async":
        pytest.skip("there is one way to run on a CPU")
    settings = {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2, "max_position_embeddings": 256}
    tiny_model("gemma3", tmp_path, **settings)
    model = WindowModel(_core.cpu_backend(threads=1), open_checkpoint(str(tmp_path)), prompt_of(97), kv_dtype)
    engine_cases.prefix_hit_equals_miss_at_every_length(model)
    engine_cases.decoded_pages_are_as_good_as_prefilled_ones(model)
    engine_cases.preempted_equals_undisturbed(model)
    churned, miss = model.engine(pages=20, max_sequences=4), model.engine(prefix_cache=False)
    fill = [Job(prompt_of(90, 100 + i), params={"temperature": 0, "max_new_tokens": 2}) for i in range(6)]  # 36 pages
    for turn in range(5):
        jobs = [Job([*model.text[: 30 + 7 * turn], *prompt_of(3, turn)], params={"temperature": 0})]
        assert_equal(churned.run(jobs), miss.run(jobs))
        churned.run(fill[turn:] + fill[:turn])
