"""What nobody should send: each is answered with a 4xx that names the field, in the route's own shape, and nothing else changes."""

import concurrent.futures
import json
import socket

import pytest
from maga_transformer.server.errors import anthropic_error, openai_error, writer

from .fuzzing import POSTED

BIG = 2**63


@pytest.fixture(scope="module", autouse=True)
def probe(server):
    """The same greedy answer before and after everything."""
    before = server.raw("The capital of France is", max_new_tokens=6, top_k=1)["response"]
    yield
    assert server.raw("The capital of France is", max_new_tokens=6, top_k=1)["response"] == before


RAW = [  # body, error code, a word of the message
    ({}, 509, "prompt"),
    ({"prompt": None}, 509, "prompt"),
    ({"prompt": ""}, 510, "empty"),
    ({"prompt": []}, 509, "prompt"),
    ({"prompt": [""]}, 510, "prompt[0]"),
    ({"prompt": 7}, 507, "prompt=7"),
    ({"prompt": ["a", 7]}, 507, "prompt[1]=7"),
    ({"prompt": [1, 2]}, 507, "prompt[0]=1"),
    ({"prompt_batch": "a"}, 507, "prompt_batch"),
    ({"prompt_batch": []}, 509, "prompt_batch"),
    ({"prompt_batch": ["a", ""]}, 510, "prompt_batch[1]"),
    ({"prompt_batch": ["a"] * 5000}, 507, "5000"),
    ({"prompt": "a", "prompt_batch": ["b"]}, 507, "exclude"),
    ({"prompt": "a", "text": "b"}, 507, "prompt and text"),
    ({"messages": []}, 509, "messages"),
    ({"messages": "hi"}, 507, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 516, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, 516, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, 516, "messages[0].content"),
    ({"messages": ["hi"]}, 516, "messages[0]"),
    ({"prompt": "a", "request_format": "chatapi"}, 507, "request_format"),
    ({"prompt": "a", "request_format": "x"}, 516, "request_format"),
    ({"prompt": "a", "generate_config": "x"}, 516, "generate_config"),
    ({"prompt": "a", "generate_config": [1]}, 516, "generate_config"),
    ({"prompt": "a", "temprature": 0}, 516, "temprature"),
    ({"prompt": "a", "generate_config": {"temprature": 0}}, 516, "temprature"),
    ({"prompt": "a", "yield_generator": "yes"}, 516, "yield_generator"),
    ({"prompt": "a", "private_request": 3}, 507, "private_request"),
    *[({"prompt": "a", "temperature": value}, 516, "temperature") for value in (-0.1, 1e308, "0.7", True, [])],
    *[({"prompt": "a", "top_p": value}, 516, "top_p") for value in (-0.1, 1.0001, "1")],
    *[({"prompt": "a", "top_k": value}, 516, "top_k") for value in (-5, 3.5, True)],
    *[({"prompt": "a", "max_new_tokens": value}, 516, "max_new_tokens") for value in (0, -1, "5", 1.5, True)],
    ({"prompt": "a", "min_new_tokens": -1}, 516, "min_new_tokens"),
    ({"prompt": "a", "min_new_tokens": 5, "max_new_tokens": 4}, 516, "min_new_tokens"),
    ({"prompt": "a", "logprobs": 21}, 516, "logprobs"),
    ({"prompt": "a", "min_p": 2}, 516, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, 516, "repetition_penalty"),
    ({"prompt": "a", "presence_penalty": 3}, 516, "presence_penalty"),
    *[({"prompt": "a", "random_seed": value}, 516, "random_seed") for value in (-2, 2**64, 1e300, "a")],
    *[({"prompt": "a", "timeout_ms": value}, 516, "timeout_ms") for value in (0, -5, BIG, "1")],
    *[({"prompt": "a", "num_return_sequences": value}, 516, "num_return_sequences") for value in (-1, 2**31, 1.0)],
    ({"prompt": "a", "num_return_sequences": 1000}, 516, "1000"),
    ({"prompt": "a", "stop_words_str": "x"}, 512, "stop_words_str"),
    ({"prompt": "a", "stop_words_str": [None]}, 512, "stop_words_str[0]"),
    ({"prompt": "a", "stop_words_str": ["x"] * 10000}, 512, "10000"),
    ({"prompt": "a", "stop_words_str": ["x" * 1000000]}, 512, "1000000"),
    ({"prompt": "a", "stop_words_list": [[]]}, 512, "stop_words_list"),
    ({"prompt": "a", "stop_words_list": [["x"]]}, 512, "stop_words_list[0][0]"),
    ({"prompt": "a", "stop_words_list": [[-1]]}, 516, "stop_words_list"),
    ({"prompt": "a", "stop_words_list": [[49152]]}, 516, "49152"),
    ({"prompt": "a", "bad_words_list": [[BIG - 1]]}, 516, "bad_words_list"),
    *[({"prompt": "a", "logit_bias": {key: 1.0}}, 516, "logit_bias") for key in ("-1", "49152", "1e3", "abc", str(BIG))],
    *[({"prompt": "a", "logit_bias": {"5": value}}, 516, "logit_bias") for value in (1e39, None, "1")],
    ({"prompt": "word " * 2000}, 511, "2001 tokens"),
]


