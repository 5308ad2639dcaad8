"""Sampling fields and what a request can ask about its tokens, through the library and the routes."""

import collections
import json
import math

import numpy as np
import pytest
from maga_transformer import LLM
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.request import Fault, RequestError
from maga_transformer.server.schemas import ChatRequest, CompletionRequest, parse

from .chain_model import WIDTH, write_odds
from .conftest import demo_model

ODDS = {"a": 0.4, "b": 0.25, "c": 0.15, "d": 0.1, "e": 0.06, "f": 0.04}
ASK = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def odds(tmp_path_factory):
    folder = write_odds(tmp_path_factory.mktemp("odds") / "model", "Q", ODDS)
    with LLM(folder, max_seq_len=64, kv_cache_mem_mb=64, max_num_seqs=400) as model:
        yield model


@pytest.fixture(scope="module")
def demo():
    with LLM(demo_model(), max_seq_len=256, kv_cache_mem_mb=128, act_type="fp32") as model:
        yield model


# --- samplers, on a model of known odds ---


@pytest.mark.parametrize(
    "fields, kept",
    [
        ({"top_a": 0.5}, "abcd"),
        ({"epsilon_cutoff": 500}, "abcde"),
        ({"typical_p": 0.2}, "b"),
        ({"nsigma": 0.1}, "a"),
        ({"tfs": 0.0}, "a"),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, "bcdef"),
        ({"custom_token_bans": [3 + ord("a")]}, "bcdef"),
        ({"token_ban_ranges": [[[3 + ord("a")], 0, 1]]}, "bcdef"),
        ({"allowed_token_ids": [3 + ord("c"), 3 + ord("f")]}, "cf"),
        ({"mirostat_mode": 2, "mirostat_tau": 1.05, "mirostat_eta": 0.1}, "ab"),
        ({"temperature": 3.0, "temperature_last": True, "top_a": 0.5}, "abcd"),
        ({"temperature": 3.0, "epsilon_cutoff": 1000, "sampler_priority": ["epsilon_cutoff", "temperature"]}, "abcd"),
    ],
)
def test_stages(odds, fields, kept):
    result = odds.generate("Q", max_new_tokens=1, top_p=1.0, random_seed=1, num_return_sequences=400, **fields)
    counts = collections.Counter(each.text for each in [result, *result.others])
    assert set(counts) == set(kept)
    if "temperature" not in fields:
        total = sum(ODDS[text] for text in kept)
        assert all(abs(counts[text] / 400 - ODDS[text] / total) < 0.09 for text in kept)


def test_dry_reads_the_prompt_and_its_breakers(odds):
    assert odds.generate("QaxyQ", max_new_tokens=1, temperature=0).text == "a"
    dry = {"max_new_tokens": 1, "temperature": 0, "dry_multiplier": 5.0, "dry_allowed_length": 1}
    assert odds.generate("QaxyQ", **dry).text == "b"
    assert odds.generate("QaxyQ", **dry, dry_sequence_breakers=["a"]).text == "a"
    assert odds.generate("QaxyQ", **dry, dry_sequence_breakers='["a"]').text == "a", "a list as JSON text"
    assert odds.generate("QaxyQ", **dry, dry_range=3).text == "a"
    assert odds.generate("QaQ", max_new_tokens=1, temperature=0, no_repeat_ngram_size=2).text == "b"


def test_top_p_decay(odds):
    fields = {"max_new_tokens": 1, "top_p": 0.9, "num_return_sequences": 100, "random_seed": 3}
    full = odds.generate("Q", **fields)
    same = odds.generate("Q", **fields, top_p_decay=0.5, top_p_min=0.1, top_p_reset_ids=3)
    assert [full.text, *(each.text for each in full.others)] == [same.text, *(each.text for each in same.others)]


def test_eos_ids_of_the_request(odds):
    assert odds.generate("Q", max_new_tokens=3, temperature=0, eos_token_id=3 + ord("a")).text == ""


def test_a_seed_gives_the_same_through_any_batch(odds):
    fields = {"max_new_tokens": 1, "random_seed": 7, "xtc_probability": 0.5, "skew": 0.3, "dynatemp_max": 2.0}
    alone = odds.generate("Q", **fields).text
    assert {each.text for each in odds.generate(["Q"] * 40, **fields)} == {alone}


