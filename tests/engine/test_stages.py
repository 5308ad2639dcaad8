"""The rare stages against their definitions in numpy, on models of known odds; formulas as cpp/decode/truncate.h names them."""

import math

import numpy as np
import pytest
from any_logits import any_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from simulation import sampler

INF = float("inf")
ODDS = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])


def logits(odds=ODDS):
    with np.errstate(divide="ignore"):
        return (np.log(np.asarray(odds, np.float64)) + 3).astype(np.float32)


def left(row):
    return [i for i, value in enumerate(row) if value > -INF]


def softmax(row):
    e = np.exp(np.asarray(row, np.float64) - np.max(row))
    return e / e.sum()


def sample(row, prompt=(), output=(), stream=0, mu=0.0, **fields):
    params = _core.SamplingParams(**fields)
    params.validate(len(row))
    return sampler.sample(np.asarray(row, np.float32), params, list(prompt), list(output), stream=stream, mirostat_mu=mu)


def frequencies(row, count=4000, **fields):
    status = [sample(row, seed=5, stream=i, **fields) for i in range(count)]
    assert {each[0] for each in status} == {"ok"}
    return np.bincount([each[1] for each in status], minlength=len(row)) / count


# --- what is dropped ---


@pytest.mark.parametrize(("a", "kept"), [(0.01, 7), (0.1, 6), (0.5, 4), (1.0, 2)])  # bars: 0.0016, 0.016, 0.08, 0.16
def test_top_a(a, kept):
    assert left(sampler.top_a(logits(), a)) == list(range(kept))


@pytest.mark.parametrize("epsilon", [0.005, 0.02, 0.12, 0.9])
def test_epsilon_cutoff(epsilon):
    assert left(sampler.epsilon_cutoff(logits(), epsilon)) == ([i for i, p in enumerate(ODDS) if p >= epsilon] or [0])


@pytest.mark.parametrize("eta", [1e-4, 0.004, 0.09, 0.5, 0.999])
def test_eta_cutoff(eta):
    entropy = -(ODDS * np.log(ODDS)).sum()
    bar = min(eta, math.sqrt(eta) * math.exp(-entropy))
    assert left(sampler.eta_cutoff(logits(), eta)) == ([i for i, p in enumerate(ODDS) if p >= bar] or [0])


@pytest.mark.parametrize("n", [0.1, 1.0, 1.7, 3.0])
def test_top_n_sigma(n):
    row = logits()
    bar = row.max() - n * np.std(row.astype(np.float64), ddof=1)
    assert left(sampler.top_n_sigma(row, n)) == [i for i, value in enumerate(row) if value >= bar]
    banned = np.concatenate([row, [-INF] * 5]).astype(np.float32)
    assert left(sampler.top_n_sigma(banned, n)) == left(sampler.top_n_sigma(row, n))


@pytest.mark.parametrize("mass", [0.0, 0.2, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("seed", range(4))
def test_typical(mass, seed):
    odds = np.random.default_rng(seed).dirichlet(np.ones(40) * 0.5)
    distance = np.abs(-np.log(odds) + (odds * np.log(odds)).sum())
    order = np.argsort(distance)
    count = int(np.searchsorted(np.cumsum(odds[order]), mass)) + 1 if mass else 1
    assert left(sampler.typical(logits(odds), mass)) == sorted(order[:count].tolist())


def tail_free(odds, z):
    """As in the paper's reference code."""
    order = np.argsort(-odds, kind="stable")
    second = np.abs(np.diff(np.diff(odds[order])))
    sums = np.cumsum(second / second.sum())
    dropped = np.concatenate([[False], sums > z, [True]])
    return sorted(order[~dropped].tolist())


@pytest.mark.parametrize("z", [0.0, 0.3, 0.7, 0.95, 0.999])
@pytest.mark.parametrize("seed", range(4))
def test_tail_free(z, seed):
    odds = np.random.default_rng(seed).dirichlet(np.ones(30) * 0.3)
    assert left(sampler.tail_free(logits(odds), z)) == tail_free(odds, z)
    with_banned = np.concatenate([odds, np.zeros(9)])
    assert left(sampler.tail_free(logits(with_banned), z)) == [i for i in tail_free(with_banned, z) if i < 30]


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.5, range(7)), (0.3, range(7)), (0.2, [1, 2, 3, 4, 5, 6]), (0.1 - 1e-6, [3, 4, 5, 6]), (0.0, [6])],
)
def test_exclude_top_leaves_the_least_likely_of_those_above(threshold, kept):
    assert left(sampler.exclude_top(logits(), threshold)) == list(kept)


