"""Text of a sequence: whole characters, stop strings and stop words held back and cut, whatever the split into events."""

import itertools
from types import SimpleNamespace

import pytest
from maga_transformer.output import SequenceText
from maga_transformer.request import Sampling


class _ByteTokenizer:
    """One token a byte; 300 is special."""

    def decode(self, ids, skip_special_tokens=True, keep=frozenset()):
        return b"".join(self._bytes(token, skip_special_tokens) for token in ids).decode(errors="replace")

    def decode_stream(self, skip_special_tokens=True, keep=frozenset()):
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return SimpleNamespace(step=lambda token: decoder.decode(self._bytes(token, skip_special_tokens)) or None)

    @staticmethod
    def _bytes(token, skip):
        return (b"" if skip else b"<end>") if token == 300 else bytes([token])


def _event(tokens, finish="", **stops):
    return SimpleNamespace(tokens=list(tokens), finish=finish, **{"stop_token": -1, "stop_word": -1, "stop_string": -1, **stops})


def _pieces(tokens, sampling, finish="length", size=1, **stops):
    text = SequenceText(_ByteTokenizer(), sampling)
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    pieces = [text.push(_event(part)) for part in parts[:-1]]
    pieces.append(text.push(_event(parts[-1], finish, **stops)))
    assert "".join(pieces) == text.text
    return pieces, text


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_are_never_split(size):
    content = "ab😀cd한é"
    pieces, text = _pieces(content.encode(), Sampling(), size=size)
    assert text.text == content
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_ends_as_one_replacement():
    _, text = _pieces("ab😀".encode()[:4], Sampling())
    assert text.text == "ab\ufffd"


def test_bytes_that_are_no_text_are_replaced_and_letters_kept():
    pieces, text = _pieces(b"\xf0\x9fa\x80b\xed\xa0c\xffd", Sampling())
    assert text.text == "\ufffda\ufffdb\ufffd\ufffdc\ufffdd"
    assert len([piece for piece in pieces if piece]) > 1  # it streams


def test_a_stop_string_is_held_back_and_cut():
    pieces, text = _pieces(b"one DEFGHIJ", Sampling(stop_strings=["DEFGHIJ"]), finish="stop", stop_string=0)
    assert text.text == "one " and text.stop == "DEFGHIJ"
    assert "D" not in "".join(pieces)


def test_what_only_looked_like_a_stop_string_is_released():
    pieces, text = _pieces(b"one DEFGHIJK DEFG", Sampling(stop_strings=["DEFGHIJX"]))
    assert text.text == "one DEFGHIJK DEFG"
    assert pieces[-1].endswith("DEFG")


def test_the_earliest_of_several_stop_strings_counts():
    _, text = _pieces(b"xxabcd", Sampling(stop_strings=["cd", "abcd"]), finish="stop", size=6, stop_string=0)
    assert text.text == "xx" and text.stop == "abcd"


def test_only_the_match_in_the_last_tokens_counts():
    _, text = _pieces(b"END and END", Sampling(stop_strings=["END"], min_new_tokens=6), finish="stop", stop_string=0)
    assert text.text == "END and "


def test_a_stop_string_can_be_kept():
    _, text = _pieces(b"a\n\n\nb", Sampling(stop_strings=["\n\n"], keep_stop=True), finish="stop", size=5, stop_string=0)
    assert text.text == "a\n\n"


def test_a_stop_word_is_held_back_and_cut():
    sampling = Sampling(stop_words=[[100, 101, 102]])
    pieces, text = _pieces(b"xdydef", sampling, finish="stop", stop_word=0)
    assert text.text == "xdy" and text.tokens == list(b"xdydef")
    assert pieces == ["x", "", "dy", "", "", ""]


def test_a_stop_token_is_not_text():
    _, text = _pieces([97, 300], Sampling(skip_special_tokens=False), finish="stop", stop_token=300)
    assert text.text == "a" and text.stop is None
    _, text = _pieces([97, 98], Sampling(stop_token_ids=[98]), finish="stop", stop_token=98)
    assert text.text == "a" and text.stop == 98


@pytest.mark.parametrize("tokens", list(itertools.product(b"ab", repeat=5)))
def test_deltas_join_to_the_text_for_every_small_output(tokens):
    """Against a plain search, over all outputs of five letters and overlapping stop strings."""
    stops = ["aba", "bb"]
    sampling = Sampling(stop_strings=stops)
    content = bytes(tokens).decode()
    ends = [(content.index(stop) + len(stop), content.index(stop), index) for index, stop in enumerate(stops) if stop in content]
    if not ends:
        assert _pieces(tokens, sampling)[1].text == content
        return
    end, at, index = min(ends)
    assert _pieces(tokens[:end], sampling, finish="stop", stop_string=index)[1].text == content[:at]
