"""Bodies that nobody would write, of every route that generates: answered with 200 or a 4xx in the route's own shape, never with
a 5xx, and the server goes on. MAGA_TEST_BODIES: how many for each route."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from maga_transformer import generate_config
from maga_transformer.server import anthropic_request, kobold_request, responses_request, schemas

from .chain_model import END, write_chain
from .conftest import running_server

BODIES = int(os.environ.get("MAGA_TEST_BODIES", "100"))
TEMPLATE = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call }}{% endfor %}{% endfor %}Q"


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


def bodies(names, **always):
    fields = {name: VALUES | LIKELY[name] if name in LIKELY else VALUES for name in names if name not in always}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return chosen.flatmap(lambda some: st.fixed_dictionaries({**{name: fields[name] for name in some}, **always}))


CHAT = {*schemas.ChatRequest.model_fields, *schemas.UNSUPPORTED, "grammar"} - {"grammar_text"}
COMPLETION = {*schemas.CompletionRequest.model_fields, *schemas.UNSUPPORTED, *schemas.CHAT_ONLY, "grammar"} - {"grammar_text"}
RAW = {*generate_config.GenerateConfig.model_fields, *generate_config.UNSUPPORTED, "prompt", "messages", "generate_config"}
KOBOLD = {*kobold_request.KoboldRequest.model_fields, *kobold_request.UNSUPPORTED}
RESPONSES = {*responses_request.ResponsesRequest.model_fields, *responses_request.ResponsesRequest.refused, "grammar"}
RESPONSES -= {"grammar_text"}
ITEMS = st.text(max_size=5) | st.lists(
    some(
        type=st.sampled_from(responses_request.ITEMS) | VALUES,
        role=ROLES,
        content=st.text(max_size=5) | BLOCKS | VALUES,
        output=st.text(max_size=5) | BLOCKS | VALUES,
        name=st.just("f") | VALUES,
        arguments=st.just("{}") | VALUES,
    ),
    max_size=3,
)
TWO, USER = st.just(2), MESSAGES | st.just([{"role": "user", "content": "a"}])
ROUTES = {
    "/v1/chat/completions": bodies(CHAT, messages=USER, max_completion_tokens=TWO),
    "/v1/completions": bodies(COMPLETION, prompt=LIKELY["prompt"], max_tokens=TWO),
    "/": bodies(RAW, max_new_tokens=TWO, prompt=LIKELY["prompt"]),
    "/v1/responses": bodies(RESPONSES, input=ITEMS, max_output_tokens=TWO),
    "/v1/messages": bodies(anthropic_request.MessagesRequest.model_fields, messages=USER, max_tokens=TWO),
    "/v1/messages/count_tokens": bodies(anthropic_request.MessagesRequest.model_fields, messages=USER),
    "/api/v1/generate": bodies(KOBOLD, prompt=LIKELY["prompt"], max_length=TWO),
    "/tokenize": bodies(["prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens"]),
}


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = write_chain(tmp_path_factory.mktemp("fuzz") / "chain", ["Qab", END])
    with running_server(folder, CHAT_TEMPLATE=TEMPLATE, MAX_NUM_SEQS="8", FT_SERVER_TEST="0") as server:
        yield server
        assert server.raw("Q", max_new_tokens=5, top_k=1)["response"] == "ab"
        gauges = server.gauges()
        assert gauges["maga_num_requests_running"] == gauges["maga_num_requests_waiting"] == 0
        assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines[-40:])


@pytest.mark.parametrize("path", ROUTES)
def test_random_bodies(chain, path):
    @settings(max_examples=BODIES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(ROUTES[path])
    def ask(body):
        content = json.dumps(body)  # infinities too, as no JSON has them
        answer = chain.post(path, content=content.encode())
        assert answer.status_code < 500, (content, answer.text)
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert b"internal" not in answer.content, content
        else:
            told = answer.json()
            assert answer.status_code == 200 or told.get("error") or told.get("message") or told.get("detail"), (content, told)

    ask()