@pytest.mark.parametrize("mu", [0.5, 1.4, 2.1, 4.5, 9.0])
def test_surprising_tokens_are_dropped(mu):
    assert left(sampler.drop_surprising(logits(), mu)) == ([i for i, p in enumerate(ODDS) if -math.log2(p) <= mu] or [0])


def test_exclude_top_counts_no_banned_token():
    row = np.concatenate([logits(), [-INF, -1e4]]).astype(np.float32)
    assert left(sampler.exclude_top(row, 0.0)) == [6, 8]


# --- what is reshaped ---


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynamic_temperature(exponent):
    share = -(ODDS * np.log(ODDS)).sum() / math.log(len(ODDS))
    expected = 0.5 + 1.5 * share**exponent
    assert sampler.dynamic_temperature(logits(), 0.5, 2.0, exponent) == pytest.approx(expected, rel=1e-5)
    banned = np.concatenate([logits(), [-INF]]).astype(np.float32)
    assert sampler.dynamic_temperature(banned, 0.5, 2.0, exponent) == pytest.approx(expected, rel=1e-5)
    assert sampler.dynamic_temperature(np.zeros(8, np.float32), 0.5, 2.0, exponent) == pytest.approx(2.0)


@pytest.mark.parametrize("curve", [1.0, 1.5, 3.0, 4.0])
def test_quadratic(curve):
    row, factor = logits(), 0.3
    d = row.astype(np.float64) - row.max()
    expected = row.max() - factor * (3 - curve) / 2 * d**2 + factor * (curve - 1) / 2 * d**3
    np.testing.assert_allclose(sampler.quadratic(row, factor, curve), expected, rtol=1e-5)
    if curve == 1:
        np.testing.assert_allclose(sampler.quadratic(row, factor, curve), row.max() - factor * d**2, rtol=1e-5)


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0])
def test_skew(value):
    row = logits()[::-1].copy()  # the order of ids does not matter
    expected = np.diff(np.cumsum(ODDS) ** math.exp(value), prepend=0)
    np.testing.assert_allclose(softmax(sampler.skew(row, value))[::-1], expected, rtol=1e-4)


# --- against repetition ---


@pytest.mark.parametrize(
    ("size", "tokens", "banned"),
    [
        (1, [3, 5, 3], {3, 5}),
        (2, [1, 2, 3, 1], {2}),
        (2, [1, 2, 1, 4, 1], {2, 4}),
        (3, [1, 2, 3, 1, 2], {3}),
        (3, [1, 2, 3, 2], set()),
        (4, [1, 2], set()),
    ],
)
def test_no_repeat_ngram(size, tokens, banned):
    row = sampler.no_repeat_ngram(np.zeros(8, np.float32), tokens, size)
    assert {i for i in range(8) if row[i] == -INF} == banned


def dry(tokens, vocab, multiplier, base, allowed_length, breakers):
    """The rule as its author wrote it: place by place."""
    longest: dict[int, int] = {}
    for place in range(len(tokens) - 1):
        if tokens[place] != tokens[-1] or tokens[-1] in breakers or tokens[place + 1] in breakers:
            continue
        length = 1
        while length <= place and tokens[place - length] == tokens[-1 - length] and tokens[-1 - length] not in breakers:
            length += 1
        follower = tokens[place + 1]
        longest[follower] = max(longest.get(follower, 0), length)
    row = np.zeros(vocab)
    for token, length in longest.items():
        if length >= allowed_length:
            row[token] -= multiplier * base ** (length - allowed_length)
    return row


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_dry(data):
    vocab = 4
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), max_size=40))
    breakers = data.draw(st.lists(st.integers(0, vocab - 1), max_size=1))
    allowed, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 30))
    got = sampler.dry(np.zeros(vocab, np.float32), tokens, 0.8, 1.5, allowed, size, breakers)
    expected = dry(tokens[-size:] if size else tokens, vocab, 0.8, 1.5, allowed, breakers)
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_dry_of_a_long_loop_is_a_ban_that_stays_finite():
    row = sampler.dry(np.zeros(3, np.float32), [0, 1] * 4000, 0.8, 1.75, 2, 0, [])
    assert row[0] < -1e30
    assert np.isfinite(row).all()


