"""Tool calls of every family out of a text, whole and letter by letter."""

import json

import pytest
from maga_transformer.chat.dialect import find_dialect
from maga_transformer.chat.pieces import CallArguments, CallBegin, Text
from maga_transformer.chat.tool_formats import BY_NAME, FORMATS
from maga_transformer.chat.tool_reader import ToolReader

SCHEMAS = {"get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "stop": {}}


def read(text, name, most=None, pieces=None):
    """The text around the calls, and the calls; the same however the text is cut."""
    results = []
    for size in (len(text), 1, 3):
        reader = ToolReader(BY_NAME[name], SCHEMAS, most)
        found = []
        for at in range(0, len(text), max(1, size)):
            found += reader.push(text[at : at + max(1, size)])
        found += reader.finish()
        calls = []
        for piece in found:
            if isinstance(piece, CallBegin):
                assert piece.index == len(calls) and piece.id
                calls.append([piece.name, ""])
            elif isinstance(piece, CallArguments):
                calls[piece.index][1] += piece.text
        results.append(("".join(piece.text for piece in found if isinstance(piece, Text)), calls))
    assert results[0] == results[1] == results[2]
    return results[0]


HOW = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "stop", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "stop", "arguments": {}}]',
    "mistral_args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]stop[CALL_ID]abc[ARGS]{}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}<|action_end|>'
    '<|action_start|><|plugin|>\n{"name": "stop", "parameters": {}}<|action_end|>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "stop", "arguments": {}}]',
    "phi4_mini": 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "stop", "arguments": {}}]',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", "days": 3}}, '
    '{"tool_call_id": "1", "tool_name": "stop", "parameters": {}}]<|END_ACTION|>',
    "jamba": '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "stop"}]</tool_calls>',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
}


def test_every_format_is_tried():
    assert {BY_NAME[name].name for name in HOW} == {form.name for form in FORMATS}


@pytest.mark.parametrize("name", HOW)
def test_two_calls(name):
    text, calls = read(HOW[name], name)
    assert (text, [call for call, _ in calls]) == ("", ["get_weather", "stop"])
    assert [json.loads(arguments) for _, arguments in calls] == [{"city": "Paris", "days": 3}, {}]


@pytest.mark.parametrize("name", [name for name in HOW if BY_NAME[name].open])
def test_text_before_calls(name):
    text, calls = read("Let me look.\n" + HOW[name], name)
    assert (text, len(calls)) == ("Let me look.\n", 2)


@pytest.mark.parametrize("name", HOW)
def test_no_calls(name):
    for text in ("Hello <there>, 1 < 2 [and] {more}", "", "  spaced  ", "<", "<tool", "[TOOL_"):
        assert read(text, name) == (text, [])


def test_one_call_only():
    assert read(HOW["hermes"], "hermes", most=1) == ("", [["get_weather", '{"city": "Paris", "days": 3}']])


@pytest.mark.parametrize(
    "body, arguments",
    [
        ('{"name": "stop"}', "{}"),
        ('{"name": "stop", "arguments": null}', "{}"),
        ('{"arguments": {"a": 1} , "name": "stop"}', '{"a": 1}'),
        ('{"name": "stop", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "stop", "arguments": {"a": "}\\"{", "b": [{"c": 1}]} }', '{"a": "}\\"{", "b": [{"c": 1}]}'),
        ('{"id": {"name": "x"}, "name": "stop", "arguments": {"name": "y"}}', '{"name": "y"}'),
    ],
)
def test_shapes_of_json(body, arguments):
    assert read(f"<tool_call>{body}</tool_call>", "hermes") == ("", [["stop", arguments]])


def test_arguments_come_as_they_are_written():
    reader = ToolReader(BY_NAME["hermes"], SCHEMAS)
    reader.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa')
    assert reader.push("ris") == [CallArguments(0, "ris")]


def test_what_is_no_call_stays_text():
    assert read('<tool_call>{"weather": 1}</tool_call> more', "hermes")[0].startswith('<tool_call>{"weather": 1}')
    assert read("<tool_call>nonsense", "hermes") == ("<tool_call>nonsense", [])
    assert read('{"answer": 42}', "llama3_json") == ('{"answer": 42}', [])
    assert read('{"name": "unknown", "parameters": {}}', "llama3_json")[1] == []


def test_an_answer_that_ends_inside_a_call():
    assert read('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', "hermes") == ("", [["get_weather", '{"city": "Pa']])
    assert read('<tool_call>{"name": "get_wea', "hermes") == ('<tool_call>{"name": "get_wea', [])


@pytest.mark.parametrize(
    "template, tools, reasoning",
    [
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", "think"),
        ("{% if tools %}<tool_call><function={% endif %}", "qwen3_xml", None),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}[/THINK]", "mistral", "mistral"),
        ("{% if tools %}<｜tool▁calls▁begin｜>{% endif %}", "deepseek", None),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json", None),
        ("{% for message in messages %}{% endfor %}", "hermes", None),
    ],
)
def test_the_template_tells_the_format(template, tools, reasoning):
    dialect = find_dialect([template])
    assert dialect.tools.name == tools and (dialect.reasoning.name if dialect.reasoning else None) == reasoning
    assert dialect.template_knows_tools == ("tools" in template)


def test_a_flag_overrides_the_template():
    dialect = find_dialect(["{% if tools %}<tool_call>{% endif %}</think>"], "llama3_json", "none")
    assert dialect.tools.name == "llama3_json" and dialect.reasoning is None
    with pytest.raises(ValueError, match="tool_call_parser=nope"):
        find_dialect([], "nope")
