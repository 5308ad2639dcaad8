"""What the engine tells of its rows of logits: log probabilities of prompts, and the logits that tokens were chosen from."""

import numpy as np
import pytest
from maga_transformer import _core
from simulation import World, sampler

Params = _core.SamplingParams
pytestmark = pytest.mark.usefixtures("device")


def prompt_of(length, seed=0, vocab=64):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def expected(world, prompt, top):
    """By the definition: log_softmax of the logits behind each prefix of the prompt."""
    for end in range(1, len(prompt)):
        row = world.logits(len(prompt), prompt[:end]).astype(np.float64)
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.lexsort((np.arange(len(row)), -row))[:top]
        token = prompt[end]
        yield logprobs[token], int((row > row[token]).sum()) + 1, [(int(i), logprobs[i]) for i in best]


def check(world, got, prompt, top=0):
    wanted = list(expected(world, prompt, top))
    assert [rank for _, rank, _ in got] == [rank for _, rank, _ in wanted]
    np.testing.assert_allclose([value for value, _, _ in got], [value for value, _, _ in wanted], atol=1e-5)
    for (_, _, tops), (_, _, best) in zip(got, wanted, strict=True):
        assert [token for token, _ in tops] == [token for token, _ in best]
        np.testing.assert_allclose([value for _, value in tops], [value for _, value in best], atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7, 33])
@pytest.mark.parametrize("rows", [8, 11, 100])
def test_every_token_of_a_prompt_but_the_first_has_one(length, rows):
    world = World(logit_rows=rows)
    harness = world.engine()
    prompt = prompt_of(length)
    for turn in range(2):
        got = harness.generate(prompt, Params(max_new_tokens=3, seed=1, prompt_logprobs=2))
        check(world, got.prompt_logprobs, prompt, top=2)
        assert got.tokens == world.simulate(prompt, Params(max_new_tokens=3, seed=1)).tokens
        assert got.cached_tokens == 0, f"turn {turn}: logits of cached tokens would be missing"


def test_no_step_has_more_rows_than_the_model_was_loaded_for():
    """The fake model refuses larger steps."""
    world = World(pages=100, logit_rows=8, max_sequences=8, token_budget=40)
    harness = world.engine()
    prompts = [prompt_of(20 + 3 * i, seed=i) for i in range(6)]
    params = [Params(max_new_tokens=9, seed=i, prompt_logprobs=-1 if i % 2 else 0) for i in range(6)]
    requests = [harness.submit(*each) for each in zip(prompts, params, strict=True)]
    outputs = harness.run()
    for i, request in enumerate(requests):
        assert outputs[request, 0].tokens == world.simulate(prompts[i], params[i]).tokens
        if i % 2 == 0:
            check(world, outputs[request, 0].prompt_logprobs, prompts[i])


def test_nothing_is_told_twice_when_a_prompt_is_preempted():
    """vllm PR #29071."""
    world = World(pages=14, logit_rows=8, max_sequences=4, token_budget=8)
    harness = world.engine()
    prompts = [prompt_of(20, seed=i) for i in range(3)]
    harness.control.hold()
    requests = [harness.submit(prompt, Params(max_new_tokens=16, seed=1, prompt_logprobs=1)) for prompt in prompts]
    harness.control.release()
    outputs = harness.run()
    assert harness.engine.stats()["preemptions"] > 0
    for prompt, request in zip(prompts, requests, strict=True):
        check(world, outputs[request, 0].prompt_logprobs, prompt, top=1)


def test_outputs_of_one_prompt_share_its_log_probabilities():
    world = World()
    harness = world.engine()
    request = harness.submit(prompt_of(9), Params(max_new_tokens=2, seed=1, prompt_logprobs=0), sequences=3)
    outputs = harness.run()
    check(world, outputs[request, 0].prompt_logprobs, prompt_of(9))
    assert not outputs[request, 1].prompt_logprobs
    assert not outputs[request, 2].prompt_logprobs


@pytest.mark.parametrize("length", [1, 20])
def test_no_new_tokens_at_all(length):
    world = World()
    harness = world.engine()
    got = harness.generate(prompt_of(length), Params(max_new_tokens=0, prompt_logprobs=0))
    check(world, got.prompt_logprobs, prompt_of(length))
    assert (got.tokens, got.finish) == ([], "length")
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        harness.submit([1], Params(max_new_tokens=0))


def test_a_row_that_is_not_finite_ends_its_request_only():
    world = World(poison=63)
    harness = world.engine()
    bad = [*prompt_of(8, vocab=60), 63, *prompt_of(8, vocab=60)]
    failing = harness.submit(bad, Params(max_new_tokens=2, prompt_logprobs=0))
    good = harness.submit(prompt_of(9, vocab=60), Params(max_new_tokens=2, temperature=0, prompt_logprobs=0))
    outputs = harness.run()
    assert (outputs[failing, 0].finish, outputs[failing, 0].error) == ("error", "non-finite logits")
    check(world, outputs[good, 0].prompt_logprobs, prompt_of(9, vocab=60))


def test_logits_are_those_that_each_token_was_chosen_from():
    world = World()
    harness = world.engine()
    prompt = prompt_of(10)
    got = harness.generate(prompt, Params(max_new_tokens=4, seed=3, return_logits=True, logit_bias=[(5, 3.0)]))
    for i, row in enumerate(got.logits):
        assert row == world.logits(10, [*prompt, *got.tokens[:i]]).tolist()
    assert len(got.logits) == 4
    few = harness.generate(prompt, Params(max_new_tokens=1, seed=3, return_logits=True, select_tokens=[7, 0, 7]))
    assert few.logits == [[got.logits[0][i] for i in (7, 0, 7)]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"prompt_logprobs": 65}, "prompt_logprobs is 65"),
        ({"select_tokens": [64]}, "select_tokens has the token id 64"),
        ({"return_hidden_states": True}, "return_hidden_states is true: this model has none"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        World().engine().submit([1], Params(**fields))


def test_rank_counts_larger_logits():
    assert sampler.rank(np.array([1, 3, 2, 3], np.float32), 2) == 3
    assert sampler.rank(np.array([1, 3, 2, 3], np.float32), 3) == 1
