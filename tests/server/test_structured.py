"""Structured output over HTTP: every kind holds, streams, runs beside others, and refuses what cannot be."""

import concurrent.futures
import json
import re
import time

import pytest

from .conftest import running_server

MESSAGES = [{"role": "user", "content": "Tell me about Paris."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def ask(server, **fields):
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def text_of(server, **fields):
    choice = ask(server, **fields)
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_json(server, fields):
    value = json.loads(text_of(server, **fields))
    assert set(value) == {"city", "people"} and len(value["city"]) <= 12 and 0 <= value["people"] <= 99999


def test_any_json_object(server):
    choice = ask(server, response_format={"type": "json_object"}, max_tokens=150)
    text = choice["message"]["content"]
    assert text.lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "fields, pattern",
    [
        ({"guided_regex": "[0-9]{3}-[a-z]{2,5}!"}, r"[0-9]{3}-[a-z]{2,5}!"),
        ({"structured_outputs": {"regex": "(ab|cd)+e"}, "max_tokens": 200, "logit_bias": {}}, r"(ab|cd)+e"),
        ({"guided_choice": ["yes", "no", "it depends"]}, r"yes|no|it depends"),
        ({"structured_outputs": {"choice": ["日本", "한국"]}}, r"日本|한국"),
        ({"guided_grammar": 'root ::= "x" ("1" | "2") tail\ntail ::= "."'}, r"x[12]\."),
        ({"grammar": 'start: "a" "b"~3'}, r"abbb"),
    ],
)
def test_texts(server, fields, pattern):
    text = text_of(server, **{"temperature": 1.0, "seed": 5, **fields})
    assert re.fullmatch(pattern, text), text


def test_a_structural_tag(server):
    tag = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n>"]}
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "structured_outputs": {"structural_tag": tag}})
    assert answer.status_code == 200, answer.text


def test_the_raw_route(server):
    assert re.fullmatch("[a-c]{4}", server.raw("Letters:", max_new_tokens=20, regex="[a-c]{4}")["response"])
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    assert set(json.loads(server.raw("A city as JSON:", max_new_tokens=80, top_k=1, **fields)["response"])) == {"city", "people"}


def test_streams_and_several_choices(server):
    fields = {"guided_regex": "[A-Z]{6}", "temperature": 1.0, "seed": 2, "n": 3}
    body = {"messages": MESSAGES, "max_tokens": 30, **fields}
    whole = [choice["message"]["content"] for choice in server.post("/v1/chat/completions", body).json()["choices"]]
    assert all(re.fullmatch("[A-Z]{6}", text) for text in whole) and len(set(whole)) > 1
    with server.stream("/v1/chat/completions", {**body, "stream": True}) as answer:
        lines = [line[6:] for line in answer.read().decode().split("\n\n") if line.startswith("data: {")]
    texts = ["", "", ""]
    for choice in (json.loads(line)["choices"][0] for line in lines):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == whole


def test_values_of_tokens_under_a_grammar(server):
    choice = ask(server, guided_choice=["Zz"], logprobs=True, top_logprobs=5)
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith("Zz")
    assert all(-9999 <= entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 5 for entry in entries)


def test_neighbours_of_constrained_requests(server):
    """Others say what they say alone, and so do the constrained ones."""

    def free(index):
        return server.raw(f"Number {index} and then", max_new_tokens=12, top_k=1)["response"]

    def bound(index):
        return text_of(server, guided_regex=f"[0-9]{{{4 + index}}}")

    alone = [free(index) for index in range(4)], [bound(index) for index in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = [pool.submit(free, index) for index in range(4)], [pool.submit(bound, index) for index in range(4)]
        assert ([each.result() for each in together[0]], [each.result() for each in together[1]]) == alone
    assert server.get("/metrics").status_code == 200


BAD = [  # fields, the field named, a word of the message
    ({"guided_regex": "["}, "guided_regex", "regex"),
    ({"guided_regex": 5}, "guided_regex", "regular expression"),
    ({"guided_regex": "a" * 100000}, "guided_regex", "bytes"),
    ({"guided_choice": [1]}, "guided_choice", "texts"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice", "5000"),
    ({"guided_grammar": "root ::= root"}, "guided_grammar", "no text"),
    ({"guided_grammar": "root ::= undefined"}, "guided_grammar", "undefined"),
    ({"guided_grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000}, "guided_grammar", "nested"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
    ({"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, "guided_json", "127.0.0.1"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "passwd"),
    ({"guided_json": {"type": "stuff"}}, "guided_json", "stuff"),
    ({"guided_json": {"type": "string", "pattern": "["}}, "guided_json", "regex"),
    ({"guided_json": {"type": "array", "minItems": 10**9}}, "guided_json", "minItems"),
    ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
    ({"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}}, "guided_json", "properties"),
    ({"guided_json": {"enum": ["x" * 1000 + str(i) for i in range(200)]}}, "guided_json", "bytes"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format", "schema"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": "json"}, "response_format", "json_object"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "only one"),
    ({"structured_outputs": {"odd": 1}}, "structured_outputs", "odd"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "only one"),
]


@pytest.mark.parametrize("fields, field, word", BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_is_refused_soon(server, fields, field, word):
    began = time.monotonic()
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in error["param"] and word in error["message"] and len(error["message"]) < 600, error
    assert time.monotonic() - began < 10  # 2 on an idle machine


def test_deep_and_hungry_grammars(server):
    deep: dict = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    for fields in (
        {"guided_json": deep},
        {"guided_regex": "(a+)+b"},
        {"guided_regex": "(a|aa)*c"},
        {"guided_regex": "((a{1,99}){1,99}){1,99}"},
    ):
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, **fields})
        assert answer.status_code in (200, 400), answer.text


def test_thoughts_come_before_what_is_constrained(tmp_path):
    from .chain_model import END, write_chain

    folder = write_chain(tmp_path / "chain", ["Qab</think>cd", END])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running_server(folder, CHAT_TEMPLATE=template, REASONING_PARSER="deepseek_r1") as server:
        body = {"messages": [{"role": "user", "content": "Q"}], "temperature": 0, "max_tokens": 40}

        def message(**fields):
            answer = server.post("/v1/chat/completions", {**body, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()

        free = message()
        said = free["choices"][0]["message"]
        assert (said["content"], said["reasoning_content"], said["reasoning"]) == ("cd", "ab", "ab")
        assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 8
        bound = message(guided_choice=["xy"])["choices"][0]["message"]
        assert (bound["content"], bound["reasoning_content"]) == ("xy", "ab")
        assert "reasoning" not in message(include_reasoning=False)["choices"][0]["message"]
        with server.stream("/v1/chat/completions", {**body, "stream": True}) as answer:
            events = [json.loads(line[6:]) for line in answer.read().decode().split("\n\n") if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
        assert "".join(delta.get("content", "") for delta in deltas) == "cd"
        anthropic = server.post("/v1/messages", {**body, "max_tokens": 40}).json()
        assert [block["type"] for block in anthropic["content"]] == ["thinking", "text"]


def test_the_library(demo_gguf):
    from maga_transformer import LLM

    with LLM(demo_gguf, max_seq_len=128, kv_cache_mem_mb=64) as llm:
        result = llm.generate("Digits:", max_new_tokens=20, regex="[0-9]{5}")
        assert re.fullmatch("[0-9]{5}", result.text) and result.finish_reason == "stop"