# --- the chain ---


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_a": 0.5}, [0, 1, 2, 3]),
        ({"epsilon_cutoff": 500}, [0, 1, 2, 3, 4]),
        ({"eta_cutoff": 4000}, [i for i, p in enumerate(ODDS) if p >= math.sqrt(0.4) * math.exp((ODDS * np.log(ODDS)).sum())]),
        ({"nsigma": 0.5}, [0, 1]),
        ({"typical_p": 0.2}, [1]),
        ({"tfs": 0.5}, tail_free(ODDS, 0.5)),
        ({"top_a": 1e-6, "top_k": 3}, [0, 1, 2]),
        ({"top_a": 1e-6, "top_p": 0.6}, [0, 1]),
        ({"top_a": 1e-6, "min_p": 0.2}, [0, 1, 2, 3]),
        ({"xtc_probability": 1, "xtc_threshold": 0.2}, [1, 2, 3, 4, 5, 6]),
        ({"token_bans": [0, 3]}, [1, 2, 4, 5, 6]),
        ({"allowed_tokens": [2, 4]}, [2, 4]),
        ({"token_ban_ranges": [([0, 1], 0, 1)]}, [2, 3, 4, 5, 6]),
        ({"token_ban_ranges": [([0, 1], 1, 9)]}, list(range(7))),
    ],
)
def test_draws_follow_the_odds_of_what_is_left(fields, kept):
    expected = np.where(np.isin(np.arange(7), kept), ODDS, 0)
    expected /= expected.sum()
    got = frequencies(logits(), **fields)
    assert set(np.flatnonzero(got)) <= set(kept)
    assert np.abs(got - expected).sum() / 2 < 0.03


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dynatemp_min": 2.0, "dynatemp_max": 2.0}, ODDS**0.5),
        ({"temperature": 2.0, "temperature_last": True}, ODDS**0.5),
        ({"smoothing_factor": 0.5}, np.exp(-0.5 * np.log(ODDS / 0.4) ** 2)),
        ({"skew": 0.7}, np.diff(np.cumsum(ODDS) ** math.exp(0.7), prepend=0)),
        ({"xtc_probability": 0.25, "xtc_threshold": 0.2}, 0.75 * ODDS + 0.25 * np.where(np.arange(7) > 0, ODDS, 0) / 0.6),
    ],
)
def test_draws_follow_the_reshaped_odds(fields, expected):
    assert np.abs(frequencies(logits(), **fields) - expected / expected.sum()).sum() / 2 < 0.03


def test_the_default_order():
    """Each pair of fields gives another set in the other order."""
    hot = {"temperature": 3.0, "epsilon_cutoff": 1000}
    flat = ODDS ** (1 / 3) / (ODDS ** (1 / 3)).sum()
    kept = {i for i in range(7) if flat[i] >= 0.1}
    assert set(np.flatnonzero(frequencies(logits(), **hot))) == kept, "temperature comes before the cutoffs"
    assert set(np.flatnonzero(frequencies(logits(), temperature_last=True, **hot))) == {0, 1, 2, 3}
    own = frequencies(logits(), sampler_priority=[11, 5], **hot)
    assert set(np.flatnonzero(own)) == {0, 1, 2, 3}, "the request's own order"
    # XTC comes behind top_k: of two that are left, the better one goes.
    assert set(np.flatnonzero(frequencies(logits(), top_k=2, xtc_probability=1, xtc_threshold=0.2))) == {1}
    first = frequencies(logits(), top_k=2, xtc_probability=1, xtc_threshold=0.2, sampler_priority=[13])
    assert set(np.flatnonzero(first)) == {1, 2}


def test_penalties_and_bans_come_first():
    row = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    assert sample(row, top_a=1.0, token_bans=[0], logit_bias=[(0, 50.0)], temperature=0)[1] == 1, "a bias cannot lift a ban"
    repeated = {"dry_multiplier": 4.0, "temperature": 0}
    assert sample(row, prompt=[1, 2, 0, 3, 1, 2], **repeated)[1] == 1, "0 followed 1 2 before"
    assert sample(row, prompt=[1, 2, 0, 3, 1, 2], dry_breakers=[2], **repeated)[1] == 0
    assert sample(row, prompt=[1, 0, 1], no_repeat_ngram_size=2, temperature=0)[1] == 1
    assert sample(row, prompt=[1, 0, 1], no_repeat_ngram_size=2, bad_words=[[1, 1]], temperature=0)[1] == 2


def test_nothing_left_to_choose():
    assert sample(logits(), token_bans=list(range(7)))[0] == "no_token"
    assert sample(logits(), allowed_tokens=[3], token_bans=[3], temperature=0)[0] == "no_token"


def test_greedy_is_the_most_likely_token_whatever_would_be_dropped():
    fields = {"typical_p": 0.01, "xtc_probability": 1, "xtc_threshold": 0.01, "mirostat_mode": 2}
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}):
        assert sample(logits(), mu=10.0, **fields, **greedy)[1] == 0


def test_mirostat_keeps_what_mu_allows():
    got = {sample(logits(), mu=2.1, stream=i, seed=1, mirostat_mode=2)[1] for i in range(200)}
    assert got == {0, 1}


