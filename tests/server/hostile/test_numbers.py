"""Numbers and fields: H18 to H33. Cases are (route, fields, a word of the message); the raw route's also have a code."""

import concurrent.futures
import json

import pytest

from ..conftest import running_server
from .conftest import SETTINGS
from .live import Target, wait_for

BIG = 2**63
RAW, COMPLETIONS, CHAT = "/", "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES, KOBOLD = "/v1/messages", "/v1/responses", "/api/v1/generate"
VOCABULARY = 320
USER = {"messages": [{"role": "user", "content": "a"}]}
OWN = {CHAT: USER, MESSAGES: {**USER, "max_tokens": 1}, RESPONSES: {"input": "a"}}  # else a prompt
# The other routes' names of a field, and their code of a wrong value.
OTHERS = {CHAT: "invalid_value", MESSAGES: "invalid_request_error", RESPONSES: "invalid_value", KOBOLD: "invalid_value"}
LENGTHS = {CHAT: "max_completion_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens", KOBOLD: "max_length"}
STOPS = {CHAT: "stop", MESSAGES: "stop_sequences", RESPONSES: "stop", KOBOLD: "stop_sequence"}


def raw(word, code=516, **fields):
    return RAW, fields, word, code


def openai(word, **fields):
    return COMPLETIONS, fields, word, "invalid_value"


def each(make, word, field, *values, **more):
    return [make(word, **{field: value}, **more) for value in values]


def others(names, *values):
    """`names`: of the field on each route, or one for all."""
    spelt = names if isinstance(names, dict) else dict.fromkeys(OTHERS, names)
    return [(path, {name: value}, f"{name}=", OTHERS[path]) for path, name in spelt.items() for value in values]