def test_a_wrong_stage_or_range_is_told_what_is_valid(odds):
    for fields, words in (
        ({"sampler_priority": ["temperature", "top_k"]}, "sampler_priority[1]='top_k': no stage; valid: 0 to 13, or top_p_top_k, "),
        ({"sampler_priority": [14]}, "sampler_priority[0]=14: no stage"),
        ({"token_ban_ranges": [[0, 100]]}, "token_ban_ranges[0]=[0, 100]: must be [[token ids], start, length]"),
    ):
        with pytest.raises(RequestError) as caught:
            odds.generate("Q", **fields)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"top_a": 2.0}, "top_a"),
        ({"mirostat_mode": 1}, "mirostat_mode"),
        ({"dynatemp_min": 1.0}, "dynatemp_min"),
        ({"sampler_priority": ["top"]}, "sampler_priority[0]"),
        ({"sampler_priority": [1, 1]}, "sampler_priority"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"token_ban_ranges": [[[1], 0]]}, "token_ban_ranges[0]"),
        ({"custom_token_bans": [10**6]}, "custom_token_bans"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature"),
        ({"num_beams": 2, "xtc_probability": 0.5}, "xtc_probability"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_return_sequences"),
        ({"num_beams": 2, "return_logits": True}, "return_logits"),
        ({"num_beams": 1000}, "num_beams"),
        ({"calculate_loss": 3}, "calculate_loss"),
        ({"select_tokens_id": [-1]}, "select_tokens_id"),
    ],
)
def test_mistakes_name_their_field(odds, fields, name):
    with pytest.raises(RequestError) as caught:
        odds.generate("Q", **fields)
    assert caught.value.field == name
    assert name in str(caught.value)


# --- what is told of tokens ---


def test_hidden_states_and_logits_of_a_known_model(odds):
    result = odds.generate("Q", max_new_tokens=2, temperature=0, return_hidden_states=True, return_logits=True)
    assert result.hidden_states.shape == (2, WIDTH)
    expected = np.zeros(WIDTH)
    expected[3 + ord("Q")] = math.sqrt(WIDTH)  # the norm of a one-hot row
    np.testing.assert_allclose(result.hidden_states[0], expected, rtol=1e-3, atol=1e-3)
    first = result.logits[0].astype(np.float64)
    probability = np.exp(first) / np.exp(first).sum()
    for text, value in ODDS.items():
        assert probability[3 + ord(text)] == pytest.approx(value, abs=1e-4)
    few = odds.generate("Q", max_new_tokens=1, return_logits=True, select_tokens_id=[3 + ord("b")], select_tokens_str=["a"])
    np.testing.assert_allclose(few.logits[0], first[[3 + ord("b"), 3 + ord("a")]], rtol=1e-6)


def test_log_probabilities_of_a_prompt_are_those_of_the_same_tokens_as_output(demo):
    ids = demo.tokenizer.encode("The lighthouse keeper")
    written = demo.generate(ids, max_new_tokens=20, temperature=0, logprobs=3)
    read = demo.generate([*ids, *written.token_ids], max_new_tokens=1, prompt_logprobs=3)
    assert len(read.prompt_logprobs) == len(ids) + 20 - 1
    for out, back in zip(written.logprobs, read.prompt_logprobs[-20:], strict=True):
        assert out.token_id == back.token_id
        assert out.logprob == pytest.approx(back.logprob, abs=1e-3)
        assert [token for token, _ in out.top] == [token for token, _ in back.top]
    assert read.loss is None


def test_loss(demo):
    ids = demo.tokenizer.encode("One two three four five six seven")
    each = demo.generate(ids, max_new_tokens=1, calculate_loss=2).loss
    np.testing.assert_allclose(each, -demo.prompt_logprobs([ids])[0], rtol=1e-6)
    assert demo.generate(ids, max_new_tokens=1, calculate_loss=1).loss == pytest.approx(math.exp(np.mean(each)), rel=1e-6)


