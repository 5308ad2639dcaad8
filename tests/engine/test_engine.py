"""The engine over a fake model whose output shows what the page tables led to; expectations come from simulation.py."""

import time

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World, readable, sampler, testing

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")


def prompt_of(length, seed=0, vocab=64):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# --- outputs ---


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 70])
def test_alone(length):
    world = World()
    params = Params(max_new_tokens=20, seed=length, temperature=0.8, top_k=10)
    got = world.engine().generate(prompt_of(length), params)
    expected = world.simulate(prompt_of(length), params)
    assert (got.tokens, got.finish) == (expected.tokens, "length")


def test_batched_equals_alone_whatever_the_threads():
    world = World(pages=200, max_sequences=16, token_budget=48)
    params = [
        Params(
            max_new_tokens=5 + i,
            seed=i,
            temperature=0.5 * (i % 4),
            top_p=1 - 0.1 * (i % 3),
            repetition_penalty=1 + 0.1 * i,
            logprobs=i % 4,
        )
        for i in range(16)
    ]
    for threads in (1, 3):
        harness = world.engine(threads=threads)
        requests = [harness.submit(prompt_of(3 + 5 * i, seed=i), params[i]) for i in range(16)]
        outputs = harness.run()
        for i, request in enumerate(requests):
            expected = world.simulate(prompt_of(3 + 5 * i, seed=i), params[i])
            assert outputs[request, 0].tokens == expected.tokens
            assert outputs[request, 0].logprobs == expected.logprobs


def test_chunks_fill_the_budget_and_decodes_never_wait(device):
    world = World(pages=64, token_budget=8, max_sequences=4)
    harness = world.engine()
    harness.control.hold()
    harness.submit(prompt_of(4), Params(max_new_tokens=30, seed=1))
    harness.control.wait_until_held()
    harness.submit(prompt_of(40, seed=2), Params(max_new_tokens=2, seed=2))
    harness.control.release()
    harness.run()
    steps = [tokens for _, tokens, _ in harness.control.steps]
    planned = [[4]] if device == "sync" else [[4], [1]]  # before the second prompt came
    assert steps[: len(planned) + 7] == [*planned, *[[1, 7]] * 5, [1, 5], [1, 1]]
    alone = world.engine()
    alone.generate(prompt_of(40, seed=2), Params(max_new_tokens=2, seed=2))
    assert [total for total, _, _ in alone.control.steps] == [8, 8, 8, 8, 8, 1]