def test_a_seed_draws_the_same_through_either_chain():
    """A stage that changes nothing sends the request through the other code."""
    rng = np.random.default_rng(0)
    for i in range(50):
        row = rng.normal(0, 3, 300).astype(np.float32)
        for fields in ({}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}):
            assert sample(row, seed=i, **fields)[1] == sample(row, seed=i, token_ban_ranges=[([0], 5, 0)], **fields)[1]


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], 0.9), ([1], 0.45), ([1, 1], 0.225), ([1, 1, 1, 1], 0.1), ([1, 5], 0.9), ([5, 1], 0.45)],
)
def test_top_p_falls_and_begins_anew(output, expected):
    """FasterTransformer's rule: times decay behind every token, to min at least; behind a reset token it is top_p again."""
    fields = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_min": 0.1, "top_p_reset_ids": [5], "seed": 2}
    for stream in range(60):
        got = sample(logits(), output=output, stream=stream, **fields)
        assert got == sample(logits(), output=output, stream=stream, seed=2, top_p=expected)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_valid_fields_on_any_row_choose_a_token(data):
    vocab = data.draw(st.integers(1, 40))
    row = data.draw(any_logits(vocab))
    share, ids = st.floats(0, 1), st.integers(0, vocab - 1)
    options = {
        "temperature": st.floats(0, 100),
        "top_a": share,
        "tfs": share,
        "typical_p": share,
        "epsilon_cutoff": st.floats(0, 9999),
        "eta_cutoff": st.floats(0, 9999),
        "nsigma": st.floats(0, 5),
        "dynatemp_max": st.floats(0, 5),
        "dynatemp_exponent": st.floats(0, 5),
        "temperature_last": st.booleans(),
        "smoothing_factor": st.floats(0, 10),
        "smoothing_curve": st.floats(1, 10),
        "skew": st.floats(-20, 20),
        "xtc_probability": share,
        "xtc_threshold": share,
        "mirostat_mode": st.sampled_from([0, 2]),
        "no_repeat_ngram_size": st.integers(0, 4),
        "dry_multiplier": st.floats(0, 5),
        "dry_allowed_length": st.integers(1, 4),
        "dry_breakers": st.lists(ids, max_size=2),
        "token_bans": st.lists(ids, max_size=2),
        "allowed_tokens": st.lists(ids, max_size=3),
        "sampler_priority": st.lists(st.integers(0, 13), unique=True),
        "top_p_decay": st.floats(0.01, 1),
        "top_p_reset_ids": st.lists(ids, max_size=2),
        "top_p": share,
        "top_k": st.integers(0, 50),
    }
    chosen = data.draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=8))
    fields = {name: data.draw(options[name]) for name in chosen}
    prompt, output = data.draw(st.lists(ids, max_size=12)), data.draw(st.lists(ids, max_size=12))
    status, token, _, _ = sample(row, prompt, output, mu=data.draw(st.floats(-5, 20)), seed=1, **fields)
    if not np.isfinite(row.max()):
        assert status == "non_finite"
    elif status == "ok":
        assert row[token] > -INF
        assert token not in fields.get("token_bans", [])
        assert not fields.get("allowed_tokens") or token in fields["allowed_tokens"]
    else:
        assert status == "no_token"
        assert {"token_bans", "allowed_tokens", "no_repeat_ngram_size"} & set(chosen)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_a": 1.5}, "top_a is 1.5"),
        ({"tfs": -0.1}, "tfs is -0.1"),
        ({"typical_p": float("nan")}, "typical_p is nan"),
        ({"epsilon_cutoff": 10000}, "epsilon_cutoff is 10000"),
        ({"dynatemp_min": 1.0}, "dynatemp_min is 1: .*dynatemp_max"),
        ({"smoothing_curve": 0.5}, "smoothing_curve is 0.5"),
        ({"mirostat_mode": 1}, "mirostat_mode is 1"),
        ({"dry_base": 0.5}, "dry_base is 0.5"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0"),
        ({"token_bans": [7]}, "token_bans has the token id 7"),
        ({"token_ban_ranges": [([1], -1, 2)]}, "token_ban_ranges has start -1"),
        ({"sampler_priority": [14]}, "sampler_priority\\[0\\] is 14"),
        ({"sampler_priority": [2, 2]}, "sampler_priority has 2 more than once"),
        ({"top_p_decay": 0.0}, "top_p_decay is 0"),
        ({"top_p_reset_ids": [-1]}, "top_p_reset_ids has the token id -1"),
        ({"beam_width": 1}, "beam width is 1"),
        ({"beam_stop": "soon"}, "beam_stop is 'soon'"),
        ({"beam_width": 2, "logprobs": 0}, "a beam search has no logprobs"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        _core.SamplingParams(**fields).validate(7)
