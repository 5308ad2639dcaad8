"""Requests to a model that embeds: each prompt in one step, its row in one event."""

import numpy as np
import pytest
from maga_transformer import _core
from simulation import Harness, World, entry, fold, logits_of

pytestmark = pytest.mark.usefixtures("device")
WORLD = {"embeds": True, "pages": 20, "page_tokens": 4, "token_budget": 16, "max_sequences": 4}


def expected(prompt: list[int], vocab: int) -> np.ndarray:
    value = 0
    for position, token in enumerate(prompt):
        value = fold(value, entry(token, position, len(prompt), 0))
    return logits_of(value, vocab)


def embed(harness: Harness, prompts: list[list[int]]) -> list[_core.Event]:
    harness.control.hold()  # the first step, until all have come
    requests = [harness.engine.submit(np.asarray(prompt, np.int32), _core.SamplingParams(max_new_tokens=1)) for prompt in prompts]
    harness.control.release()
    events: dict[int, _core.Event] = {}
    while len(events) < len(requests):
        for event in harness.engine.poll():
            assert event.request not in events, "an event after the end"
            events[event.request] = event
    return [events[request] for request in requests]


def test_every_prompt_runs_whole_and_gives_its_row() -> None:
    world = World(**WORLD)
    harness = world.engine()
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, world.vocab, size).tolist() for size in (1, 16, 5, 9, 7, 16, 3, 12, 12, 1)]
    prompts += prompts[:3]  # again: the prefix cache must not cut them
    for prompt, event in zip(prompts, embed(harness, prompts), strict=True):
        assert (event.finish, event.tokens, event.output_tokens, event.cached_tokens) == ("stop", [], 0, 0)
        np.testing.assert_array_equal(event.embedding, expected(prompt, world.vocab))
    steps = harness.control.steps
    assert sorted(n for _, counts, _ in steps for n in counts) == sorted(map(len, prompts))
    assert all(tokens <= world.token_budget for tokens, _, _ in steps)
    assert len(steps) < len(prompts), "prompts that fit share a step"
    stats = harness.engine.stats()
    assert (stats["pages_live"], stats["pages_cached"], stats["finished"]) == (0, 0, len(prompts))


def test_a_poisoned_prompt_fails_alone() -> None:
    harness = World(**WORLD, poison=7).engine()
    good, bad = embed(harness, [[1, 2, 3], [4, 7, 5]])
    assert good.finish == "stop" and np.isfinite(good.embedding).all()
    assert (bad.finish, bad.error, len(bad.embedding)) == ("error", "non-finite logits", 0)


def test_what_cannot_be_embedded_is_refused() -> None:
    harness = World(**WORLD, max_sequence_length=14).engine()
    params = _core.SamplingParams(max_new_tokens=1)
    with pytest.raises(ValueError, match="the prompt has 17 tokens: this model must see all of a prompt in one step"):
        harness.engine.submit(np.zeros(17, np.int32), params)
    with pytest.raises(ValueError, match="the prompt has 15 tokens: it must have fewer than 15"):
        harness.engine.submit(np.zeros(15, np.int32), params)
    with pytest.raises(ValueError, match="sequences is 2: an embedding has one"):
        harness.engine.submit(np.zeros(3, np.int32), params, sequences=2)
    assert embed(harness, [[5] * 14])[0].finish == "stop"
