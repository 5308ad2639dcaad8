"""Masks of grammars: outputs follow them whenever they come, and nobody else waits for one."""

import random
import threading
import time

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World, sampler

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def allowed_after(token, vocab=64):
    """The rule of the tests' grammar: five tokens that depend on the last one."""
    return [(7 * token + 11 * i + 3) % vocab for i in range(5)]


class Grammars:
    """Answers an engine's asks on a thread of its own. `delay` in seconds, of each mask; `ends`: tokens that nothing may follow."""

    def __init__(self, engine, *, delay=lambda: 0.0, ends=(), fails=()):
        self.queue = engine.masks()
        self.asked = []
        self._delay, self._ends, self._fails = delay, ends, fails
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while masks := self.queue.take():
            for mask in masks:
                self.asked.append((mask.grammar, mask.output, mask.last_token))
                time.sleep(self._delay())
                if mask.last_token in self._fails:
                    self.queue.fail(mask, "no way on")
                elif mask.last_token in self._ends:
                    self.queue.complete(mask)
                else:
                    words = np.zeros(2, np.uint32)
                    for token in allowed_after(mask.last_token):
                        words[token // 32] |= np.uint32(1 << token % 32)
                    self.queue.ready(mask, words)

    def join(self):
        self._thread.join(10)
        assert not self._thread.is_alive()


def expected(world, prompt, params, count, stream=0):
    tokens = []
    for _ in range(count):
        row = world.logits(len(prompt), [*prompt, *tokens])
        banned = np.ones(world.vocab, bool)
        banned[allowed_after(tokens[-1] if tokens else -1)] = False
        row[banned] = -np.inf
        status, token, _, _ = sampler.sample(row, params, prompt, tokens, stream=stream)
        assert status == "ok"
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 4}, {"seed": 4, "top_k": 9, "repetition_penalty": 1.3}])
def test_outputs_follow_their_masks(fields):
    world = World()
    harness = world.engine()
    Grammars(harness.engine)
    prompt, params = prompt_of(10), Params(max_new_tokens=12, **fields)
    request = harness.submit(prompt, params, grammar=1, sequences=3)
    free = harness.submit(prompt, params)
    outputs = harness.run()
    for i in range(3):
        assert outputs[request, i].tokens == expected(world, prompt, params, 12, stream=i)
    assert outputs[free, 0].tokens == world.simulate(prompt, params).tokens
    assert harness.engine.stats()["masks"] >= 3 * 11


@pytest.mark.parametrize("length", [3, 4, 5, 8, 40])
def test_late_masks_change_nothing(length):
    """Each comes long after its step; prompts end at, before and behind the end of a page, and in chunks."""
    world = World(token_budget=16)
    harness = world.engine()
    chance = random.Random(length)
    Grammars(harness.engine, delay=lambda: chance.choice([0.0, 0.01]))
    params = Params(max_new_tokens=9, seed=length)
    prompt = prompt_of(length)
    requests = [harness.submit(prompt, params, grammar=key) for key in (1, 2)]
    outputs = harness.run()
    for request in requests:
        assert outputs[request, 0].tokens == expected(world, prompt, params, 9)
    stats = harness.engine.stats()
    assert stats["masks_late"] > 0 and stats["masks"] > stats["masks_late"]


def test_nobody_waits_for_a_mask_of_another():
    world = World()
    harness = world.engine()
    Grammars(harness.engine, delay=lambda: 0.3)
    slow = harness.submit(prompt_of(5), Params(max_new_tokens=4, seed=1), grammar=1)
    params = Params(max_new_tokens=30, seed=2)
    quick = harness.submit(prompt_of(6), params)
    harness.wait_for(lambda: (quick, 0) in harness.outputs and harness.outputs[quick, 0].finish)
    assert harness.outputs[quick, 0].tokens == world.simulate(prompt_of(6), params).tokens
    assert len(harness.outputs.get((slow, 0), type("none", (), {"tokens": []})).tokens) < 4
    assert harness.run()[slow, 0].tokens == expected(world, prompt_of(5), Params(max_new_tokens=4, seed=1), 4)


def test_masks_survive_preemption():
    world = World(pages=8, max_sequences=4)
    harness = world.engine()
    Grammars(harness.engine, delay=lambda: 0.002)
    params = Params(max_new_tokens=18, temperature=0)
    requests = {harness.submit(prompt_of(7, seed), params, grammar=seed + 1): seed for seed in range(4)}
    outputs = harness.run()
    assert harness.engine.stats()["preemptions"] > 0
    for request, seed in requests.items():
        assert outputs[request, 0].tokens == expected(world, prompt_of(7, seed), params, 18)


def test_a_complete_output_stops_and_a_failed_one_says_why():
    world = World()
    prompt, params = prompt_of(9), Params(max_new_tokens=12, temperature=0)
    whole = expected(world, prompt, params, 12)
    cut = next(i for i in range(2, 12) if whole[i] not in whole[:i])
    harness = world.engine()
    Grammars(harness.engine, ends=[whole[cut]])
    output = harness.generate(prompt, params, grammar=1)
    assert (output.tokens, output.finish) == (whole[: cut + 1], "stop")
    harness = world.engine()
    Grammars(harness.engine, fails=[whole[cut]])
    output = harness.generate(prompt, params, grammar=1)
    assert (output.tokens, output.finish, output.error) == (whole[: cut + 1], "error", "no way on")


def test_a_grammar_that_lets_nothing_begin():
    harness = World().engine()
    Grammars(harness.engine, ends=[-1])
    request = harness.submit(prompt_of(5), Params(max_new_tokens=3), grammar=1, sequences=2)
    outputs = harness.run()
    assert [outputs[request, i].finish for i in range(2)] == ["stop", "stop"] and outputs[request, 0].tokens == []


def test_cancelling_one_that_waits_for_its_mask():
    harness = World().engine()
    grammars = Grammars(harness.engine, delay=lambda: 0.2)
    request = harness.submit(prompt_of(5), Params(max_new_tokens=50), grammar=1)
    harness.wait_for(lambda: len(grammars.asked) >= 1)
    time.sleep(0.02)
    began = time.monotonic()
    harness.engine.cancel(request)
    assert harness.run()[request, 0].finish == "cancelled" and time.monotonic() - began < 0.15


def test_the_engine_may_go_while_masks_are_awaited():
    harness = World().engine()
    grammars = Grammars(harness.engine, delay=lambda: 0.05)
    harness.submit(prompt_of(5), Params(max_new_tokens=50), grammar=1)
    harness.wait_for(lambda: len(grammars.asked) >= 1)
    harness.engine = None
    grammars.join()