@pytest.mark.parametrize("body, code, word", RAW, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None)
def test_raw(server, body, code, word):
    answer = server.post("/", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert set(error) == {"error_code", "message"} and error["error_code"] == code, error
    assert word in error["message"] and len(error["message"]) < 500


OPENAI = [  # body over {"prompt": "a"}, a word of the message
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [[]]}, "empty"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]=-1"),
    ({"prompt": [49152]}, "prompt[0]=49152"),
    ({"prompt": [2**40]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]=1.5"),
    ({"prompt": [True]}, "prompt[0]=True"),
    ({"prompt": [1, "a"]}, "prompt[0]=1"),
    ({"prompt": [1] * 1000000}, "maximum context length"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n=0"),
    ({"n": 10**6}, "n=1000000"),
    ({"n": 65}, "65"),
    ({"best_of": 10**9}, "best_of"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"seed": -2}, "seed"),
    ({"stop": [None]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 1000}, "1000"),
    ({"stop_token_ids": [151645]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"logit_bias": {str(token): 1 for token in range(49153)}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"dry_multiplier": -1}, "dry_multiplier"),
    ({"token_ban_ranges": [[[1], 2**70, 1]]}, "token_ban_ranges"),
    ({"custom_token_bans": [2**40]}, "custom_token_bans"),
]


@pytest.mark.parametrize("body, word", OPENAI, ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None)
def test_openai(server, body, word):
    answer = server.post("/v1/completions", {"prompt": "a", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error" and error["code"]
    assert word in error["message"] and len(error["message"]) < 500


BODIES = [
    b'{"prompt": "a"',
    b"[]",
    b"7",
    b"null",
    b'"x"',
    b"",
    b"{" * 100000,
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e400, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
]


OF_A_KEY = {"/api/extra/abort", "/api/extra/generate/check"}  # an empty body names no request


@pytest.mark.parametrize("path", [path for path in POSTED if path not in OF_A_KEY])
def test_bodies_that_are_no_request(server, path):
    for body in BODIES:
        answer = server.post(path, content=body)
        assert answer.status_code == 400, (body[:40], answer.text)
        error = answer.json()
        if path.startswith("/api"):
            assert error["detail"]["msg"]
        elif writer(path) in (openai_error, anthropic_error):
            assert error["error"]["message"]
        else:
            assert error["error_code"] and error["message"]


@pytest.mark.parametrize("path", [path for path in POSTED if path not in OF_A_KEY])
def test_bodies_nested_deep(server, path):
    deep = "[" * 900 + "]" * 900
    members = ("prompt", "messages", "tools", "chat_template_kwargs", "temperature", "guided_json", "input", "tokens", "system")
    for name in members:
        for value in (deep, '{"a": ' + deep + "}", '[{"role": "user", "content": ' + deep + "}]"):
            answer = server.post(path, content=f'{{"max_tokens": 2, "{name}": {value}}}'.encode())
            assert 400 <= answer.status_code < 500, (name, answer.text)


def test_odd_but_valid_text_is_served(server):
    for prompt in ("a\u0000b", "   ", "\u202e", "😀" * 50, "<|im_end|>", "{{ 7*7 }}"):
        assert server.raw(prompt, max_new_tokens=1)["finished"]
    body = {"messages": [{"role": "user", "content": "{{ 7*7 }}{% raw %}"}]}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert "{{ 7*7 }}{% raw %}" in server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_repeated_keys_last_wins(server):
    answer = server.post("/", content=b'{"prompt": "a", "max_new_tokens": 1, "max_new_tokens": 2}')
    assert answer.json()["aux_info"]["output_len"] == 2


def test_tiny_temperature_is_greedy_and_huge_top_k_is_off(server):
    greedy = server.raw("Once upon a time", max_new_tokens=5, temperature=0.0)["response"]
    assert server.raw("Once upon a time", max_new_tokens=5, temperature=1e-9)["response"] == greedy
    assert server.raw("Once", max_new_tokens=2, top_k=BIG)["finished"]


def test_large_bodies(server):
    for path in ("/", "/v1/completions"):
        assert server.post(path, content=b"x" * (5 << 20)).status_code == 413
        assert server.post(path, content=iter([b"x" * (1 << 20)] * 5)).status_code == 413
        assert server.post(path, content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415


def test_a_2_mb_prompt_does_not_hold_the_others_up(server):
    """It is tokenised off the event loop and refused with both lengths, while others are served."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/", {"prompt": "word " * 400000})
        served = 0
        while not long.done():
            assert server.get("/health").status_code == 200
            served += 1
    answer = long.result()
    assert answer.status_code == 400 and answer.json()["error_code"] == 511
    assert "256 tokens" in answer.json()["message"] and "400001 tokens" in answer.json()["message"]
    assert served > 1


def test_unknown_routes_and_methods(server):
    assert server.get("/nothing").json()["error_code"] and server.get("/nothing").status_code == 404
    assert server.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert server.client.delete(server.url + "/v1/models").json()["error"]["code"] == "method_not_allowed"
    assert server.client.put(server.url + "/", content=b"{}").status_code == 405
    assert server.get("/../../etc/passwd").status_code == 404


def test_a_body_that_never_comes_holds_nobody_up(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.raw("a", max_new_tokens=1)["finished"]


def test_garbage_instead_of_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01\x00\x00garbage\r\n\r\n")
        assert b"Traceback" not in connection.recv(1000)
