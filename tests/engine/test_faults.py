"""What a failing step, a NaN and a missing page cost: the sequences concerned, and nobody else."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World, testing
from soak.clock import jumping_clock

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("fault", ["throw:forward:2", "throw:sample:2", "throw:allocate:2"])
def test_a_step_that_throws_ends_its_sequences_only(fault):
    world = World()
    harness = world.engine(fault=fault)
    params = Params(max_new_tokens=5, seed=0)
    for _ in range(2):
        request = harness.submit(PROMPT, params, sequences=2)
        outputs = harness.run()
        for i in range(2):
            assert outputs[request, i].finish == "error"
            assert "the step failed" in outputs[request, i].error
            assert "injected fault" in outputs[request, i].error
    assert harness.generate(PROMPT, params).tokens == world.simulate(PROMPT, params).tokens
    stats = harness.engine.stats()
    assert (stats["failed"], stats["finished"]) == (2, 1)


def test_requests_that_wait_survive_a_step_that_throws():
    world = World(max_sequences=1, token_budget=8)
    harness = world.engine(fault="throw:forward:1")
    harness.control.hold()  # the fault comes before the step is held
    params = Params(max_new_tokens=5, seed=0)
    requests = [harness.submit(PROMPT, params) for _ in range(3)]
    harness.control.release()
    outputs = harness.run()
    assert sorted(outputs[r, 0].finish for r in requests) == ["error", "length", "length"]


def test_nan_logits_end_their_sequence_and_leave_no_page_behind():
    world = World(pages=64)
    harness = world.engine(fault="nan:forward:1")
    params = Params(max_new_tokens=6, seed=0, logprobs=2)
    harness.control.hold()
    requests = [harness.submit([i, *PROMPT], params) for i in range(4)]
    harness.control.release()
    outputs = harness.run()
    failed = [r for r in requests if outputs[r, 0].finish == "error"]
    assert [outputs[r, 0].error for r in failed] == ["non-finite logits"]
    for i, request in enumerate(requests):
        if request not in failed:
            assert outputs[request, 0].tokens == world.simulate([i, *PROMPT], params).tokens
    i = requests.index(failed[0])
    again = harness.generate([i, *PROMPT], params)
    assert again.cached_tokens == 0
    assert again.tokens == world.simulate([i, *PROMPT], params).tokens


def test_a_poisoned_sequence_never_leaves_pages_in_the_cache():
    # Token 13 makes every later row NaN, in prompts (of several chunks) and in outputs.
    world = World(poison=13, token_budget=8, pages=64)
    harness = world.engine()
    params = Params(max_new_tokens=4, seed=1)
    prefix = [1] * 8
    harness.generate([*prefix, 2, 3], params)
    request = harness.submit([13] * 30, params, sequences=3)
    outputs = harness.run()
    assert {outputs[request, i].error for i in range(3)} == {"non-finite logits"}
    assert all(outputs[request, i].tokens == [] for i in range(3))
    assert harness.generate([13] * 30, params).cached_tokens == 0
    # It had found the first two pages; what cannot be trusted is not kept, so the next one computes them again.
    assert harness.generate([*prefix, 13, 13], params).finish == "error"
    again = harness.generate([*prefix, 2, 3], params)
    assert again.cached_tokens == 0
    assert again.tokens == world.simulate([*prefix, 2, 3], params).tokens


def test_no_pages_means_preemption_not_failure():
    world = World()
    harness = world.engine(fault="no_pages:allocate:7")
    params = Params(max_new_tokens=12, seed=0)
    requests = [harness.submit([i, *PROMPT], params, sequences=2) for i in range(3)]
    outputs = harness.run()
    for i, request in enumerate(requests):
        for stream in range(2):
            assert outputs[request, stream].tokens == world.simulate([i, *PROMPT], params, stream).tokens
    assert harness.engine.stats()["preemptions"] == 7


PLACES = ("admit", "allocate", "forward", "sample", "commit", "emit")
FAULTS = [f"{kind}:{place}" for kind in ("throw", "memory", "slow") for place in PLACES] + ["nan:forward", "no_pages:allocate"]
FELT = {"throw": "injected fault", "memory": "bad_alloc", "nan": "non-finite logits"}


def load(harness, world):
    """Requests of all kinds, more than fit at once. Returns what each output should be, without a fault."""
    sampled, told, beams = Params(max_new_tokens=9, seed=3), Params(max_new_tokens=5, seed=4, logprobs=2), Params(max_new_tokens=4)
    beams.beam_width = 2
    expected = {}
    for i in range(4):
        for params, sequences in ((sampled, 3), (told, 1)):
            request = harness.submit([i, *PROMPT], params, sequences=sequences)
            for stream in range(sequences):
                expected[request, stream] = world.simulate([i, *PROMPT], params, stream).tokens
    request = harness.submit(PROMPT, beams, sequences=2)
    whole = world.engine()
    whole.submit(PROMPT, beams, sequences=2)
    for stream in range(2):
        expected[request, stream] = whole.run()[1, stream].tokens
    return expected


def survives(fault, world):
    """Every output ends, right or with the fault's own error, and all pages are back; once the fault is used up, the engine is as
    good as before. Returns how many outputs failed."""
    harness = world.engine(fault=fault)
    expected = load(harness, world)
    params = Params(max_new_tokens=5, seed=0)
    failed, whole = 0, False
    while not whole:
        outputs = harness.run()
        for key, tokens in expected.items():
            if outputs[key].finish == "error":
                failed += 1
                assert FELT[fault.partition(":")[0]] in outputs[key].error
            else:
                assert outputs[key].tokens == tokens
        probe = harness.generate(PROMPT, params)
        whole, expected = not probe.error, {}
        assert failed < 100 and (not whole or probe.tokens == world.simulate(PROMPT, params).tokens)
        failed += not whole
    return failed


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_at_each_place(fault):
    kind, place = fault.split(":")
    started = time.monotonic()
    failed = survives(f"{fault}:1", World(pages=24))
    assert failed == 0 if kind in ("slow", "no_pages") or place == "emit" else failed > 0
    assert kind != "slow" or time.monotonic() - started > 0.5


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_at_any_moment(place):
    """Also amid a fork, a beam search and a preemption."""
    failed = [survives(f"memory:{place}:1:{after}", World(pages=24)) for after in range(0, 48)]
    assert not any(failed) if place == "emit" else sum(map(bool, failed)) > 8
    assert survives(f"memory:{place}:5:3", World(pages=24)) > 0 or place == "emit"


def test_h85_each_page_that_is_taken_fails_in_turn():
    """The k-th time that pages are wanted there is no memory, then no page: k from the first to the last time, at most 500."""
    world = World(pages=24)
    failed: list[int] = []
    while len(failed) < 500 and (not failed or failed[-1]):
        failed.append(survives(f"memory:allocate:1:{len(failed)}", world))
        assert survives(f"no_pages:allocate:1:{len(failed) - 1}", world) == 0
    assert len(failed) > 100 and all(failed[:-1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind, error", [("disk_full", "No space left on device"), ("closed_pipe", "Broken pipe")])
def test_outputs_that_take_nothing_are_no_matter_of_the_engine(kind, error, place):
    saved = [os.dup(output) for output in (1, 2)]
    try:
        failed = survives(f"{kind}:{place}:1:2", World(pages=24))
        with pytest.raises(OSError, match=error):
            os.write(2, b"x")
    finally:
        for output, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, output)
            os.close(copy)
    assert failed == 0


@pytest.fixture(scope="module")
def jumped(tmp_path_factory):
    """What clock_that_jumps.py tells of each place; made once, for both devices."""
    clock = jumping_clock(tmp_path_factory.mktemp("clock"))
    if clock is None:
        pytest.skip("no C compiler to build a clock that jumps")
    folder = Path(__file__).parent
    paths = os.pathsep.join([*sys.path, str(folder), str(folder.parent)])
    command = [sys.executable, str(folder / "clock_that_jumps.py"), *PLACES]
    child = subprocess.run(
        command, env={**os.environ, "LD_PRELOAD": str(clock), "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("place", PLACES)
def test_a_wall_clock_that_jumps_ends_no_request(place, jumped):
    assert jumped[place] == {"right": True, "hours": 1}


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_a_loop_that_ends_takes_everything_with_it_and_says_so(turns):
    harness = World().engine(fault=f"throw:loop:1:{turns}")
    params = Params(max_new_tokens=5, seed=0)
    request = harness.submit(PROMPT, params, sequences=2)
    outputs = harness.run()
    failed = "the engine has failed: injected fault"
    assert all(failed in outputs[request, i].error for i in range(2))
    assert harness.engine.stats()["loop_lost"]
    with pytest.raises(_core.MagaError, match=failed):
        harness.submit(PROMPT, params)
    harness.engine.cancel(request)
    assert harness.engine.drain(5.0)


def test_a_slow_step_counts_as_model_or_sample_time():
    for place, figure in (("forward", "model_seconds"), ("sample", "sample_seconds")):
        harness = World().engine(fault=f"slow:{place}:1")
        harness.generate(PROMPT, Params(max_new_tokens=1))
        stats = harness.engine.stats()
        assert stats[figure] >= 0.5, "the fault sleeps for half a second"
        assert stats["last_step_unix"] > 0


def test_nothing_left_to_choose_is_an_error_of_that_sequence():
    world = World(vocab=3)
    harness = world.engine()
    request = harness.submit([0, 1], Params(max_new_tokens=4, bad_words=[[0], [1], [2]]), sequences=2)
    other = harness.submit([0, 1], Params(max_new_tokens=4, seed=0))
    outputs = harness.run()
    assert all("no token can be chosen" in outputs[request, i].error for i in range(2))
    assert outputs[other, 0].tokens == world.simulate([0, 1], Params(max_new_tokens=4, seed=0)).tokens


@pytest.mark.parametrize(
    "fault",
    ["throw", "throw:forward", "throw:forward:0", "throw:forward:x", "throw:forward:1:-1", "nan:allocate:1", "slow:loop:1", ":::"],
)
def test_an_unknown_fault_is_refused(fault):
    with pytest.raises(ValueError, match="fault"):
        World().engine(fault=fault)


def test_a_clock_that_does_not_jump_is_told():
    with pytest.raises(ValueError, match=r"needs a clock that jumps: tests/soak/clock\.c"):
        World().engine(fault="clock:admit:1")


def test_the_engine_refuses_a_model_twice():
    model, _ = testing.fake_model(vocab=8, pages=8, page_tokens=4, tokens=8, sequences=4)
    options = {"max_sequences": 4, "token_budget": 8, "max_queue": 4}
    engine = _core.Engine(testing.fake_backend(), model, **options)
    with pytest.raises(ValueError):
        _core.Engine(testing.fake_backend(), model, **options)
    engine.submit(np.array([1]), Params(max_new_tokens=1))
    assert engine.drain(30.0)
