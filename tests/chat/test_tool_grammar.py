"""Answers that must be tool calls: whatever the grammar of a format lets through is read as calls of the offered tools."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from maga_transformer.chat.tool_formats import FORMATS
from maga_transformer.chat.tool_grammar import tool_grammar
from maga_transformer.request import RequestError
from test_tool_reader import read

SCHEMAS = {
    "get_weather": {
        "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
    },
    "stop": {"properties": {}},
}


class Letters:
    """A vocabulary of bytes, and 256 to end."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(TokenizerWrapper(Letters()))


def an_answer(grammar, vocabulary, seed):
    """One that the grammar lets through, each letter drawn at random; it ends as soon as a coin says so."""
    draw, matcher, text = random.Random(seed), LLMatcher(vocabulary, grammar, log_level=0), bytearray()
    while not matcher.is_stopped():
        row = np.zeros(9, np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        ends = 256 in allowed and (len(allowed) == 1 or draw.random() < 0.3)
        token = 256 if ends else draw.choice([token for token in allowed if token < 256])
        assert matcher.consume_token(token), matcher.get_error()
        if not ends:
            text.append(token)
    return text.decode()


@pytest.mark.parametrize("form", [form for form in FORMATS if form.read is None], ids=lambda form: form.name)
@pytest.mark.parametrize("several", [False, True], ids=["one call", "calls"])
def test_what_is_let_through_is_read(form, several, vocabulary):
    grammar = tool_grammar(form, SCHEMAS, several=several, field="tool_choice").text
    most = 0
    for seed in range(12):
        answer = an_answer(grammar, vocabulary, seed)
        text, calls = read(answer, form.name)
        assert text == "" and calls, answer
        for name, arguments in calls:
            assert set(json.loads(arguments)) == ({"city", "days"} if name == "get_weather" else set())
        most = max(most, len(calls))
    assert (most > 1) == several


def test_markup_that_no_grammar_describes():
    form = next(form for form in FORMATS if form.read is not None)
    with pytest.raises(
        RequestError, match=rf"tool_choice: this model's way to write tool calls \({form.name}\) cannot be enforced"
    ):
        tool_grammar(form, SCHEMAS, several=True, field="tool_choice")
