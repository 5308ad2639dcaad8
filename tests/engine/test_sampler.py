"""Each stage of the sampler against its definition in numpy."""

import numpy as np
import pytest
from any_logits import any_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from simulation import sampler

INF = float("inf")


def rows(vocab=1000, count=5, spread=4.0):
    for seed in range(count):
        yield np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def softmax(row):
    e = np.exp(row.astype(np.float64) - row.max())
    return e / e.sum()


def best_first(row):
    return np.lexsort((np.arange(len(row)), -row))


def sample(row, prompt=(), output=(), stream=0, **fields):
    return sampler.sample(np.asarray(row, np.float32), _core.SamplingParams(**fields), list(prompt), list(output), stream=stream)


# --- passes over a row ---


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=3000))
def test_scan_is_the_first_of_the_largest(values):
    row = np.asarray(values, np.float32)
    assert sampler.scan(row) == (row.max(), int(np.argmax(row)), True)


@pytest.mark.parametrize("bad", [np.nan, INF])
@pytest.mark.parametrize("at", [0, 5, 1023, 1024, 1999])
def test_scan_finds_any_non_finite_logit(bad, at):
    row = np.zeros(2000, np.float32)
    row[at] = bad
    assert not sampler.scan(row)[2]
    assert sample(row)[0] == "non_finite"
    assert sample(row, temperature=0)[0] == "non_finite"


def test_minus_infinity_is_allowed_unless_it_is_all():
    row = np.full(70, -INF, np.float32)
    assert not sampler.scan(row)[2]
    row[69] = -3
    assert sampler.scan(row) == (-3, 69, True)
    assert sample(row)[:2] == ("ok", 69)


def test_exp():
    x = np.concatenate([np.linspace(-87, 0, 100001), [-1e-9, -87.5, -1000, -INF]]).astype(np.float32)
    expected = np.where(x < -87, 0, np.exp(x.astype(np.float64)))
    np.testing.assert_allclose(sampler.exp(x), expected, rtol=2e-7)


# --- stages that change the row ---


def test_repetition_penalty():
    row = np.array([2, -2, 0, 3, -1], np.float32)
    got = sampler.repetition_penalty(row, prompt=[0, 1, 1], output=[2, 3, 3], penalty=1.5)
    np.testing.assert_allclose(got, [2 / 1.5, -3, 0, 2, -1], rtol=1e-6)


def test_presence_and_frequency_penalty_look_at_the_output_only():
    row = np.zeros(4, np.float32)
    np.testing.assert_allclose(sampler.presence_penalty(row, [0], [1, 1, 2], 0.5), [0, -0.5, -0.5, 0])
    np.testing.assert_allclose(sampler.frequency_penalty(row, [0], [1, 1, 2], 0.5), [0, -1, -0.5, 0])


def test_logit_bias_adds():
    np.testing.assert_allclose(sampler.logit_bias(np.ones(3, np.float32), [(1, 2.5), (2, -1)]), [1, 3.5, 0])


@pytest.mark.parametrize(
    ("words", "tokens", "banned"),
    [
        ([[3]], [], {3}),
        ([[1, 2, 3]], [0, 1, 2], {3}),
        ([[1, 2, 3]], [1, 2, 0], set()),
        ([[1, 2, 3]], [2], set()),
        ([[0, 4], [1, 2]], [0, 1], {2}),
    ],
)
def test_bad_words_ban_the_token_that_would_complete_them(words, tokens, banned):
    got = sampler.ban_bad_words(np.zeros(5, np.float32), words, tokens)
    assert {i for i in range(5) if got[i] == -INF} == banned


def test_ban_tokens():
    assert sampler.ban_tokens(np.zeros(3, np.float32), [0, 2]).tolist() == [-INF, 0, -INF]


@pytest.mark.parametrize("value", [1e-3, 0.7, 1.0, 25.0, 1e30])
def test_temperature(value):
    for row in rows():
        scaled = sampler.temperature(row, value)
        np.testing.assert_allclose(scaled, (row.astype(np.float64) - row.max()) / value, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-38])