@pytest.mark.parametrize("length", range(9, 18))
def test_prefix_hit_equals_miss(length):
    world = World()
    prompt = prompt_of(length)
    params = Params(max_new_tokens=6, seed=3)
    expected = world.simulate(prompt, params).tokens
    harness = world.engine()
    for turn in range(2):
        got = harness.generate(prompt, params)
        assert got.tokens == expected
        assert got.cached_tokens == (0 if turn == 0 else (length - 1) // 4 * 4)
    # A longer prompt that begins with the whole conversation finds generated pages too.
    longer = prompt + expected + [1]
    got = harness.generate(longer, params)
    assert got.tokens == world.simulate(longer, params).tokens
    assert got.cached_tokens == (length + 5) // 4 * 4  # the last generated token was never computed
    off = world.engine(prefix_cache=False)
    for _ in range(2):
        got = off.generate(prompt, params)
        assert (got.tokens, got.cached_tokens) == (expected, 0)


def test_salts_do_not_share_pages():
    world = World()
    harness = world.engine()
    params = Params(max_new_tokens=1, seed=0)
    prompt = prompt_of(20)
    found = [harness.generate(prompt, params, cache_salt=salt).cached_tokens for salt in ("a", "b", "", "a", "0:a", "")]
    assert found == [0, 0, 0, 16, 0, 16]


@pytest.mark.parametrize("length", [6, 7, 8, 9, 10, 12, 14])
def test_length_dependent_keys_are_shared_among_equal_lengths_only(length):
    world = World(length_dependent_from=8, pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=10, seed=5)
    prompt = prompt_of(40)
    expected = world.simulate(prompt[:length], params).tokens
    for _ in range(2):
        for other in (length, length + 3, 30, 8):
            assert harness.generate(prompt[:other], params).tokens == world.simulate(prompt[:other], params).tokens
    # The same tokens as a longer prompt: what was generated beyond the limit must not be found.
    longer = prompt[:length] + expected
    assert harness.generate(longer, params).tokens == world.simulate(longer, params).tokens


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("length", [3, 10, 11, 12, 13, 20])
def test_sequences_that_grow_long_begin_anew(length, sequences):
    world = World(long_from=12, pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=15, seed=5)
    prompt = prompt_of(40)[:length]
    for _ in range(2):
        request = harness.submit(prompt, params, sequences=sequences)
        outputs = harness.run()
        for i in range(sequences):
            assert outputs[request, i].tokens == world.simulate(prompt, params, stream=i).tokens
    assert harness.engine.stats()["preemptions"] == (2 * sequences if length < 12 else 0)
    longer = prompt + outputs[request, 0].tokens  # what was computed before and after the change must not be mixed up
    got = harness.generate(longer, params)
    assert got.tokens == world.simulate(longer, params).tokens
    assert got.cached_tokens == (len(longer) - 1) // 4 * 4  # long sequences share their pages


def test_outputs_of_one_request_fork():
    world = World(pages=64)
    params = Params(max_new_tokens=9, seed=42)
    for length in (3, 4, 5, 37):
        harness = world.engine()
        request = harness.submit(prompt_of(length), params, sequences=5)
        outputs = harness.run()
        for i in range(5):
            assert outputs[request, i].tokens == world.simulate(prompt_of(length), params, stream=i).tokens
        assert len({tuple(outputs[request, i].tokens) for i in range(5)}) == 5
        # The prompt is computed once, however many outputs it has.
        assert sum(total for total, _, _ in harness.control.steps) == length + 5 * 8
        assert harness.engine.stats()["prompt_tokens"] == length


def test_greedy_outputs_of_one_request_are_equal():
    harness = World().engine()
    request = harness.submit(prompt_of(6), Params(max_new_tokens=9, temperature=0), sequences=3)
    outputs = harness.run()
    assert outputs[request, 0].tokens == outputs[request, 1].tokens == outputs[request, 2].tokens


def test_without_a_seed_each_request_has_its_own():
    harness = World().engine()
    requests = [harness.submit(prompt_of(4), Params(max_new_tokens=8)) for _ in range(4)]
    outputs = harness.run()
    assert len({tuple(outputs[request, 0].tokens) for request in requests}) == 4


@pytest.mark.parametrize("length_dependent_from", [0, 8, 16])
def test_preempted_equals_undisturbed(length_dependent_from):
    # Five sequences of up to 44 tokens in a pool of 64.
    world = World(pages=16, page_tokens=4, token_budget=16, max_sequences=8, length_dependent_from=length_dependent_from)
    harness = world.engine()
    harness.control.hold()
    requests = {}
    for i in range(5):
        prompt, params = prompt_of(6 + i, seed=i), Params(max_new_tokens=34, seed=i, frequency_penalty=0.5)
        requests[harness.submit(prompt, params)] = (prompt, params)
    harness.control.release()
    outputs = harness.run()
    assert harness.engine.stats()["preemptions"] > 0
    for request, (prompt, params) in requests.items():
        assert outputs[request, 0].tokens == world.simulate(prompt, params).tokens


def test_preempted_forks_equal_undisturbed():
    world = World(pages=12, page_tokens=4, token_budget=16, max_sequences=8)
    harness = world.engine()
    params = Params(max_new_tokens=30, seed=9)
    request = harness.submit(prompt_of(10), params, sequences=4)
    outputs = harness.run()
    assert harness.engine.stats()["preemptions"] > 0
    for i in range(4):
        assert outputs[request, i].tokens == world.simulate(prompt_of(10), params, stream=i).tokens


def test_mirostat_follows_the_surprise_of_what_was_drawn():
    world = World(pages=100)
    params = Params(max_new_tokens=30, seed=4, mirostat_mode=2, mirostat_tau=3.0, mirostat_eta=0.5)
    got = world.engine().generate(prompt_of(6), params).tokens
    mu, tokens = 6.0, []
    for _ in range(30):
        row = world.logits(6, [*prompt_of(6), *tokens])
        status, token, _, _ = sampler.sample(row, params, prompt_of(6), tokens, mirostat_mu=mu)
        assert status == "ok"
        wide = row.astype(np.float64)
        surprise = -((wide[token] - wide.max()) - np.log(np.exp(wide - wide.max()).sum())) / np.log(2)
        mu -= 0.5 * (surprise - 3.0)
        tokens.append(token)
    assert got == tokens


# --- ends ---


def test_ends():
    world = World(vocabulary=[bytes([i + 32]) for i in range(64)], pages=64)
    prompt = prompt_of(10)
    free = world.simulate(prompt, Params(max_new_tokens=40, seed=1)).tokens
    cases = [
        {"stop_token_ids": [free[7]]},
        {"stop_words": [free[5:8]]},
        {"stop_strings": [bytes(t + 32 for t in free[9:12])]},
        {"stop_token_ids": [free[3]], "min_new_tokens": 10},
        {"stop_words": [free[5:8]], "min_new_tokens": 20},
    ]
    harness = world.engine()
    for fields in cases:
        params = Params(max_new_tokens=40, seed=1, **fields)
        got, expected = harness.generate(prompt, params), world.simulate(prompt, params)
        assert (got.tokens, got.finish, got.stop) == (expected.tokens, expected.finish, expected.stop)
    ended = [world.simulate(prompt, Params(max_new_tokens=40, seed=1, **fields)).finish for fields in cases]
    assert ended[:3] == ["stop"] * 3


def test_longest_sequence():
    world = World(max_sequence_length=20)
    harness = world.engine()
    got = harness.generate(prompt_of(15), Params(max_new_tokens=100, seed=0))
    assert (len(got.tokens), got.finish) == (5, "length")
    with pytest.raises(ValueError, match=r"20 tokens.*fewer than 20"):
        harness.submit(prompt_of(20), Params())
    # Without a limit, what fits into the cache is the limit, to the last entry.
    world = World(pages=4, page_tokens=4, token_budget=16)
    got = world.engine().generate(prompt_of(15), Params(max_new_tokens=100, seed=0))
    assert (len(got.tokens), got.finish) == (1, "length")
    got = world.engine().generate(prompt_of(2), Params(max_new_tokens=100, seed=0))
    assert (got.tokens, got.finish) == (world.simulate(prompt_of(2), Params(max_new_tokens=100, seed=0)).tokens, "length")


def test_events_carry_figures():
    harness = World().engine()
    harness.generate(prompt_of(12), Params(max_new_tokens=1, seed=0))
    request = harness.engine.submit(np.array(prompt_of(12)), Params(max_new_tokens=4, seed=0, logprobs=0))
    events = []
    deadline = time.monotonic() + 30
    while (not events or not events[-1].finish) and time.monotonic() < deadline:
        events += harness.engine.poll()
    assert [e.request for e in events] == [request] * 4
    last = events[-1]
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens, last.steps) == (12, 8, 4, 4)
    assert last.cumulative_logprob == pytest.approx(sum(e.logprobs[0][0] for e in events), abs=1e-6)
    assert 0 <= last.wait_seconds <= last.first_token_seconds <= last.total_seconds
    assert not readable(harness.engine.event_fd())


