"""Bodies that nobody would write, of every route that generates: answered with 200 or a 4xx in the route's own shape, never with
a 5xx, and the server goes on. `--bodies`: how many in all, a sixth of which are tests/server/test_openapi.py's."""

import http.client
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer.server import anthropic, kobold, openai, raw, responses
from maga_transformer.server.openapi import body_schema
from maga_transformer.server.openapi_bodies import BODIES
from maga_transformer.server.responses_request import ITEMS
from maga_transformer.server.routes import routes

from .fuzzing import FUZZ, Tally


def some(**fields):
    """An object with any of these members."""
    return st.fixed_dictionaries({}, optional=fields)


NUMBERS = st.one_of(st.integers(-5, 5), st.sampled_from([2**31, -(2**31), 2**63, 2**64, -(2**63)]), st.floats(allow_nan=False))
WORDS = st.text(max_size=8) | st.sampled_from(["auto", "none", "required", "[", "a{2}"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = some(type=st.sampled_from(["object", "string", "stuff"]), properties=VALUES, minLength=VALUES)
FUNCTIONS = some(name=st.just("f") | VALUES, parameters=SCHEMAS, arguments=VALUES)
CALLS = some(type=st.just("function") | VALUES, function=FUNCTIONS, name=VALUES)
KINDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "x"])
BLOCKS = st.lists(some(type=KINDS, text=VALUES, content=VALUES), max_size=2)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | VALUES
MESSAGES = st.lists(
    some(role=ROLES, content=st.text(max_size=5) | BLOCKS | VALUES, tool_calls=st.lists(CALLS, max_size=2)), max_size=3
)
LIKELY = {
    "messages": MESSAGES,
    "tools": st.lists(CALLS, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]) | CALLS,
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["json_schema", "json_object", "x"])}, optional={"json_schema": SCHEMAS}
    ),
    "guided_json": SCHEMAS,
    "json_schema": SCHEMAS,
    "prompt": st.text(max_size=5) | st.lists(NUMBERS, max_size=3) | VALUES,
    "stream": st.booleans(),
}


def fitting(schema):
    """Values that a JSON schema lets pass, small ones."""
    if "anyOf" in schema:
        return st.one_of([fitting(kind) for kind in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", -100))
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + 400))
        return st.integers(least, most) if kind == "integer" else st.floats(least, most)
    if kind == "array":
        return st.lists(fitting(schema.get("items", {})), max_size=3)
    if kind == "object":
        members = {name: fitting(inner) for name, inner in schema.get("properties", {}).items()}
        return some(**members) if members else st.dictionaries(st.sampled_from(["1", "5", "300", "type", "f"]), VALUES, max_size=2)
    return {"string": WORDS, "boolean": st.booleans(), "null": st.none()}.get(kind, VALUES)


def bodies(route, **always):
    """A few fields of the route's, most of them with values of their kinds."""
    body = next(body for endpoint, body in BODIES.items() if endpoint is route)
    properties = body_schema(body, body.model.model_json_schema())["properties"]
    fields = {name: LIKELY[name] if name in LIKELY else fitting(schema) for name, schema in properties.items()}
    drawn = {name: st.one_of([*[value] * 8, VALUES]) for name, value in fields.items()}
    names = sorted(set(fields) - set(always))
    chosen = st.lists(st.sampled_from(names), max_size=4, unique=True) if names else st.just([])
    return chosen.flatmap(lambda names: st.fixed_dictionaries({**{name: drawn[name] for name in names}, **always}))


TURNS = st.text(max_size=5) | st.lists(
    some(
        type=st.sampled_from(ITEMS) | VALUES,
        role=ROLES,
        content=st.text(max_size=5) | BLOCKS | VALUES,
        output=st.text(max_size=5) | BLOCKS | VALUES,
        name=st.just("f") | VALUES,
        arguments=st.just("{}") | VALUES,
    ),
    max_size=3,
)
TWO, SAID = st.just(2), st.text(min_size=1, max_size=5)
PROMPT = st.one_of(SAID, SAID, SAID, LIKELY["prompt"])
USER = st.one_of(st.just([{"role": "user", "content": "a"}]), MESSAGES)
GENERATE = {
    "/v1/chat/completions": bodies(openai.chat_completions, messages=USER, max_completion_tokens=TWO),
    "/v1/completions": bodies(openai.completions, prompt=PROMPT, max_tokens=TWO),
    "/": bodies(raw.raw, max_new_tokens=TWO, prompt=PROMPT),
    "/v1/responses": bodies(responses.responses, input=TURNS, max_output_tokens=TWO),
    "/v1/messages": bodies(anthropic.messages, messages=USER, max_tokens=TWO),
    "/v1/messages/count_tokens": bodies(anthropic.count_tokens, messages=USER),
    "/api/v1/generate": bodies(kobold.generate, prompt=PROMPT, max_length=TWO),
    "/api/extra/generate/stream": bodies(kobold.generate_stream, prompt=PROMPT, max_length=TWO),
}
OTHERS = {
    route.path: bodies(route.endpoint)
    for route in routes(generates=True)
    if route.endpoint in BODIES
    and route.path not in (*GENERATE, "/chat/completions", "/completions", "/responses", "/api/latest/generate")
}
ROUTES = {**GENERATE, **OTHERS}


class Connection:
    """Kept open, and cheaper than a client's: half of what a body costs would be that."""

    def __init__(self, url):
        self.made = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)

    def post(self, path, content):
        self.made.request("POST", path, content, {"Content-Type": "application/json"})
        answer = self.made.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read()


@pytest.mark.parametrize("path", ROUTES)
def test_random_bodies(fuzzed, path, request):
    connection, tally = Connection(fuzzed.url), Tally()
    weight = 10 if path in GENERATE else 1
    share = max(3, request.config.getoption("--bodies") * 5 // 6 * weight // (10 * len(GENERATE) + len(OTHERS)))

    @settings(FUZZ, max_examples=share)
    @given(ROUTES[path])
    def ask(body):
        content = json.dumps(body)  # infinities too, as no JSON has them
        code, kind, told = connection.post(path, content.encode())
        tally.add(code)
        late = code == 504 and "timeout_ms" in content  # the time that the body itself allows
        assert (code < 500 or late) and (b"internal" not in told or "internal" in content), (content, told)
        if kind == "text/event-stream":
            assert code == 200, (content, told)
        else:
            answer = json.loads(told)
            assert code == 200 or answer.get("error") or answer.get("message") or answer.get("detail"), (content, told)

    ask()
    tally.show(path)
    assert set(tally) <= {200, 400, 404, 504}, tally
    assert tally[200] or path not in GENERATE, tally