REFUSED = {
    18: [
        *each(raw, "temperature", "temperature", -0.1, 1e308, "0.7", True, []),
        *each(openai, "temperature", "temperature", -0.1, 1e308, "0.7", True, []),
        *others("temperature", -0.1, 1e308, "0.7", True, []),
    ],
    19: [
        *each(raw, "top_p", "top_p", -0.1, 1.0001, "1"),
        *each(openai, "top_p", "top_p", -0.1, 1.0001, 2),
        *others("top_p", -0.1, 1.0001),
        *each(raw, "min_p", "min_p", 2, -1),
        openai("min_p", min_p=2),
        *each(raw, "top_k", "top_k", -5, 3.5, True),
        *each(openai, "top_k", "top_k", -5, 3.5, True),
        *others("top_k", -5, 3.5),
        raw("repetition_penalty", repetition_penalty=0),
        raw("presence_penalty", presence_penalty=3),
        openai("dry_multiplier", dry_multiplier=-1),
        *each(openai, "mirostat_mode", "mirostat_mode", 1, False, True, 2.5),
        openai("token_ban_ranges", token_ban_ranges=[[[1], 2**70, 1]]),
        openai("custom_token_bans", custom_token_bans=[2**40]),
    ],
    20: [
        *each(raw, "max_new_tokens", "max_new_tokens", 0, -1, "5", 1.5, True),
        *each(openai, "max_tokens", "max_tokens", 0, -2, "5", 1.5, True),
        *others(LENGTHS, 0, -2, "5", 1.5, 10**30),
        raw("gen_length", gen_length=0),
        raw("min_new_tokens", min_new_tokens=-1),
        raw("min_new_tokens", min_new_tokens=5, max_new_tokens=4),
    ],
    21: [
        *each(openai, "n=", "n", 0, -1, 10**6, 10**9),
        openai("33", n=33),
        *[(CHAT, {"n": value}, "n=", "invalid_value") for value in (0, 10**6)],
        *each(openai, "best_of", "best_of", 10**9, 0),
        *each(raw, "num_return_sequences", "num_return_sequences", -1, 2**31, 1.0),
        raw("1000", num_return_sequences=1000),
        *each(raw, "num_beams", "num_beams", 100_000, -1),
        raw("1000 beams", num_beams=1000),
        raw("100000 prompts", 507, prompt=None, prompt_batch=["a"] * 100_000),
        (COMPLETIONS, {"prompt": ["a"] * 100_000}, "100000 entries", "invalid_value"),
    ],
    23: [
        *each(openai, "logprobs", "logprobs", 10**6, 21, -1, True),
        *each(raw, "logprobs", "logprobs", 10**6, 21, -2),
        *each(openai, "prompt_logprobs", "prompt_logprobs", 21, -1),
        openai("logprobs", echo=True, logprobs=21),
        *[(CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs", "invalid_value") for value in (21, -1, 10**6)],
        *each(raw, "calculate_loss", "calculate_loss", 3, -1, True, "1"),
    ],
    24: [
        openai("logit_bias", logit_bias={str(token): 1 for token in range(49_153)}),
        openai(f"token id {VOCABULARY} ", logit_bias={"1": 1, str(VOCABULARY): 1}),
        *[
            make(f"key {key!r}", logit_bias={"1": 1, key: 1.0})
            for key in ("-1", "1e3", "abc", str(BIG), "")
            for make in (raw, openai)
        ],
        *[openai("logit_bias[5]", logit_bias={"5": value}) for value in (1e39, None, "1", True)],
        *[raw("logit_bias[5]", logit_bias={"5": value}) for value in (1e39, None, "1")],
        raw("logit_bias", logit_bias=[1]),
    ],
    25: [
        *each(openai, "stop", "stop", ["a"] * 10_000, ["x" * 1_000_000], [None], 5, {"a": 1}),
        *each(raw, "stop_words_str", "stop_words_str", "x", [None], ["x"] * 10_000, ["x" * 1_000_000], code=512),
        *others(STOPS, ["a"] * 10_000, ["x" * 1_000_000]),
        *[(path, {name: [None]}, f"{name}[0]", OTHERS[path]) for path, name in STOPS.items()],
        *each(raw, "stop_words_list", "stop_words_list", [[]], [["x"]], [[], [5]], code=512),
        *each(raw, "bad_words_list", "bad_words_list", [[]], [[-1]], [["x"]], 5),
        raw("stop_words_list", stop_words_list=[[-1]]),
        *each(openai, "stop_token_ids", "stop_token_ids", [-1], [VOCABULARY], [1.5], 5),
    ],
    28: [
        *[openai("prompt[0]", prompt=[value]) for value in (-1, VOCABULARY, 2**40, 1.5, True, None)],
        openai("prompt[1]", prompt=[1, BIG]),
        openai("prompt[1][0]", prompt=[[1], [VOCABULARY]]),
        openai("prompt[0][1]", prompt=[[1, -1]]),
        *[("/detokenize", {"tokens": [1, value]}, "tokens[1]", "invalid_value") for value in (-1, VOCABULARY, 2**40, 1.5, True)],
        *[(COMPLETIONS, {"prompt": empty}, "empty", "empty_prompt") for empty in ([], [[]], "")],
        openai("prompt[0]=1", prompt=[1, "a"]),
        openai("prompt", prompt={"a": 1}),
        (COMPLETIONS, {"prompt": [1] * 10**6}, "1000000 tokens", "context_length_exceeded"),
        *[raw("prompt[0]", 507, prompt=[value]) for value in (1, 7.5, [1])],
        raw("prompt=7", 507, prompt=7),
    ],
    30: [
        *each(raw, "random_seed", "random_seed", -2, 2**64, 1e300, "a", True),
        *each(openai, "seed", "seed", -2, 2**64, 1e300, "a", True),
        *each(raw, "seed=", "seed", -2, "a"),
        *others({CHAT: "seed", RESPONSES: "seed", KOBOLD: "sampler_seed"}, -2, 2**64, 1e300, "a", True),
    ],
    31: [*each(raw, "timeout_ms", "timeout_ms", 0, -5, BIG, "1", 1.5)],
    33: [
        raw("temprature", temprature=0),
        raw("did you mean temperature", generate_config={"temprature": 0}),
        *each(raw, "generate_config", "generate_config", "x", [1], 5),
        raw("seed and random_seed", seed=1, random_seed=2),
        raw("max_new_tokens and gen_length", generate_config={"max_new_tokens": 1, "gen_length": 2}),
        raw("yield_generator", yield_generator="yes"),
        raw("private_request", 507, private_request=3),
        raw("prompt and text", 507, text="b"),
        raw("exclude", 507, prompt_batch=["b"]),
        openai("stream_options", stream_options={"include_usage": True}),
        openai("stream_options", stream=True, stream_options=5),
        *each(openai, "cache_salt", "cache_salt", "", "x" * 1000, "\n/", 5),
        openai("priority", priority=2**40),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        *[(CHAT, {"tools": value}, "tools", "invalid_value") for value in (0, "", False, {}, [0], [{"type": "function"}])],
        *[(CHAT, {"tool_choice": value}, "tool_choice", "invalid_value") for value in ("required", {}, [], {"type": []})],
    ],
}


def refuse(target, cases):
    for path, fields, word, code in cases:
        content = json.dumps({**OWN.get(path, {"prompt": "a"}), **fields}).encode()
        answer = target.ask(path, content)
        assert answer.status == 400, (content[:200], answer.content[:300])
        assert answer.error[0] == code and word in answer.error[1], (content[:200], answer.content[:300])
        assert len(answer.content) < 700, answer.content


# Each line once more by itself below, where it is more than refusals.
@pytest.mark.parametrize("line", [line for line in REFUSED if line not in (18, 19, 20, 23, 25, 30, 31, 33)], ids="h{}".format)
def test_refused(target, line):
    refuse(target, REFUSED[line])


def said(target, **fields):
    answer = target.ask(RAW, {"prompt": "Once upon", "max_new_tokens": 8, "ignore_eos": True, **fields})
    assert answer.status == 200, answer.content
    return answer.json()["response"]


def test_h18_temperatures(target):
    refuse(target, REFUSED[18])
    greedy = [target.ask(CHAT, {**USER, "max_tokens": 8, "temperature": value}).json() for value in (0, 1e-9)]
    assert greedy[0]["choices"] == greedy[1]["choices"]
    assert said(target, temperature=1e-9) == said(target, temperature=0) == said(target, top_k=1)


def test_h19_shares_and_counts(target):
    refuse(target, REFUSED[19])
    drawn = said(target, random_seed=5)
    assert drawn == said(target, random_seed=5, top_k=BIG) == said(target, random_seed=5, top_k=VOCABULARY + 1)


def test_h20_lengths(target):
    refuse(target, REFUSED[20])
    for most in (2**31, BIG):
        answer = target.ask(COMPLETIONS, {"prompt": "a", "max_tokens": most, "ignore_eos": True}).json()
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 256
        assert target.ask(RAW, {"prompt": "a", "max_new_tokens": most, "ignore_eos": True}).json()["aux_info"]["output_len"] == 255
    refuse(target, [raw("max_new_tokens", max_new_tokens=10**30), openai("max_tokens", max_tokens=10**30)])


def test_h23_what_is_told_of_tokens(target):
    """Of the longest prompt there is, all that may be asked for at once."""
    refuse(target, REFUSED[23])
    more = {"return_logits": True, "return_hidden_states": True, "calculate_loss": 2, "logprobs": 20, "prompt_logprobs": 20}
    answer = target.ask(RAW, {"prompt": "a" * 200, "max_new_tokens": 50, "ignore_eos": True, **more}).json()
    assert len(answer["loss"]) == 199 and len(answer["logits"][0]) == VOCABULARY and len(answer["logprobs"][0]) == 50


def test_h25_stops(target):
    refuse(target, REFUSED[25])
    free = said(target, top_k=1)
    assert free and said(target, top_k=1, stop_words_str=[""]) == said(target, top_k=1, stop_words_str=["", "zz"]) == free
    answer = target.ask(COMPLETIONS, {"prompt": "Once upon", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "stop": ""})
    assert answer.json()["choices"][0]["text"] == free


@pytest.mark.parametrize("token", [259, VOCABULARY - 1, VOCABULARY, VOCABULARY + 5, BIG - 1])
def test_h26_ids_beyond_the_tokenizer(target, token):
    """259 to 319 have a logit and no text; behind them there is nothing."""
    for field, value in (("bad_words_list", [[token]]), ("stop_words_list", [[token]]), ("logit_bias", {str(token): 1})):
        answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 3, field: value})
        assert answer.status == (200 if token < VOCABULARY else 400), answer.content
        assert token < VOCABULARY or (field in answer.error[1] and str(token)[:9] in answer.error[1])


