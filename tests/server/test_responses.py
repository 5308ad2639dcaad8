"""/v1/responses with the openai client, and on the wire: text, function tools, thoughts, structured output, errors."""

import asyncio
import json

import openai
import pydantic
import pytest

from .chain_model import END, write_chain
from .conftest import running_server

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NAMED = {"type": "function", "name": "get_weather"}


def test_text_is_the_chats(client, model):
    response = client.responses.create(
        model=model, input="Say hello.", instructions="You are kind.", temperature=0, max_output_tokens=8, metadata={"a": "b"}
    )
    messages = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Say hello."}]
    chat = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
    assert response.output_text == chat.choices[0].message.content and response.id.startswith("resp_")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    (item,) = response.output
    assert item.type == "message" and item.role == "assistant" and item.id.startswith("msg_")
    assert response.metadata == {"a": "b"} and response.model == model and response.instructions == "You are kind."
    if chat.choices[0].finish_reason == "length":
        assert response.status == item.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    else:
        assert response.status == item.status == "completed" and response.incomplete_details is None


def test_an_answer_that_ends_by_itself(client, model):
    response = client.responses.create(model=model, input="Q", temperature=0, extra_body={"stop": [" "]})
    assert response.status == response.output[0].status == "completed" and " " not in response.output_text


def test_stream(client, model):
    asked = {"model": model, "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1 and kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    last = events[-1].response
    assert last.output_text == whole.output_text == "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert last.usage.output_tokens == whole.usage.output_tokens and events[0].response.usage is None
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}


def test_the_stream_on_the_wire(server):
    with server.stream("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")[:-1]
    for event in events:
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_the_clients_own_stream(client, model):
    asked = {"model": model, "input": "Weather in Paris?", "tools": [TOOL], "tool_choice": NAMED, "temperature": 0}
    with client.responses.stream(**asked, max_output_tokens=60) as stream:
        final = list(stream)[-1].response
    assert final.output[0].name == "get_weather" and json.loads(final.output[0].arguments).keys() == {"city"}


def test_the_client_without_waiting(server, model):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model=model, input="Hi", max_output_tokens=2, stream=True)
            return [event.type async for event in stream]

    assert asyncio.run(ask())[-1] in ("response.completed", "response.incomplete")


def test_the_empty_probe_is_answered(server):
    for fields in ({"input": ""}, {"input": []}, {"instructions": "Answer."}):
        answer = server.post("/v1/responses", {**fields, "max_output_tokens": 1})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["status"] in ("completed", "incomplete") and body["output"] and body["usage"]["output_tokens"] == 1


