"""Random request streams: whatever is batched, cut, preempted, forked, evicted or cancelled, each output is what it is alone."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from simulation import Output, World

pytestmark = pytest.mark.usefixtures("device")
VOCABULARY = [bytes([97 + i % 26]) * (1 + i % 3) for i in range(32)]


@st.composite
def worlds(draw):
    page_tokens = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sequences = draw(st.integers(1, 6))
    return World(
        vocab=32,
        page_tokens=page_tokens,
        pages=draw(st.integers(-(-24 // page_tokens), -(-120 // page_tokens))),
        token_budget=sequences + draw(st.integers(0, 24)),
        max_sequences=sequences,
        **draw(st.sampled_from([{}, {}, *({key: at} for key in ("length_dependent_from", "long_from") for at in (5, 12))])),
        poison=draw(st.sampled_from([-1, -1, 31])),
        vocabulary=VOCABULARY,
    )


@st.composite
def requests(draw, world):
    # Prompts share beginnings, so that the prefix cache has something to find.
    prompt = [7] * draw(st.integers(0, 10)) + draw(st.lists(st.integers(0, 31), min_size=1, max_size=8))
    params = {
        "max_new_tokens": draw(st.integers(1, 14)),
        "seed": draw(st.integers(0, 5)),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0])),
        "top_k": draw(st.sampled_from([0, 5])),
        "top_p": draw(st.sampled_from([1.0, 0.8])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.6])),
        "logprobs": draw(st.sampled_from([-1, 0, 2])),
        "stop_token_ids": draw(st.sampled_from([[], [3, 4]])),
        "stop_words": draw(st.sampled_from([[], [[5], [6, 7]]])),
        "stop_strings": draw(st.sampled_from([[], [b"bb", b"ka"]])),
        "bad_words": draw(st.sampled_from([[], [[1, 2], [9]]])),
    }
    params["min_new_tokens"] = draw(st.integers(0, min(3, params["max_new_tokens"])))
    return {
        "prompt": prompt[: world.longest - 1],
        "params": _core.SamplingParams(**params),
        "sequences": draw(st.integers(1, world.max_sequences)),
        "priority": draw(st.integers(-1, 1)),
        "cache_salt": draw(st.sampled_from(["", "", "x"])),
        "cancel": draw(st.sampled_from([None] * 6 + [-1, 0, 1])),
    }


@st.composite
def streams(draw):
    world = draw(worlds())
    return world, draw(st.lists(requests(world), min_size=1, max_size=8)), draw(st.booleans())


def check(world, harness, stream, submitted):
    outputs = harness.run()
    for request, r in zip(submitted, stream, strict=True):
        for i in range(r["sequences"]):
            got, expected = outputs[request, i], world.simulate(r["prompt"], r["params"], stream=i)
            if got.finish == "cancelled":
                assert r["cancel"] in (-1, i)
                assert got.tokens == expected.tokens[: len(got.tokens)]
                continue
            assert (got.tokens, got.finish, got.error) == (expected.tokens, expected.finish, expected.error)
            assert got.logprobs == expected.logprobs
            if got.finish == "stop":
                assert got.stop == expected.stop


@settings(max_examples=120, deadline=None)
@given(streams())
def test_any_stream(case):
    world, stream, at_once = case
    harness = world.engine()
    if at_once:
        harness.control.hold()
    submitted = []
    for r in stream:
        options = {name: r[name] for name in ("sequences", "priority", "cache_salt")}
        submitted.append(harness.submit(r["prompt"], r["params"], **options))
        if r["cancel"] is not None:
            harness.engine.cancel(submitted[-1], r["cancel"])
    harness.control.release()
    check(world, harness, stream, submitted)
    # Once more over the pages that the first pass left in the cache.
    again = [harness.submit(r["prompt"], r["params"], cache_salt=r["cache_salt"], sequences=r["sequences"]) for r in stream]
    check(world, harness, [{**r, "cancel": None} for r in stream], again)
    assert all(tokens <= world.token_budget for tokens, _, _ in harness.control.steps)


FAULTS = ["throw:forward", "throw:sample", "throw:allocate", "nan:forward", "no_pages:allocate"]


@settings(max_examples=120, deadline=None)
@given(streams(), st.data())
def test_any_stream_with_faults_and_late_cancels(case, data):
    world, stream, _ = case
    fault = data.draw(st.sampled_from(["", *FAULTS]))
    harness = world.engine(fault=f"{fault}:{data.draw(st.integers(1, 4))}" if fault else "")
    submitted = [
        harness.submit(r["prompt"], r["params"], **{name: r[name] for name in ("sequences", "priority", "cache_salt")})
        for r in stream
    ]
    # A cancellation comes once so many tokens of the request are there; the step under way may or may not be held then.
    for request, r in zip(submitted, stream, strict=True):
        if r["cancel"] is None:
            continue
        wanted, held = data.draw(st.integers(0, 6)), data.draw(st.booleans())

        def seen(request=request, r=r, wanted=wanted):
            outputs = [harness.outputs.get((request, i), Output()) for i in range(r["sequences"])]
            return all(o.finish for o in outputs) or sum(len(o.tokens) for o in outputs) >= wanted

        harness.wait_for(seen)
        if held:
            harness.control.hold()
        harness.engine.cancel(request, r["cancel"])
        harness.control.release()
    outputs = harness.run()
    for request, r in zip(submitted, stream, strict=True):
        for i in range(r["sequences"]):
            got, expected = outputs[request, i], world.simulate(r["prompt"], r["params"], stream=i)
            if got.finish == "cancelled" or (fault and got.finish == "error"):
                assert got.tokens == expected.tokens[: len(got.tokens)]
                assert got.finish == "error" or r["cancel"] in (-1, i)
            else:
                assert (got.tokens, got.finish) == (expected.tokens, expected.finish)
    # Nothing wrong is left in the cache. A fault that has not come yet comes now.
    for r in stream:
        again = harness.submit(r["prompt"], r["params"], cache_salt=r["cache_salt"])
        got, expected = harness.run()[again, 0], world.simulate(r["prompt"], r["params"])
        assert got.tokens == expected.tokens[: len(got.tokens)]
        assert got.finish == expected.finish or (fault and got.finish == "error")


def test_small_pool_soak():
    """Many requests through a pool that holds two of them: thousands of evictions, hundreds of preemptions."""
    world = World(vocab=64, pages=20, page_tokens=4, token_budget=24, max_sequences=6)
    harness = world.engine(threads=2)
    random = np.random.default_rng(0)
    cases = {}
    for i in range(300):
        prompt = [5] * int(random.integers(0, 20)) + random.integers(0, 64, int(random.integers(1, 20))).tolist()
        params = _core.SamplingParams(max_new_tokens=int(random.integers(1, 30)), seed=i)
        n = int(random.integers(1, 4))
        request = harness.submit(prompt, params, sequences=n, cache_salt=str(i % 3))
        cases[request] = (prompt, params, n)
        if random.random() < 0.2:
            harness.engine.cancel(request)
    outputs = harness.run()
    stats = harness.engine.stats()
    assert stats["preemptions"] > 50
    assert stats["cached_tokens"] > 0
    for request, (prompt, params, n) in cases.items():
        for i in range(n):
            got = outputs[request, i]
            expected = world.simulate(prompt, params, stream=i).tokens
            assert got.tokens == (expected if got.finish == "length" else expected[: len(got.tokens)])
            assert got.finish in ("length", "cancelled")


def test_many_threads_at_the_doors():
    world = World(pages=64, max_sequences=8, token_budget=32)
    harness = world.engine(threads=2)
    params = _core.SamplingParams(max_new_tokens=6, seed=3)
    ids: list[int] = []
    lock = threading.Lock()

    def client(number):
        for i in range(20):
            request = harness.engine.submit(np.array([number, i, 1, 2, 3]), params)
            with lock:
                ids.append(request)
            if i % 5 == 4:
                harness.engine.cancel(request)
            harness.engine.stats()

    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    while any(thread.is_alive() for thread in clients):
        harness.collect()
    for thread in clients:
        thread.join()
    assert len(set(ids)) == 160
    harness.expected = {(request, 0) for request in ids}
    outputs = harness.run()
    assert {output.finish for output in outputs.values()} <= {"length", "cancelled"}
    assert sum(output.finish == "length" for output in outputs.values()) >= 128
