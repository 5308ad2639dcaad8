"""The loop one step ahead of an asynchronous model: when steps overlap, and what happens to a step that turns out to be wasted."""

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World

Params = _core.SamplingParams
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch):
    monkeypatch.setattr(World, "asynchronous", True)


def step_tokens(harness):
    return [tokens for _, tokens, _ in harness.control.steps]


def wait_for_steps(harness, count):
    """Also those whose results nobody waits for."""
    harness.wait_for(lambda: len(harness.control.steps) >= count)
    assert len(harness.control.steps) == count


# --- overlap ---


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 0.5},
        {"top_k": 1},
        {"top_p": 0.0},
        {"temperature": 0.7, "top_k": 9},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_decode_steps_overlap_and_none_is_wasted(fields):
    world = World()
    harness = world.engine()
    params = Params(max_new_tokens=10, seed=3, **fields)
    got = harness.generate(PROMPT, params)
    assert (got.tokens, got.finish, got.steps) == (world.simulate(PROMPT, params).tokens, "length", 10)
    assert harness.control.ahead == [False] + [True] * 9
    assert harness.control.draws == [1] * 10


def test_the_longest_sequence_wastes_no_step_either():
    world = World(max_sequence_length=len(PROMPT) + 5)
    harness = world.engine()
    assert len(harness.generate(PROMPT, Params(max_new_tokens=100, seed=0)).tokens) == 5
    assert harness.control.ahead == [False] + [True] * 4


def test_chunks_of_a_prompt_overlap():
    world = World(token_budget=8)
    harness = world.engine()
    params = Params(max_new_tokens=2, seed=0)
    got = harness.generate(PROMPT * 3, params)
    assert got.tokens == world.simulate(PROMPT * 3, params).tokens
    assert harness.control.ahead == [False] + [True] * 4
    assert harness.control.draws == [0, 0, 0, 1, 1]


def test_the_row_of_a_sequence_whose_last_token_is_in_flight_is_free_already():
    world = World(max_sequences=1, token_budget=16)
    harness = world.engine()
    harness.control.hold()
    params = Params(max_new_tokens=3, seed=0)
    requests = [harness.submit(PROMPT, params) for _ in range(4)]
    harness.control.wait_until_held()
    harness.control.release()
    outputs = harness.run()
    assert all(outputs[r, 0].tokens == world.simulate(PROMPT, params).tokens for r in requests)
    assert harness.control.ahead == [False] + [True] * 11


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": [(3, 1.0)]},
        {"bad_words": [[1, 2]]},
    ],
)
def test_tokens_chosen_on_the_host_are_waited_for(fields):
    world = World()
    harness = world.engine()
    params = Params(max_new_tokens=5, seed=3, **fields)
    assert harness.generate(PROMPT, params).tokens == world.simulate(PROMPT, params).tokens
    assert harness.control.ahead == [False] * 5
    assert harness.control.draws == [0] * 5


def test_min_new_tokens_binds_the_host_only_while_it_bans():
    world = World()
    harness = world.engine()
    params = Params(max_new_tokens=8, min_new_tokens=3, stop_token_ids=[63], seed=3)
    got, expected = harness.generate(PROMPT, params), world.simulate(PROMPT, params)
    assert got.tokens == expected.tokens
    assert len(got.tokens) == 8
    assert harness.control.draws == [0] * 3 + [1] * 5
    assert harness.control.ahead == [False] * 4 + [True] * 4
    # Without stop tokens there is nothing to ban.
    harness = world.engine()
    harness.generate(PROMPT, Params(max_new_tokens=4, min_new_tokens=3, seed=3))
    assert harness.control.draws == [1] * 4


def test_one_batch_mixes_both_kinds():
    world = World(pages=64)
    harness = world.engine()
    harness.control.hold()
    params = [Params(max_new_tokens=6, seed=i, logprobs=i % 2 - 1) for i in range(4)]
    requests = [harness.submit([i, *PROMPT], params[i]) for i in range(4)]
    harness.control.release()
    outputs = harness.run()
    for i, request in enumerate(requests):
        expected = world.simulate([i, *PROMPT], params[i])
        assert (outputs[request, 0].tokens, outputs[request, 0].logprobs) == (expected.tokens, expected.logprobs)
    assert 2 in harness.control.draws


def test_where_a_token_is_chosen_does_not_change_the_text():
    harness = World().engine()
    texts = [harness.generate(PROMPT, Params(max_new_tokens=12, seed=5, top_k=20, logprobs=n)).tokens for n in (-1, 0)]
    assert texts[0] == texts[1]