def test_beams_of_the_library(demo):
    result = demo.generate("1 2 3 4", max_new_tokens=6, num_beams=3)
    assert len(result.others) == 2
    assert len({result.text, *(each.text for each in result.others)}) == 3
    assert result.text.startswith(" 5 6")
    with pytest.raises(RequestError, match="a stream is of one output"):
        demo.stream("a", num_beams=2)


# --- the raw route ---


def test_raw_outputs(server):
    body = {"max_new_tokens": 3, "top_k": 1, "return_logits": True, "return_hidden_states": True, "calculate_loss": 2}
    answer = server.raw("1 2 3 4 5", **body, select_tokens_id=[5, 6, 7], return_softmax_probs=True, logprobs=1, prompt_logprobs=0)
    assert [len(row) for row in answer["logits"]] == [3]
    assert len(answer["hidden_states"]) == 1 and len(answer["hidden_states"][0]) > 100
    length = answer["aux_info"]["input_len"]
    assert len(answer["loss"]) == length - 1 and min(answer["loss"]) >= 0
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == length
    assert [each["logprob"] for each in answer["logprobs"][0]] == pytest.approx(
        [math.log(p) for p in answer["aux_info"]["softmax_probs"]], abs=1e-5
    )
    mean = server.raw("1 2 3 4 5", max_new_tokens=1, calculate_loss=1)["loss"]
    assert mean == pytest.approx(math.exp(sum(answer["loss"]) / len(answer["loss"])), rel=1e-4)
    assert "loss" not in server.raw("1 2 3 4 5", max_new_tokens=1, calculate_loss=0)


def test_raw_beams(server):
    answer = server.raw("1 2 3 4", max_new_tokens=5, num_beams=3, return_output_ids=True)
    beams, scores = answer["aux_info"]["beam_responses"], answer["aux_info"]["cum_log_probs"]
    assert answer["response"] == beams[0] and len(set(beams)) == 3 and answer["finished"]
    assert len(scores) == 3 and max(scores) < 0
    assert len(answer["output_ids"]) == 3
    batch = server.post("/", {"prompt_batch": ["1 2 3 4", "a"], "max_new_tokens": 5, "num_beams": 3}).json()["response_batch"]
    assert batch[0]["aux_info"]["beam_responses"] == beams
    with server.stream("/", {"prompt": "1 2 3 4", "max_new_tokens": 5, "num_beams": 3, "yield_generator": True}) as stream:
        events = [line[5:] for line in stream.iter_lines() if line.startswith("data:")]
    assert json.loads(events[-2])["aux_info"]["beam_responses"] == beams and events[-1] == "[done]"


# --- OpenAI's routes ---