def test_tiny_temperature_is_greedy(value):
    for row in rows():
        assert sample(row, temperature=value, seed=1)[1] == np.argmax(row)


# --- stages that choose candidates ---


@pytest.mark.parametrize("k", [1, 2, 50, 999, 1000, 5000])
def test_top_k(k):
    for row in rows():
        assert sampler.top_k(row, k) == best_first(row)[:k].tolist()


def test_top_k_resolves_ties_to_the_lowest_ids():
    row = np.zeros(500, np.float32)
    row[300] = 1
    assert sampler.top_k(row, 4) == [300, 0, 1, 2]


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("among_candidates", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1, 8])
def test_top_p_is_the_smallest_set_that_reaches_p(p, among_candidates, spread):
    for row in rows(spread=spread):
        kept = sampler.top_p(row, p, among_candidates)
        order = best_first(row)
        assert kept == order[: len(kept)].tolist()
        mass = np.cumsum(softmax(row)[order])
        assert mass[len(kept) - 1] >= p - 1e-5
        assert len(kept) == 1 or mass[len(kept) - 2] <= p + 1e-5


@pytest.mark.parametrize("p", [1e-4, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("among_candidates", [False, True])
def test_min_p(p, among_candidates):
    for row in rows():
        probability = softmax(row)
        expected = {i for i in range(len(row)) if probability[i] >= p * probability.max() * (1 + 1e-5)}
        at_most = {i for i in range(len(row)) if probability[i] >= p * probability.max() * (1 - 1e-5)}
        kept = set(sampler.min_p(row, p, among_candidates))
        assert expected | {int(np.argmax(row))} <= kept <= at_most | {int(np.argmax(row))}


@pytest.mark.parametrize("among_candidates", [False, True])
def test_draw_inverts_the_cumulative_distribution(among_candidates):
    for row in rows():
        order = best_first(row) if among_candidates else np.arange(len(row))
        cumulative = np.cumsum(softmax(row)[order])
        for u in np.linspace(0, 1 - 1e-9, 97):
            token = sampler.draw(row, u, among_candidates)
            at = int(np.flatnonzero(order == token)[0])
            assert cumulative[at] >= u - 1e-5
            assert at == 0 or cumulative[at - 1] <= u + 1e-5


def test_draw_never_takes_a_banned_token():
    row = np.full(1000, -INF, np.float32)
    row[[3, 700]] = 0
    assert {sampler.draw(row, u, False) for u in np.linspace(0, np.nextafter(1, 0), 50)} == {3, 700}


# --- the chain ---


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"top_p": 0}])
def test_greedy(greedy):
    row = np.zeros(300, np.float32)
    row[[17, 200]] = 5
    for seed in range(5):
        assert sample(row, seed=seed, **greedy)[1] == 17


def test_the_draw_depends_on_seed_stream_and_index_only():
    row = next(rows())
    first = [sample(row, seed=7, stream=s, output=[0] * n)[1] for s in range(3) for n in range(20)]
    again = [sample(row, seed=7, stream=s, output=[0] * n)[1] for s in range(3) for n in range(20)]
    assert first == again
    assert len(set(first)) > 10
    assert sampler.uniform(seed=7, stream=1, index=3) != sampler.uniform(seed=7, stream=3, index=1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
        {"top_p": 0.9, "min_p": 0.05},
    ],
)
def test_frequencies_follow_the_filtered_distribution(fields):
    row = np.random.default_rng(3).normal(0, 2, 200).astype(np.float32)
    probability = softmax(row / fields.get("temperature", 1))
    order = best_first(row)
    keep = np.zeros(200, bool)
    keep[order[: fields.get("top_k", 200)]] = True
    kept = np.where(keep, probability, 0)
    kept /= kept.sum()
    if "top_p" in fields:
        keep[order[int(np.searchsorted(np.cumsum(kept[order]), fields["top_p"])) + 1 :]] = False
    keep &= probability >= fields.get("min_p", 0) * probability.max()
    expected = np.where(keep, probability, 0) / probability[keep].sum()
    draws = 4000
    counts = np.bincount([sample(row, seed=11, stream=i, **fields)[1] for i in range(draws)], minlength=200)
    assert not counts[~keep].any()
    # Total variation of 4000 draws from their own distribution stays well below this; seeds are fixed.
    assert np.abs(counts / draws - expected).sum() / 2 < 0.05 + 0.5 * np.sqrt(keep.sum() / draws)