def test_priority_then_arrival():
    world = World(max_sequences=1, token_budget=8)
    harness = world.engine()
    harness.control.hold()
    blocker = harness.submit(prompt_of(3), Params(max_new_tokens=1))
    harness.control.wait_until_held()
    requests = {
        harness.submit(prompt_of(3, seed=i), Params(max_new_tokens=1), priority=p): (p, i) for i, p in enumerate([1, 0, 2, 0, -1])
    }
    harness.control.release()
    order = [key[0] for key in harness.run() if key[0] != blocker]
    assert [requests[r] for r in order] == sorted(requests.values())


def test_a_late_high_priority_does_not_starve_an_old_low_one():
    world = World(max_sequences=1, token_budget=8)
    harness = world.engine()
    harness.control.hold()
    harness.submit(prompt_of(3), Params(max_new_tokens=1))
    harness.control.wait_until_held()
    old = harness.submit(prompt_of(3), Params(max_new_tokens=1), priority=1)
    for _ in range(300):
        last = harness.submit(prompt_of(3), Params(max_new_tokens=1), priority=0)
    harness.control.release()
    order = [key[0] for key in harness.run()]
    assert order.index(old) < order.index(last)


# --- cancel, deadline, queue, drain ---


def test_cancel_while_running_and_waiting():
    world = World(max_sequences=2, pages=64)
    harness = world.engine()
    harness.control.hold()
    running = harness.submit(prompt_of(8), Params(max_new_tokens=100, seed=0))
    harness.control.wait_until_held()
    other = harness.submit(prompt_of(8, seed=1), Params(max_new_tokens=10, seed=1))
    waiting = [harness.submit(prompt_of(8, seed=i), Params(max_new_tokens=100)) for i in range(3)]
    for request in (running, *waiting, 987654):
        harness.engine.cancel(request)
    harness.control.release()
    outputs = harness.run()
    assert [outputs[r, 0].finish for r in (running, *waiting)] == ["cancelled"] * 4
    assert outputs[other, 0].tokens == world.simulate(prompt_of(8, seed=1), Params(max_new_tokens=10, seed=1)).tokens
    stats = harness.engine.stats()
    assert (stats["cancelled"], stats["finished"]) == (4, 1)


