"""Anthropic's own client against a real server."""

import json

import anthropic
import pytest

TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]
MESSAGES = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_message(claude, model, client):
    answer = claude.messages.create(model=model, max_tokens=8, messages=MESSAGES, extra_body=GREEDY, system="You are kind.")
    assert answer.id.startswith("msg_") and answer.type == "message" and answer.role == "assistant" and answer.model == model
    assert answer.content[0].type == "text" and answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
    same = client.chat.completions.create(
        model=model, messages=[{"role": "system", "content": "You are kind."}, *MESSAGES], temperature=0, max_tokens=8
    )
    assert answer.content[0].text == same.choices[0].message.content
    counted = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert (counted, answer.usage.output_tokens) == (same.usage.prompt_tokens, same.usage.completion_tokens)


def test_count_tokens(claude, model, server):
    count = claude.messages.count_tokens(model=model, messages=MESSAGES, system="You are kind.").input_tokens
    messages = [{"role": "system", "content": "You are kind."}, *MESSAGES]
    assert count == server.post("/tokenize", {"messages": messages}).json()["count"]


def test_stream(claude, model):
    whole = claude.messages.create(model=model, max_tokens=8, messages=MESSAGES, extra_body=GREEDY)
    with claude.messages.stream(model=model, max_tokens=8, messages=MESSAGES, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_delta" in kinds


def test_the_stream_on_the_wire(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "temperature": 0, "cache_control": {"type": "ephemeral"}}
    with server.stream("/v1/messages?beta=true", body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")[:-1]
    names = []
    for event in events:
        name, data = event.split("\n")
        names.append(name.removeprefix("event: "))
        assert json.loads(data.removeprefix("data: "))["type"] == names[-1]
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = json.loads(events[0].split("data: ")[1])["message"]
    assert start["stop_reason"] is None and start["stop_sequence"] is None and start["content"] == []
    end = json.loads(events[-2].split("data: ")[1])
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and end["usage"]["output_tokens"] == 3


def test_stop_sequences(claude, model):
    messages = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    answer = claude.messages.create(model=model, max_tokens=20, messages=messages, extra_body=GREEDY, stop_sequences=[" 6"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " 6") and " 5" in answer.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_tools(claude, model, stream):
    fields = {
        "model": model,
        "max_tokens": 60,
        "extra_body": GREEDY,
        "messages": [{"role": "user", "content": "Weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    if stream:
        with claude.messages.stream(**fields) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**fields)
    (block,) = answer.content
    assert (
        answer.stop_reason == "tool_use"
        and block.type == "tool_use"
        and block.name == "get_weather"
        and set(block.input) == {"city"}
    )
    followed = claude.messages.create(
        model=model,
        max_tokens=4,
        tools=TOOLS,
        messages=[
            *fields["messages"],
            {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "22 degrees"}]},
        ],
    )
    assert followed.usage.output_tokens > 0


BAD = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages[0].content[0]"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "odd"}}, "tool_choice"),
    ({"system": 5}, "system"),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "prompt is too long"),
]


@pytest.mark.parametrize("fields, word", BAD, ids=lambda value: str(value)[:50])
def test_bad_fields_are_named(server, fields, word):
    answer = server.post("/v1/messages", {"max_tokens": 4, "messages": MESSAGES, **fields})
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error", body
    assert body["error"]["type"] == "invalid_request_error" and word in body["error"]["message"]


def test_the_clients_errors(claude, model):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="claude", max_tokens=4, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model=model, max_tokens=4, messages=MESSAGES, extra_body={"top_p": 3})
    assert claude.messages.create(model=model, max_tokens=1, messages=MESSAGES).usage.output_tokens == 1