def test_stages_run_in_order():
    row = np.array([1.0, 0.9, 0.0, -1.0], np.float32)
    # Without edits token 0 wins; the repetition penalty hands over to 1, the bias to 3, the ban of bad words to 2.
    assert sample(row, temperature=0)[1] == 0
    assert sample(row, temperature=0, prompt=[0], repetition_penalty=2)[1] == 1
    assert sample(row, temperature=0, prompt=[0], repetition_penalty=2, logit_bias=[(3, 5)])[1] == 3
    assert sample(row, temperature=0, prompt=[0], logit_bias=[(3, 5)], bad_words=[[0, 3]])[1] == 0
    assert sample(row, temperature=0, bad_words=[[0], [1]], logit_bias=[(0, 100)])[1] == 2, "a bias cannot lift a ban"


def test_min_new_tokens_bans_stop_tokens_until_reached():
    row = np.array([5, 1, 0], np.float32)
    fields = {"temperature": 0, "stop_token_ids": [0], "min_new_tokens": 2}
    assert [sample(row, output=[1] * n, **fields)[1] for n in range(4)] == [1, 1, 0, 0]


def test_nothing_left_to_choose():
    assert sample(np.zeros(2), bad_words=[[0], [1]])[0] == "no_token"
    assert sample(np.zeros(2), bad_words=[[0], [1]], temperature=0)[0] == "no_token"


@pytest.mark.parametrize("vocab", [1, 7, 256, 49152])
def test_logprobs_are_of_the_unmodified_logits(vocab):
    for row in rows(vocab, 2):
        status, token, logprob, top = sample(
            row,
            temperature=0.3,
            top_k=1000,
            seed=5,
            logprobs=min(4, vocab),
            logit_bias=[(0, 3.0)],
            repetition_penalty=1.7,
            prompt=[0],
        )
        reference = np.log(softmax(row))
        assert status == "ok"
        assert logprob == pytest.approx(reference[token], abs=1e-5)
        assert [t for t, _ in top] == best_first(row)[: min(4, vocab)].tolist()
        np.testing.assert_allclose([v for _, v in top], [reference[t] for t, _ in top], atol=1e-5)
    assert sample(row, logprobs=0)[3] == []


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_valid_params_on_any_row_choose_a_token(data):
    vocab = data.draw(st.integers(1, 40))
    row = data.draw(any_logits(vocab))
    ids = st.integers(0, vocab - 1)
    params = _core.SamplingParams(
        temperature=data.draw(st.floats(0, 3.0e38)),
        top_k=data.draw(st.integers(0, 60)),
        top_p=data.draw(st.floats(0, 1)),
        min_p=data.draw(st.floats(0, 1)),
        repetition_penalty=data.draw(st.floats(0.01, 100)),
        presence_penalty=data.draw(st.floats(-2, 2)),
        frequency_penalty=data.draw(st.floats(-2, 2)),
        logit_bias=data.draw(st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3)),
        bad_words=data.draw(st.lists(st.lists(ids, min_size=1, max_size=2), max_size=2)),
        seed=data.draw(st.integers(0, 2**64 - 1)),
        logprobs=data.draw(st.integers(-1, vocab)),
    )
    params.validate(vocab)
    prompt, output = data.draw(st.lists(ids, max_size=5)), data.draw(st.lists(ids, max_size=5))
    status, token, logprob, top = sampler.sample(row, params, prompt, output)
    if not np.isfinite(row.max()):  # nor is that of a row with NaN
        assert status == "non_finite"
    elif status == "ok":
        assert 0 <= token < vocab
        assert row[token] > -INF
        assert len(top) == min(max(params.logprobs, 0), int(np.isfinite(row).sum()))
        assert logprob <= 1e-5
    else:
        assert status == "no_token"
        assert params.bad_words