@pytest.mark.parametrize("when", ["before the fork", "after the fork"])
def test_cancel_one_output_of_several(when):
    world = World(pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=12, seed=4)
    harness.control.hold()
    request = harness.submit(prompt_of(9), params, sequences=4)
    harness.control.wait_until_held()
    if when == "after the fork":
        harness.control.release()
        harness.wait_for(lambda: len(harness.outputs) == 4)
        harness.control.hold()
    for sequence in (0, 2):
        harness.engine.cancel(request, sequence)
    harness.control.release()
    outputs = harness.run()
    for i in range(4):
        expected = world.simulate(prompt_of(9), params, stream=i).tokens
        if outputs[request, i].finish == "cancelled":
            assert i in (0, 2)
            assert outputs[request, i].tokens == expected[: len(outputs[request, i].tokens)]
        else:
            assert outputs[request, i].tokens == expected
    if when == "before the fork":
        # Both arrived while the step that forks was running, so both ended after their first token.
        assert [len(outputs[request, i].tokens) for i in range(4)] == [1, 12, 1, 12]


def test_cancel_outputs_while_the_prompt_is_computed():
    world = World(pages=64, token_budget=8)
    harness = world.engine()
    params = Params(max_new_tokens=6, seed=4)
    harness.control.hold()
    request = harness.submit(prompt_of(20), params, sequences=4)  # three chunks
    harness.control.wait_until_held()
    for sequence in (0, 2):
        harness.engine.cancel(request, sequence)
    harness.control.release()
    outputs = harness.run()
    assert [outputs[request, i].finish for i in range(4)] == ["cancelled", "length", "cancelled", "length"]
    for i in (1, 3):
        assert outputs[request, i].tokens == world.simulate(prompt_of(20), params, stream=i).tokens
    assert outputs[request, 0].tokens == []


def test_deadline_while_running_and_waiting():
    world = World(max_sequences=1, token_budget=8)
    harness = world.engine()
    harness.control.hold()
    running = harness.submit(prompt_of(8), Params(max_new_tokens=100, seed=0), timeout_seconds=0.05)
    waiting = harness.submit(prompt_of(8), Params(max_new_tokens=100, seed=0), timeout_seconds=0.05)
    patient = harness.submit(prompt_of(8), Params(max_new_tokens=3, seed=0), timeout_seconds=1000)
    harness.control.wait_until_held()
    time.sleep(0.06)
    harness.control.release()
    outputs = harness.run()
    assert outputs[running, 0].finish == outputs[waiting, 0].finish == "timeout"
    assert outputs[waiting, 0].tokens == []
    assert outputs[waiting, 0].wait_seconds >= 0.05
    assert outputs[patient, 0].finish == "length"


def test_bounded_queue():
    world = World(max_sequences=1, token_budget=8)
    harness = world.engine(max_queue=3)
    harness.control.hold()
    harness.submit(prompt_of(3), Params(max_new_tokens=1))
    harness.control.wait_until_held()
    for _ in range(3):
        harness.submit(prompt_of(3), Params(max_new_tokens=1))
    with pytest.raises(_core.BusyError, match="3 requests wait"):
        harness.engine.submit(np.array([1]), Params(max_new_tokens=1))
    harness.control.release()
    harness.run()
    harness.submit(prompt_of(3), Params(max_new_tokens=1))
    harness.run()


def test_drain_finishes_what_was_accepted_and_refuses_more():
    harness = World(max_sequences=1, token_budget=8).engine()
    harness.control.hold()
    for _ in range(3):
        harness.submit(prompt_of(5), Params(max_new_tokens=5))
    harness.control.wait_until_held()
    assert harness.engine.drain(0.0) is False
    with pytest.raises(_core.BusyError, match="draining"):
        harness.engine.submit(np.array([1]), Params())
    harness.control.release()
    assert harness.engine.drain(60.0) is True
    outputs = harness.run()
    assert [output.finish for output in outputs.values()] == ["length"] * 3