def test_echo_with_logprobs_as_lm_eval_reads_it(server, demo):
    """Its local-completions sends ids, and adds up what stands behind the context and before the one new token."""
    ids = demo.tokenizer.encode("The quick brown fox jumps over the lazy dog")
    expected = demo.prompt_logprobs([ids])[0]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    scores = choice["logprobs"]
    assert {len(scores[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {len(ids) + 1}
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    np.testing.assert_allclose(scores["token_logprobs"][1:-1], expected, atol=1e-3)
    for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
        assert token in top
    assert "".join(scores["tokens"]) == choice["text"]
    assert [choice["text"][at:].startswith(token) for at, token in zip(scores["text_offset"], scores["tokens"], strict=True)]
    only = server.post("/v1/completions", {**body, "max_tokens": 0}).json()["choices"][0]
    assert only["logprobs"]["token_logprobs"] == scores["token_logprobs"][:-1] and only["finish_reason"] == "length"
    with server.stream("/v1/completions", {**body, "stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [value for each in streamed for value in each["token_logprobs"]] == scores["token_logprobs"]
    assert [value for each in streamed for value in each["text_offset"]] == scores["text_offset"]


def test_prompt_logprobs(server):
    body = {"prompt": "1 2 3 4", "prompt_logprobs": 2, "return_token_ids": True, **ASK}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    told, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert told[0] is None and len(told) == len(ids)
    for token, entries in zip(ids[1:], told[1:], strict=True):
        assert 2 <= len(entries) <= 3 and str(token) in entries
        assert entries[str(token)]["rank"] >= 1 and entries[str(token)]["decoded_token"] is not None
        assert all(entry["rank"] in (1, 2) for other, entry in entries.items() if other != str(token))
    chat = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, **ASK}
    answer = server.post("/v1/chat/completions", chat).json()
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_best_of(server):
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 1.5, "seed": 3, "logprobs": 0}
    several = server.post("/v1/completions", {**body, "n": 6}).json()["choices"]
    averages = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in several]
    order = sorted(range(6), key=lambda at: -averages[at])
    best = server.post("/v1/completions", {**body, "n": 2, "best_of": 6}).json()
    assert [choice["text"] for choice in best["choices"]] == [several[at]["text"] for at in order[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    silent = server.post("/v1/completions", {**body, "logprobs": None, "best_of": 6}).json()["choices"]
    assert silent[0]["text"] == several[order[0]]["text"] and silent[0]["logprobs"] is None


def test_beam_search(server):
    raw = server.raw("1 2 3 4", max_new_tokens=5, num_beams=4)["aux_info"]["beam_responses"]
    body = {"prompt": "1 2 3 4", "max_tokens": 5, "use_beam_search": True}
    four = server.post("/v1/completions", {**body, "n": 4}).json()["choices"]
    assert [choice["text"] for choice in four] == raw
    two = server.post("/v1/completions", {**body, "n": 2, "best_of": 4, "temperature": 0}).json()["choices"]
    assert [choice["text"] for choice in two] == raw[:2]
    with server.stream("/v1/completions", {**body, "n": 4, "stream": True}) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == raw


def test_extra_fields_reach_the_engine(server):
    plain = server.post("/v1/completions", {"prompt": "1 2 3 4", **ASK, "return_token_ids": True}).json()["choices"][0]
    body = {"prompt": "1 2 3 4", **ASK, "custom_token_bans": [plain["token_ids"][0]], "return_token_ids": True}
    assert plain["token_ids"][0] not in server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    sent = {"tfs": 0.9, "top_a": 0.1, "typical_p": 0.9, "dry_multiplier": 0.8, "dry_sequence_breakers": '["\\n"]', "skew": 0.1}
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, **sent, "sampler_order": [6, 7, 0]})
    assert answer.status_code == 200 and "X-Maga-Ignored" not in answer.headers


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"top_a": 3}, "top_a"),
        ({"use_beam_search": True}, "best_of"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_openai_mistakes_name_their_field(fields, name):
    with pytest.raises(RequestError) as caught:
        request, _ = parse(CompletionRequest, {"prompt": "a", **fields})
        request.sampling({}, [])
    assert caught.value.field == name


def test_neutral_values_ask_for_nothing():
    """What SillyTavern and others send with everything switched off."""
    off = {
        "top_a": 0,
        "tfs": 1,
        "typical_p": 1,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "nsigma": 0,
        "dynatemp_min": 0,
        "dynatemp_max": 0,
        "dynatemp_exponent": 1,
        "smoothing_factor": 0,
        "smoothing_curve": 1,
        "skew": 0,
        "xtc_threshold": 0.1,
        "xtc_probability": 0,
        "mirostat_mode": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "no_repeat_ngram_size": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_sequence_breakers": '["\\n", ":"]',
        "dry_penalty_last_n": 0,
        "custom_token_bans": [],
        "temperature_last": False,
        "allowed_token_ids": None,
        "use_beam_search": False,
        "early_stopping": False,
        "length_penalty": 1,
        "best_of": 1,
    }
    for kind in (ChatRequest, CompletionRequest):
        request, ignored = parse(kind, {"prompt": "a", **off})
        sampling = request.sampling({}, [])
        assert (ignored, sampling.rare, sampling.beams) == (["prompt"] if kind is ChatRequest else [], {}, None)
    own = {name: value for name, value in off.items() if name not in ("use_beam_search", "best_of")}
    assert GenerateConfig.parse(own).sampling().rare == {}


def test_defaults_of_the_operator_do_not_stand_against_beams():
    defaults = {"temperature": 0.7, "top_p": 0.8}
    assert GenerateConfig.parse({"num_beams": 3}, defaults).sampling().beams.width == 3
    with pytest.raises(RequestError) as caught:
        GenerateConfig.parse({"num_beams": 3, "temperature": 0.7}, defaults).sampling()
    assert (caught.value.fault, caught.value.field) == (Fault.parameter, "temperature")