def test_function_calls(client, model):
    asked = {"model": model, "tools": [TOOL], "temperature": 0, "parallel_tool_calls": False, "max_output_tokens": 60}
    question = {"role": "user", "content": "Weather in Paris?"}
    response = client.responses.create(**asked, input=[question], tool_choice="required")
    (call,) = response.output
    assert response.status == call.status == "completed" and call.type == "function_call" and call.id.startswith("fc_")
    assert call.name == "get_weather" and call.call_id.startswith("call_") and set(json.loads(call.arguments)) == {"city"}
    assert response.tools[0].name == "get_weather" and response.tool_choice == "required"
    events = list(client.responses.create(**asked, input=[question], tool_choice="required", stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 2 and "".join(deltas) == call.arguments
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments and done.name == "get_weather"
    assert kinds[-2:] == ["response.output_item.done", "response.completed"] and events[2].item.arguments == ""
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    followed = client.responses.create(**asked, input=[question, call.model_dump(), result])
    assert followed.output and followed.usage.input_tokens > response.usage.input_tokens


def test_a_conversation_becomes_the_chats(server):
    """Items that a model gave in a row are one turn, whatever their number; instructions and a developer's message are one too."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "22 degrees"},
    ]
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a look"}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "22 degrees"}]},
    ]
    count = server.post("/v1/responses/input_tokens", {"instructions": "Be kind.", "input": items}).json()
    assert count == {
        "object": "response.input_tokens",
        "input_tokens": server.post("/tokenize", {"messages": messages}).json()["count"],
    }


def test_tools_that_are_no_functions_are_ignored_and_said(server):
    """Codex sends its built-in tools to everybody."""
    tools = [{"type": "web_search"}, TOOL, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}]
    answer = server.post(
        "/v1/responses", {"input": "Hi", "tools": tools, "max_output_tokens": 1, "include": ["reasoning.encrypted_content"]}
    )
    assert answer.status_code == 200 and answer.headers["x-maga-ignored"] == "tools[0] (web_search), tools[2] (custom)"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["get_weather"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    body = {
        "input": "Hi",
        "tools": [TOOL, {**TOOL, "name": "other"}],
        "tool_choice": allowed,
        "temperature": 0,
        "max_output_tokens": 60,
    }
    assert server.post("/v1/responses", body).json()["output"][0]["name"] == "get_weather"


def test_structured_output(client, model):
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        large: bool

    response = client.responses.parse(model=model, input="A city?", text_format=City, temperature=0, max_output_tokens=80)
    assert isinstance(response.output_parsed, City) and response.text.format.type == "json_schema"
    any_object = client.responses.create(
        model=model,
        input="JSON?",
        text={"format": {"type": "json_object"}, "verbosity": "low"},
        temperature=0,
        max_output_tokens=80,
    )
    assert any_object.output_text.startswith("{")
    chosen = client.responses.create(model=model, input="Colour?", extra_body={"structured_outputs": {"choice": ["red", "blue"]}})
    assert chosen.output_text in ("red", "blue")


def test_log_probabilities(client, model):
    asked = {"model": model, "input": "Say hello.", "temperature": 0, "max_output_tokens": 4, "top_logprobs": 2}
    response = client.responses.create(**asked, include=["message.output_text.logprobs"])
    scores = response.output[0].content[0].logprobs
    messages = [{"role": "user", "content": "Say hello."}]
    chat = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert [(score.token, score.logprob) for score in scores] == [
        (score.token, score.logprob) for score in chat.choices[0].logprobs.content
    ]
    assert all(len(score.top_logprobs) == 2 for score in scores)
    streamed = client.responses.create(**asked, stream=True)
    deltas = [event for event in streamed if event.type == "response.output_text.delta"]
    assert [score.token for event in deltas for score in event.logprobs] == [score.token for score in scores]


def test_thoughts_are_items_of_their_own(tmp_path):
    folder = write_chain(tmp_path / "chain", ["Qab</think>cd", END])
    template = (
        "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
        "{{ reasoning_effort or '' }}Q"
    )
    with running_server(folder, CHAT_TEMPLATE=template, REASONING_PARSER="deepseek_r1") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        response = client.responses.create(model=model, input="a", temperature=0)
        thoughts, message = response.output
        assert thoughts.type == "reasoning" and thoughts.content[0].text == "ab" and message.content[0].text == "cd"
        assert response.output_text == "cd" and response.usage.output_tokens_details.reasoning_tokens >= 8
        with client.responses.stream(model=model, input="a", temperature=0) as stream:
            events = list(stream)
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "ab"
        assert [event.item.type for event in events if event.type == "response.output_item.done"] == ["reasoning", "message"]
        items = [
            {"role": "user", "content": "a"},
            *[item.model_dump() for item in response.output],
            {"role": "user", "content": "b"},
        ]
        body = {"input": items, "reasoning": {"effort": "low", "summary": "auto"}}
        counted = server.post("/v1/responses/input_tokens", body).json()["input_tokens"]
        assert counted == len("a(ab)cdblowQ")


BAD = [
    ({"input": None}, "input is missing"),
    ({"input": 5}, "input=5"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no response is stored"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
    ({"previous_response_id": "resp_1"}, "previous_response_id='resp_1': no response is stored here"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n=2"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "needs tools"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "stuff"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "only one"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"input": "word " * 3000}, "maximum context length"),
]


@pytest.mark.parametrize("fields, word", BAD, ids=lambda value: str(value)[:50])
def test_bad_fields_are_named(server, fields, word):
    answer = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_neutral_values_and_labels_ask_for_nothing(server):
    fields = {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None, "conversation": None}
    labels = {"service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "b", "max_tool_calls": 3, "user": "me"}
    answer = server.post("/responses", {"input": "Hi", "max_output_tokens": 1, **fields, **labels, "stream_options": None})
    assert answer.status_code == 200 and "x-maga-ignored" not in answer.headers and answer.json()["user"] == "me"
    assert server.post("/responses", {"input": 5}).json()["error"]["type"] == "invalid_request_error"


def test_an_error_in_a_stream_fails_the_response(tmp_path):
    folder = write_chain(tmp_path / "chain", ["Qab", END])
    with running_server(folder, CHAT_TEMPLATE="{{ messages[0].content }}", MAGA_FAULT="throw:forward:1") as server:
        with server.stream("/v1/responses", {"input": "Q", "stream": True}) as answer:
            last = answer.read().decode().split("\n\n")[-2].split("data: ")[1]
        failed = json.loads(last)
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["message"] and failed["response"]["error"]["code"]
