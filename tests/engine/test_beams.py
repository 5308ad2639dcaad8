"""Beam search over the fake model, on both kinds of device: what each beam reads must be the pages of the beam it continues."""

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")


def prompt_of(length, seed=0, vocab=64):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def search(world, prompt, width, most, stops=()):
    """The rule of tests/models/test_beam_search.py, written down: (tokens, log probability) of the best `width` outputs."""
    beams, ended = [([], np.float32(0))], []
    for length in range(1, most + 1):
        following = []
        for tokens, score in beams:
            row = world.logits(len(prompt), [*prompt, *tokens]).astype(np.float64)
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            following += [([*tokens, token], score + np.float32(value)) for token, value in enumerate(logprobs)]
        following.sort(key=lambda each: -each[1])
        beams = []
        for rank, (tokens, score) in enumerate(following[: max(2, 1 + len(stops)) * width]):
            if tokens[-1] in stops or length == most:
                ended += [(tokens, score)] if rank < width else []
            elif len(beams) < width:
                beams.append((tokens, score))
        ended = sorted(ended, key=lambda each: -each[1] / len(each[0]))[:width]
        if not beams or (len(ended) == width and beams[0][1] / length <= ended[-1][1] / len(ended[-1][0])):
            break
    return ended


def check(outputs, request, wanted, stops=()):
    for index, (tokens, _) in enumerate(wanted):
        assert outputs[request, index].tokens == tokens
        assert outputs[request, index].finish == ("stop" if tokens[-1] in stops else "length")


@pytest.mark.parametrize("length", [1, 4, 7, 33])
@pytest.mark.parametrize("stops", [(), (7, 30)])
def test_alone(length, stops):
    world = World(pages=200)
    harness = world.engine()
    params = Params(max_new_tokens=9, beam_width=4, stop_token_ids=list(stops))
    request = harness.submit(prompt_of(length), params, sequences=4)
    check(harness.run(), request, search(world, prompt_of(length), 4, 9, stops), stops)


@pytest.mark.parametrize("pages", [11, 14, 200])
def test_among_others_with_few_pages(pages):
    world = World(pages=pages, token_budget=16, max_sequences=8)
    harness = world.engine()
    harness.control.hold()  # until all have come
    wanted = {}
    for i in range(5):
        prompt, width = prompt_of(4 + 5 * i, i), 2 + i % 3
        params = Params(max_new_tokens=8 + i, beam_width=width, stop_token_ids=[7, 30])
        wanted[harness.submit(prompt, params, sequences=width)] = search(world, prompt, width, 8 + i, (7, 30))
    drawn = harness.submit(prompt_of(9, 9), Params(max_new_tokens=25, seed=1))
    harness.control.release()
    outputs = harness.run()
    for request, outputs_of_it in wanted.items():
        check(outputs, request, outputs_of_it, (7, 30))
    assert outputs[drawn, 0].tokens == world.simulate(prompt_of(9, 9), Params(max_new_tokens=25, seed=1)).tokens
    if pages == 11:
        assert harness.engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("long_from", [8, 12])
def test_beams_that_grow_long(long_from):
    world = World(pages=100, long_from=long_from)
    harness = world.engine()
    request = harness.submit(prompt_of(5), Params(max_new_tokens=10, beam_width=3), sequences=3)
    check(harness.run(), request, search(world, prompt_of(5), 3, 10))


def test_prompt_log_probabilities_come_once():
    world = World(pages=100)
    harness = world.engine()
    request = harness.submit(prompt_of(9), Params(max_new_tokens=3, beam_width=3, prompt_logprobs=0), sequences=2)
    outputs = harness.run()
    assert len(outputs[request, 0].prompt_logprobs) == 8
    assert not outputs[request, 1].prompt_logprobs


def test_bans_that_leave_too_few_tokens():
    world = World(pages=100)
    harness = world.engine()
    request = harness.submit([1, 2], Params(max_new_tokens=1, beam_width=4, allowed_tokens=[3, 4]), sequences=3)
    outputs = harness.run()
    assert {outputs[request, i].error for i in range(3)} == {"only 2 outputs can be told apart: bans leave too few tokens"}
    got = harness.submit([1, 2], Params(max_new_tokens=2, beam_width=4, allowed_tokens=[3, 4]), sequences=4)
    outputs = harness.run()
    assert sorted(outputs[got, i].tokens for i in range(4)) == [[3, 3], [3, 4], [4, 3], [4, 4]]


def test_a_row_that_is_not_finite_ends_all_of_them():
    world = World(pages=100, poison=2)
    harness = world.engine()
    request = harness.submit([1, 2], Params(max_new_tokens=2, beam_width=3), sequences=3)
    outputs = harness.run()
    assert [outputs[request, i].error for i in range(3)] == ["non-finite logits"] * 3