def test_bans_that_leave_nothing(target):
    """Every token is banned, one way or another: the request's mistake, not the server's."""
    everything = list(range(VOCABULARY))
    for fields in ({"custom_token_bans": everything}, {"allowed_token_ids": [5], "custom_token_bans": [5]}):
        for more in ({}, {"n": 3}, {"temperature": 0}):
            answer = target.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2, **fields, **more})
            assert answer.status == 400 and "no token can be chosen" in answer.error[1], answer.content
    answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 2, "bad_words_list": [[token] for token in everything]})
    assert answer.status == 400 and "no token can be chosen" in answer.error[1], answer.content


def test_h30_seeds(target):
    refuse(target, REFUSED[30])
    body = {"random_seed": 2**64 - 1, "temperature": 2.0, "max_new_tokens": 40}
    alone = said(target, **body)
    with concurrent.futures.ThreadPoolExecutor(31) as pool:
        among = [pool.submit(said, target, **{**body, **({} if i == 15 else {"random_seed": i})}) for i in range(31)]
        assert among[15].result() == alone and len({each.result() for each in among}) > 5


def test_h30_a_seed_after_preemption(tiny):
    """There are pages for 2,048 tokens, of the 3,400 that are wanted at once."""
    with running_server(tiny, **{**SETTINGS, "KV_CACHE_MEM_MB": "1"}) as server:
        target, prompts = Target(server), ["x" * (20 + i) for i in range(16)]
        own = {"random_seed": 3, "temperature": 2.0, "max_new_tokens": 190, "ignore_eos": True}
        with target.live():
            alone = [said(target, **{**own, "prompt": prompt}) for prompt in prompts]
            together = target.ask(RAW, {"prompt_batch": prompts, **own}).json()["response_batch"]
            assert [each["response"] for each in together] == alone
            assert target.gauges()["maga_num_preemptions_total"] > 0


def test_h31_times(target):
    refuse(target, REFUSED[31])
    answer = target.ask(RAW, {"prompt": "a" * 250, "max_new_tokens": 5, "timeout_ms": 1, "num_return_sequences": 32})
    assert answer.status in (200, 504) and (answer.status == 200 or answer.error[0] == 603)
    assert target.ask(RAW, {"prompt": "a", "max_new_tokens": 1, "timeout_ms": -1}).status == 200


def test_h33_fields_and_their_places(target):
    refuse(target, REFUSED[33])
    nested = {"max_new_tokens": 1, "ignore_eos": True}
    answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 2, "generate_config": nested})
    assert answer.json()["aux_info"]["output_len"] == 2, "the top level wins"
    answer = target.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "temprature": 0})
    assert answer.headers["X-Maga-Ignored"] == "temprature"
    for name in ("generate_config", "generation_config"):
        assert target.ask(RAW, {"prompt": "a", "max_new_tokens": 1, name: None}).status == 200
    assert wait_for(target.idle)
