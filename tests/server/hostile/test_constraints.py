"""What an answer must look like, asked for by those who want the server to hang: H42 to H47."""

import concurrent.futures
import contextlib
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

COMPLETIONS, CHAT, RAW = "/v1/completions", "/v1/chat/completions", "/"


def ask(target, **fields):
    return target.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 3, **fields})


def refuse(target, field, word="", **fields):
    answer = ask(target, **fields)
    assert answer.status == 400 and field in answer.error[1] and word in answer.error[1], (str(fields)[:200], answer.content)
    assert len(answer.content) < 800
    return answer


PATTERNS = ["(a+)+b", "(a|aa)*c", "((a{1,99}){1,99}){1,99}", "(?:a?){60}a{60}"]
PATTERNS += ["[" * 50, "a" * 100_000, "(" * 30_000, "\\p{Foo}"]


def test_h42_regular_expressions(target):
    for pattern in PATTERNS:
        for field in ("guided_regex", "structured_outputs"):
            answer = ask(target, **{field: pattern if field == "guided_regex" else {"regex": pattern}})
            assert answer.status == 200 or (answer.status == 400 and field in answer.error[1]), (pattern[:50], answer.content)
        answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 3, "regex": pattern})
        assert answer.status == 200 or (answer.status == 400 and "regex" in answer.error[1]), (pattern[:50], answer.content)
    refuse(target, "guided_regex", guided_regex="[")
    refuse(target, "guided_regex", "bytes", guided_regex="a" * 100_000)


@contextlib.contextmanager
def listener():
    """A server that counts who comes."""
    came = []

    class Counting(BaseHTTPRequestHandler):
        def do_GET(self):
            came.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Counting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/schema.json", came
        finally:
            server.shutdown()
            thread.join()


def test_h43_references(target):
    two = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for schema in ({"$ref": "#"}, two, {"$ref": "#/nowhere"}, {"$ref": 5}):
        refuse(target, "guided_json", guided_json=schema)
    with listener() as (url, came):
        for reference in (url, "file:///etc/passwd", "ftp://127.0.0.1/x", "//127.0.0.1/x"):
            for schema in (
                {"$ref": reference},
                {"type": "object", "properties": {"a": {"$ref": reference}}},
                {"$schema": url, "$ref": url},
            ):
                refuse(target, "$ref='", guided_json=schema)
                body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
                tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
                answer = target.ask(CHAT, {**body, "tools": [tool], "tool_choice": "required"})
                assert answer.status == 400 and "tools[0].function.parameters" in answer.error[1] and "$ref" in answer.error[1]
        assert not came


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS = [  # a word of the message
    ({"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}, "properties"),
    (nested(500), "nested"),
    ({"enum": ["x" * 1000 + str(i) for i in range(3000)]}, "bytes"),
    ({"type": "array", "minItems": 10**9}, ".minItems=1000000000"),
    ({"properties": {"a": {"type": "string", "minLength": 10**9}}}, ".properties.a.minLength=1000000000"),
    ({"properties": {"a": {"type": "string", "pattern": "["}}}, ".properties.a.pattern='['"),
    ({"properties": {"a": {"items": {"type": "stuff"}}}}, ".properties.a.items.type='stuff'"),
    ({"properties": {"a": {"$ref": "#/nowhere"}}}, ".properties.a.$ref='#/nowhere'"),
    ({"not": {"type": "string"}}, ".not="),
    ({"type": "stuff"}, ".type='stuff'"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    ({"type": []}, ""),
    ({"properties": 5}, ""),
    ({"enum": []}, ""),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
]


@pytest.mark.grows(64)
def test_h44_schemas(target):
    for schema, word in SCHEMAS:
        refuse(target, "guided_json", word, guided_json=schema)
        refuse(target, "schema", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": [tool], "tool_choice": "required"}
        answer = target.ask(CHAT, body)
        assert answer.status == 400, schema
        named = word.startswith(".") and word != ".not="  # which is left to the tool
        assert not named or f"tools[0].function.parameters{word}" in answer.error[1], answer.content
    for schema in (nested(60), {"type": "object", "additionalProperties": nested(20)}, {"oneOf": [nested(i) for i in range(20)]}):
        assert ask(target, guided_json=schema).status in (200, 400)


def test_h45_grammars(target):
    for text in (
        "root ::= root",
        "root ::= undefined",
        "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "root ::= [",
        "::=",
        "start: start",
    ):
        refuse(target, "guided_grammar", guided_grammar=text)
        answer = target.ask(RAW, {"prompt": "a", "max_new_tokens": 2, "ebnf": text})
        assert answer.status == 400 and "ebnf" in answer.error[1]
    assert ask(target, guided_grammar='root ::= ""').json()["choices"][0]["text"] == ""
    for text in ('root ::= "a" root | "b"', 'root ::= (("a" | "b")* "c")*', 'start: ("a"*)*'):
        answer = ask(target, guided_grammar=text)
        assert answer.status in (200, 400), answer.content
    refuse(target, "guided_grammar", guided_grammar=" \n")


def test_h46_grammars_without_end(target, request):
    """Each by itself; `--bodies` 100,000 and more: all 2,000. They are kept in memory only, and only the last."""
    count = 2000 if request.config.getoption("--bodies") >= 100_000 else 300
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    sizes = []
    for index in range(count):
        answer = ask(target, guided_json={**schema, "description": str(uuid.uuid4())})
        assert answer.status == 200, answer.content
        if index in (99, count - 1):
            sizes.append(target.memory())
    assert sizes[1] - sizes[0] < 16, sizes


def test_one_grammar_for_many_at_once(target):
    """Their first masks are of one step and of one compiled grammar."""
    body = {"prompt": "a", "max_tokens": 20, "guided_regex": "[ab]{20}"}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: target.ask(COMPLETIONS, {**body, "seed": i}), range(96)))
    assert {answer.status for answer in answers} == {200}
    assert all(set(answer.json()["choices"][0]["text"]) <= {"a", "b"} for answer in answers)


CONTRADICTIONS = [
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": 5}, "guided_json"),
    ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": []}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"odd": 1}}, "structured_outputs"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": 5}, "structured_outputs"),
    ({"guided_regex": "a", "guided_json": {"type": "object"}}, "only one"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "only one"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag"),
    ({"structural_tag": {"structures": [5], "triggers": ["a"]}}, "structural_tag"),
    ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "beam"),
]


def test_h47_what_contradicts_itself(target):
    """An older field that is empty asks for nothing, as many clients send them all."""
    for fields, word in CONTRADICTIONS:
        refuse(target, word, **fields)
    for fields in ({"guided_regex": ""}, {"guided_choice": []}, {"guided_json": None}, {"response_format": {"type": "text"}}):
        assert ask(target, **fields).status == 200
    answer = target.ask(RAW, {"prompt": "a", "regex": "a", "json_schema": {"type": "object"}})
    assert answer.status == 400 and "only one" in answer.error[1]
    assert json.loads(answer.content)["error_code"]
    for path, fields, word in (
        (RAW, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": None}}, "response_format"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": None}}}, "text.format"),
        ("/v1/responses", {"input": "a", "guided_regex": "a", "text": {"format": {"type": "json_object"}}}, "only one"),
    ):
        answer = target.ask(path, fields)
        assert answer.status == 400 and word in answer.error[1], answer.content
