"""Stop tokens, words and strings, against a search of the whole output."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer import _core
from simulation import testing

BYTES = [bytes([i]) for i in range(256)]


def matches(tokens, vocabulary=BYTES, **fields):
    """What ended the output, and after how many tokens; None if nothing did."""
    matcher = testing.StopMatcher(_core.SamplingParams(**fields), vocabulary)
    for count, token in enumerate(tokens, 1):
        found = matcher.append(token)
        if max(found) >= 0:
            return count, *found
    return None


def test_stop_token():
    assert matches([5, 6, 7], stop_token_ids=[9, 6]) == (2, 6, -1, -1)


def test_stop_word_needs_all_its_tokens_in_order():
    assert matches([1, 2, 1, 3, 2, 3], stop_words=[[7], [1, 2, 3], [2, 3]]) == (6, -1, 2, -1)
    assert matches([1, 1, 2, 3], stop_words=[[1, 2, 3]]) == (4, -1, 0, -1)
    assert matches([2, 3], stop_words=[[1, 2, 3]]) is None


def test_stop_string_across_tokens_and_inside_one():
    vocabulary = [b"he", b"llo wor", b"ld", b"xENDy", b"", b"EN", b"D"]
    assert matches([0, 1, 2], vocabulary, stop_strings=[b"hello world"]) == (3, -1, -1, 0)
    assert matches([0, 1], vocabulary, stop_strings=[b"o w"]) == (2, -1, -1, 0)
    assert matches([3], vocabulary, stop_strings=[b"no", b"END"]) == (1, -1, -1, 1)
    assert matches([5, 4, 6], vocabulary, stop_strings=[b"END"]) == (3, -1, -1, 0)
    assert matches([5, 0, 6], vocabulary, stop_strings=[b"END"]) is None


def test_stop_string_whose_characters_are_split_over_tokens():
    text = "naïve 你好 🙂"
    tokens = list(text.encode())
    assert matches(tokens, stop_strings=["你好".encode()]) == (len("naïve 你好".encode()), -1, -1, 0)
    assert matches(tokens, stop_strings=["🙂".encode()]) == (len(tokens), -1, -1, 0)


def test_the_string_that_begins_first_wins():
    assert matches([0], [b"abcd"], stop_strings=[b"cd", b"bcd", b"b"]) == (1, -1, -1, 1)


def test_token_before_word_before_string():
    fields = {"stop_token_ids": [1], "stop_words": [[1]], "stop_strings": [b"\x01"]}
    assert matches([1], **fields) == (1, 1, -1, -1)
    del fields["stop_token_ids"]
    assert matches([1], **fields) == (1, -1, 0, -1)


def test_nothing_stops_before_min_new_tokens():
    for fields in ({"stop_token_ids": [1]}, {"stop_words": [[1]]}, {"stop_strings": [b"\x01"]}):
        assert matches([1, 1, 1, 1], min_new_tokens=3, **fields)[0] == 3
        assert matches([1, 0, 0, 0], min_new_tokens=3, **fields) is None


def test_tokens_beyond_the_vocabulary_have_no_bytes():
    assert matches([0, 300, 1], [b"a", b"b"], stop_strings=[b"ab"]) == (3, -1, -1, 0)


@settings(max_examples=300, deadline=None)
@given(
    vocabulary=st.lists(st.text("ab", max_size=3).map(str.encode), min_size=1, max_size=5),
    stops=st.lists(st.text("ab", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 4), max_size=30),
    minimum=st.integers(0, 5),
)
def test_stop_strings_against_a_search_of_everything(vocabulary, stops, picks, minimum):
    tokens = [pick % len(vocabulary) for pick in picks]

    def search():
        text = b""
        for count, token in enumerate(tokens, 1):
            before, text = len(text), text + vocabulary[token]
            found = []
            for i, stop in enumerate(stops):
                ends = [at for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > before]
                found += [(ends[0], i)] if ends else []
            if found and count >= minimum:
                return count, -1, -1, min(found)[1]
        return None

    assert matches(tokens, vocabulary, stop_strings=stops, min_new_tokens=minimum) == search()


def test_vocabulary_is_needed_only_for_strings():
    assert matches([3], [], stop_token_ids=[3]) == (1, 3, -1, -1)
    with pytest.raises(TypeError, match="no field 'stop_text'"):
        _core.SamplingParams(stop_text=["x"])
