"""Thoughts apart from the answer, whole and letter by letter."""

import pytest
from maga_transformer.chat.harmony import HarmonyReader
from maga_transformer.chat.pieces import CallArguments, CallBegin, Reasoning, Text
from maga_transformer.chat.reasoning import BY_NAME, ReasoningReader
from maga_transformer.chat.tool_formats import BY_NAME as TOOLS
from maga_transformer.chat.tool_reader import ToolReader


def read(make, text):
    """(thought, answer, names of calls, arguments)"""
    results = []
    for size in (max(1, len(text)), 1, 4):
        reader, found = make(), []
        for at in range(0, len(text), size):
            found += reader.push(text[at : at + size])
        found += reader.finish()

        def all_of(kind, found=found):
            return "".join(piece.text for piece in found if isinstance(piece, kind))

        names = [piece.name for piece in found if isinstance(piece, CallBegin)]
        results.append((all_of(Reasoning), all_of(Text), names, all_of(CallArguments)))
    assert results[0] == results[1] == results[2]
    return results[0]


@pytest.mark.parametrize(
    "opened, text, thought, answer",
    [
        (False, "<think>\nHm, a < b.\n</think>\n\nYes.", "Hm, a < b.", "Yes."),
        (False, "Yes.", "", "Yes."),
        (False, "  Yes <think>", "", "  Yes <think>"),
        (False, "<thin", "", "<thin"),
        (False, "", "", ""),
        (True, "Hm.</think>Yes.", "Hm.", "Yes."),
        (True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (True, "Hm, cut of", "Hm, cut of", ""),
        (True, "Hm.</thi", "Hm.</thi", ""),
        (True, "</think>\n\nYes.", "", "Yes."),
    ],
)
def test_thoughts(opened, text, thought, answer):
    assert read(lambda: ReasoningReader(BY_NAME["think"], open=opened), text) == (thought, answer, [], "")


def test_a_call_behind_a_thought():
    def make():
        return ReasoningReader(BY_NAME["think"], ToolReader(TOOLS["hermes"], {"f": {}}), open=True)

    text = 'I call <tool_call> soon.</think>\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert read(make, text) == ("I call <tool_call> soon.", "", ["f"], '{"a": 1}')


@pytest.mark.parametrize(
    "prompt, opened",
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>old</think> <|im_start|>assistant\n", False),
    ],
)
def test_whether_a_prompt_opens_a_thought(prompt, opened):
    assert BY_NAME["think"].begins_open(prompt) == opened
    assert BY_NAME["deepseek_r1"].begins_open(prompt)


def test_harmony():
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert read(HarmonyReader, thought + "<|channel|>final<|message|>Yes.") == ("Hm.", "Yes.", [], "")
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert read(HarmonyReader, thought + call) == ("Hm.", "", ["f"], '{"a": 1}')
    assert read(HarmonyReader, "no markup") == ("", "no markup", [], "")