def test_the_destructor_ends_what_runs():
    for _ in range(3):
        harness = World().engine()
        for _ in range(20):
            harness.submit(prompt_of(5), Params(max_new_tokens=100000), sequences=2)
        del harness.engine


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens is 0: .*at least 1"),
        ({"min_new_tokens": -1}, r"min_new_tokens is -1"),
        ({"min_new_tokens": 11, "max_new_tokens": 10}, r"min_new_tokens is 11: .*max_new_tokens is 10"),
        ({"temperature": -0.5}, r"temperature is -0.5"),
        ({"temperature": float("nan")}, r"temperature is nan"),
        ({"temperature": float("inf")}, r"temperature is inf"),
        ({"temperature": 1e308}, r"temperature is inf"),
        ({"temperature": "hot"}, r"temperature is 'hot'"),
        ({"top_k": -1}, r"top_k is -1"),
        ({"top_k": 2**63}, r"top_k is 9223372036854775808"),
        ({"top_p": 1.01}, r"top_p is 1.01: .*\[0, 1\]"),
        ({"top_p": float("nan")}, r"top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2.5: .*\[-2, 2\]"),
        ({"frequency_penalty": -3}, r"frequency_penalty is -3"),
        ({"logit_bias": [(64, 1.0)]}, r"logit_bias has the token id 64: .*\[0, 64\)"),
        ({"logit_bias": [(1, float("nan"))]}, r"logit_bias of token 1 is nan"),
        ({"bad_words": [[1], []]}, r"bad_words\[1\] is empty"),
        ({"stop_words": [[1, 99]]}, r"stop_words\[0\] has the token id 99"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids has the token id -1"),
        ({"stop_strings": [b""]}, r"stop_strings\[0\] is empty"),
        ({"stop_strings": [b"x"]}, r"stop_strings cannot be used: the engine has no vocabulary"),
        ({"logprobs": 65}, r"logprobs is 65"),
        ({"seed": -1}, r"seed is -1"),
    ],
)
def test_invalid_params_name_field_value_and_range(fields, message):
    harness = World().engine()
    with pytest.raises(ValueError, match=message):
        harness.submit([1, 2], Params(**fields))
    assert harness.engine.stats()["requests"] == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 64], {}, r"token id 64: .*\[0, 64\)"),
        ([1, -1], {}, "token id -1"),
        ([1, 2**40], {}, f"token id {2**40}"),
        ([0.5], {}, "array of integers"),
        ([[1]], {}, "2-dimensional"),
        ([1], {"sequences": 0}, r"sequences is 0: .*\[1, 8\]"),
        ([1], {"sequences": 9}, r"sequences is 9: .*\[1, 8\]"),
        ([1], {"timeout_seconds": -1}, "timeout_seconds is -1"),
        ([1], {"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
    ],
)
def test_invalid_requests(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        World().engine().engine.submit(np.array(prompt), Params(), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequences": 0}, r"max_sequences is 0: .*\[1, 8\]"),
        ({"max_sequences": 9}, r"max_sequences is 9: .*\[1, 8\]"),
        ({"token_budget": 7}, r"token_budget is 7: .*max_sequences is 8"),
        ({"token_budget": 33}, r"token_budget is 33: .*32\]"),
        ({"max_queue": 0}, r"max_queue is 0"),
        ({"max_sequence_length": -1}, r"max_sequence_length is -1"),
    ],
)
def test_invalid_engine_options(changes, message):
    model, _ = testing.fake_model(vocab=64, pages=8, page_tokens=4, tokens=32, sequences=8)
    options = {"max_sequences": 8, "token_budget": 32, "max_queue": 10, **changes}
    with pytest.raises(ValueError, match=message):
        _core.Engine(testing.fake_backend(), model, **options)


def test_one_wakeup_for_many_events():
    harness = World(pages=64).engine()
    for i in range(4):
        harness.submit(prompt_of(4, seed=i), Params(max_new_tokens=5))
    assert harness.engine.drain(60.0)
    assert readable(harness.engine.event_fd())
    events = harness.engine.poll()
    assert sum(len(e.tokens) for e in events) == 20
    assert not readable(harness.engine.event_fd())
    assert harness.engine.poll() == []