def test_outputs_fork_before_the_next_plan():
    world = World(pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=4, seed=8)
    request = harness.submit(PROMPT, params, sequences=3)
    outputs = harness.run()
    for i in range(3):
        assert outputs[request, i].tokens == world.simulate(PROMPT, params, stream=i).tokens
    assert harness.control.ahead == [False, False, True, True]
    assert harness.control.draws == [3] * 4
    assert step_tokens(harness) == [[9], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


# --- wasted steps ---


def test_a_stop_is_seen_one_step_late_and_costs_one_token():
    world = World(vocabulary=[bytes([i + 32]) for i in range(64)])
    free = world.simulate(PROMPT, Params(max_new_tokens=20, seed=1)).tokens
    for fields in (
        {"stop_token_ids": [free[4]]},
        {"stop_words": [free[3:5]]},
        {"stop_strings": [bytes(t + 32 for t in free[2:5])]},
    ):
        harness = world.engine()
        params = Params(max_new_tokens=20, seed=1, **fields)
        got, expected = harness.generate(PROMPT, params), world.simulate(PROMPT, params)
        assert (got.tokens, got.finish, got.stop) == (expected.tokens, "stop", expected.stop)
        assert got.steps == len(got.tokens)
        assert harness.engine.stats()["output_tokens"] == len(got.tokens)
        wait_for_steps(harness, len(got.tokens) + 1)
        # The wasted token is not in the cache; what came before it is.
        longer = [*PROMPT, *got.tokens, 1, 2, 3]
        again = harness.generate(longer, Params(max_new_tokens=3, seed=2))
        assert again.tokens == world.simulate(longer, Params(max_new_tokens=3, seed=2)).tokens
        assert again.cached_tokens == (len(PROMPT) + len(got.tokens) - 1) // 4 * 4


def test_pages_of_a_wasted_token_go_to_the_next_at_once():
    # Each sequence needs nearly the whole pool, and the one before still has a step in flight when it is admitted.
    world = World(pages=6, page_tokens=4, token_budget=24, max_sequences=4)
    harness = world.engine(prefix_cache=False)
    free = [world.simulate([i, *PROMPT], Params(max_new_tokens=10, seed=i)).tokens for i in range(8)]
    params = [Params(max_new_tokens=10, seed=i, stop_token_ids=[free[i][5]]) for i in range(8)]
    harness.control.hold()
    requests = [harness.submit([i, *PROMPT], params[i]) for i in range(8)]
    harness.control.release()
    outputs = harness.run()
    for i, request in enumerate(requests):
        expected = world.simulate([i, *PROMPT], params[i])
        assert (outputs[request, 0].tokens, outputs[request, 0].finish) == (expected.tokens, expected.finish)


def test_cancel_with_two_steps_in_flight():
    world = World(pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=50, seed=0)
    harness.control.hold()
    cancelled = harness.submit(PROMPT, params)
    harness.control.wait_until_held()  # in collect() of the first step; the second is queued
    harness.engine.cancel(cancelled)
    other = harness.submit([5, *PROMPT], Params(max_new_tokens=5, seed=1))
    harness.control.release()
    outputs = harness.run()
    # The first token came with the step that was held; that of the step behind it is dropped.
    assert (outputs[cancelled, 0].finish, outputs[cancelled, 0].steps) == ("cancelled", 1)
    assert outputs[cancelled, 0].tokens == world.simulate(PROMPT, params).tokens[:1]
    assert outputs[other, 0].tokens == world.simulate([5, *PROMPT], Params(max_new_tokens=5, seed=1)).tokens


def test_drain_does_not_wait_for_a_wasted_step_and_the_destructor_does():
    world = World()
    harness = world.engine()
    harness.control.hold()
    request = harness.submit(PROMPT, Params(max_new_tokens=50, seed=0))
    harness.control.wait_until_held()
    harness.engine.cancel(request)
    harness.control.release()
    assert harness.engine.drain(30.0)
    harness.run()
    del harness.engine
    assert step_tokens(harness) == [[9], [1]]


# --- failures ---


def test_a_step_that_fails_takes_its_sequences_and_no_others():
    world = World(token_budget=9, max_sequences=4, pages=64)
    harness = world.engine()
    harness.control.hold()
    harness.control.fail(collect=1)
    params = Params(max_new_tokens=6, seed=0)
    requests = [harness.submit([i, *PROMPT[1:]], params) for i in range(3)]
    harness.control.wait_until_held()
    harness.control.release()
    outputs = harness.run()
    assert outputs[requests[0], 0].finish == "error"
    assert outputs[requests[0], 0].error == "the step failed: the fake device lost a step"
    for i in (1, 2):  # the first of them was in the step behind, beside the next token of the one that failed
        assert outputs[requests[i], 0].tokens == world.simulate([i, *PROMPT[1:]], params).tokens
    again = harness.generate([0, *PROMPT[1:]], params)
    assert (again.tokens, again.cached_tokens) == (world.simulate([0, *PROMPT[1:]], params).tokens, 0)


def test_a_step_that_cannot_be_queued_ends_its_sequences():
    world = World(pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=6, seed=0)
    harness.control.hold()
    request = harness.submit(PROMPT, params)
    harness.control.wait_until_held()  # two steps are queued
    harness.control.fail(enqueue=1)
    harness.control.release()
    outputs = harness.run()
    assert outputs[request, 0].error == "the step failed: the fake device takes no step"
    assert outputs[request, 0].tokens == world.simulate(PROMPT, params).tokens[:1]
    assert harness.generate(PROMPT, params).tokens == world.simulate(PROMPT, params).tokens


def test_a_device_that_fails_for_good_ends_everything_with_its_error():
    harness = World(pages=64).engine()
    harness.control.fail(enqueue=1000, collect=1000)
    requests = [harness.submit([i, *PROMPT], Params(max_new_tokens=6), sequences=2) for i in range(6)]
    outputs = harness.run()
    assert {outputs[r, i].error for r in requests for i in range(2)} == {"the step failed: the fake device takes no step"}


@pytest.mark.parametrize("steps", [1, 2])
def test_non_finite_logits_under_a_step_in_flight(steps):
    world = World(pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=12, seed=0)
    expected = world.simulate(PROMPT, params).tokens
    poisoned = World(pages=64, poison=expected[steps - 1])
    harness = poisoned.engine()
    got = harness.generate(PROMPT, params)
    assert (got.tokens, got.finish, got.error) == (expected[:steps], "error", "non-finite logits")
    assert got.steps == steps + 1
    wait_for_steps(harness, steps + 2)
    stats = harness.engine.stats()
    assert stats["pages_cached"] == 0
    assert stats["pages_free"] == stats["pages_total"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_plan_that_preempts_waits_for_the_step_in_flight(prefix_cache):
    world = World(pages=16, page_tokens=4, token_budget=16, max_sequences=8)
    harness = world.engine(prefix_cache=prefix_cache)
    harness.control.hold()
    params = [Params(max_new_tokens=34, seed=i) for i in range(5)]
    requests = [harness.submit(PROMPT[i:], params[i]) for i in range(5)]
    harness.control.release()
    outputs = harness.run()
    for i, request in enumerate(requests):
        assert outputs[request, 0].tokens == world.simulate(PROMPT[i:], params[i]).tokens
    preemptions = harness.engine.stats()["preemptions"]
    assert preemptions > 0
    assert 1 < harness.control.ahead.count(False) <= 1 + 2 * preemptions
    assert harness.control.ahead.count(True) > 34


# --- figures ---


def test_time_is_told_apart():
    world = World()
    harness = world.engine(fault="slow:forward:1")
    harness.generate(PROMPT, Params(max_new_tokens=30, seed=0))
    stats = harness.engine.stats()
    assert stats["model_seconds"] >= 0.5
    assert stats["overlapped_seconds"] > 0
    assert stats["host_seconds"] < 0.5
    assert stats["sample_seconds"] < 0.5


def test_random_arrivals_keep_the_device_busy():
    """Whatever comes and goes, a step is queued behind another one unless it must not be."""
    world = World(pages=200, max_sequences=8, token_budget=32)
    harness = world.engine()
    random = np.random.default_rng(1)
    harness.control.hold()
    for i in range(60):
        prompt = random.integers(0, 64, int(random.integers(1, 40))).tolist()
        harness.submit(prompt, Params(max_new_tokens=int(random.integers(1, 20)), seed=i))
    harness.control.wait_until_held()
    harness.control.release()
    harness.run()
    assert harness.engine.stats()["preemptions"] == 0
    assert harness.control.ahead.count(False) == 1


def test_a_lost_device_is_told_apart_from_a_step_that_failed():
    harness = World(pages=64).engine()
    harness.control.fail(enqueue=1)
    assert "restart" not in harness.generate(PROMPT, Params(max_new_tokens=2)).error
    assert not harness.engine.stats()["device_lost"]
    harness.control.fail(enqueue=1, lost=True)
    assert harness.generate(PROMPT, Params(max_new_tokens=2)).error.endswith("(the device is lost: restart the server)")
    assert harness.engine.stats()["device_lost"]
