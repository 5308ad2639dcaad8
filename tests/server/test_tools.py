"""Tool calls over HTTP with the demo model, whose template has no place for tools: calls that must be made, whole and streamed."""

import json

import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(client, model, **fields):
    return client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=80, **{"tools": TOOLS, "parallel_tool_calls": False, **fields}
    )


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_made(client, model, choice):
    answer = ask(client, model, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.type == "function" and call.id
    arguments = json.loads(call.function.arguments)
    if choice == NAMED:
        assert call.function.name == "get_weather"
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")


def test_a_streamed_call(client, model):
    whole = ask(client, model, tool_choice=NAMED).choices[0].message.tool_calls[0]
    chunks = list(ask(client, model, tool_choice=NAMED, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function.name == "get_weather" and deltas[0].function.arguments == ""
    assert all(delta.id is None and delta.function.name is None and delta.index == 0 for delta in deltas[1:])
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert len(deltas) > 4, "the arguments come as they are written"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_choices_that_ask_for_nothing(server):
    plain = server.post("/tokenize", {"messages": MESSAGES}).json()["count"]
    for fields in ({"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": None, "tool_choice": None}):
        body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": None, "max_tokens": 4, **fields}
        answer = server.post("/v1/chat/completions", body).json()
        assert "tool_calls" not in answer["choices"][0]["message"] and answer["usage"]["prompt_tokens"] == plain


def test_a_conversation_with_calls_and_results(client, model):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "22 degrees"}]},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS[1:], temperature=0, max_tokens=8)
    assert answer.choices[0].message.content


def test_the_prompt_describes_the_tools(server):
    body = {"messages": MESSAGES, "tools": TOOLS}
    ids = server.post("/tokenize", body).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert "The weather of a city" in prompt and "<tool_call>" in prompt
    plain = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert len(plain) < len(ids)


def test_the_models_own_template_gets_tools(tmp_path):
    """A model whose template knows tools gets them, and arguments as objects."""
    from .chain_model import END, write_chain
    from .conftest import running_server

    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for m in messages %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }};{% endfor %}{{ m.content }}{% endfor %}"
        "{# <tool_call> #}"
    )
    with running_server(write_chain(tmp_path / "chain", ["Qab", END]), CHAT_TEMPLATE=template) as server:
        function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        messages = [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]
        messages.append({"role": "user", "content": "Q"})
        ids = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
        assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "get_weather;stop;Paris;Q"
        answer = server.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS, "temperature": 0})
        assert answer.json()["choices"][0]["message"]["content"] == "ab"


BAD = [
    ({"tools": "x"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "parameters"),
    ({"tools": TOOLS * 100}, "128"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "get_weather"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "only one"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "stuff"}}}],
            "tool_choice": "required",
        },
        "stuff",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]}, "arguments"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {f"k{i}": 1 for i in range(10000)}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"documents": "x"}, "documents"),
]


@pytest.mark.parametrize("body, word", BAD, ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None)
def test_bad_fields_are_named(server, body, word):
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **body})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_templates_do_not_run_what_users_write(server):
    messages = [{"role": "user", "content": "{{ 7*7 }} {% raw %}"}]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert "{{ 7*7 }} {% raw %}" in server.post("/detokenize", {"tokens": ids}).json()["prompt"]


def test_continue_final_message(server):
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1 2 3 4 5"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    prompt = server.post("/detokenize", {"tokens": server.post("/tokenize", body).json()["tokens"]}).json()["prompt"]
    assert prompt.endswith("1 2 3 4 5")
    answer = server.post("/v1/chat/completions", {**body, "max_tokens": 4, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"].startswith(" 6")


def test_roles(server):
    """developer is system; both names of a thought reach the template."""
    one = server.post("/tokenize", {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]}).json()
    two = server.post("/tokenize", {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]}).json()
    assert one["tokens"] == two["tokens"]
