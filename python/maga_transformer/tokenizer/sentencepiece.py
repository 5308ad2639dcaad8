"""SentencePiece models (https://github.com/google/sentencepiece): the file's pieces and rules as a tokenizer of the `tokenizers`
library, BPE and Unigram."""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

BLANK = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2


@dataclass
class SentencePieceModel:
    """sentencepiece_model.proto, as far as encoding needs it."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    charsmap: bytes = b""
    prefix: bool = True
    one_blank: bool = True  # runs of blanks become one, those at the ends none

    def role(self, role: str) -> str | None:
        token = self.ids[role]
        return self.tokens[token] if 0 <= token < len(self.tokens) else None


def read_sentencepiece(path: str) -> SentencePieceModel:
    model = SentencePieceModel()
    with open(path, "rb") as file:
        data = file.read()
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                model.tokens.append(_bytes(piece.get(1)).decode("utf-8"))
                model.scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                model.types.append(_whole(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
                model.kind = _whole(trainer.get(3, _UNIGRAM))
                model.byte_fallback = bool(trainer.get(35, False))
                for place, role in enumerate(("unk", "bos", "eos", "pad")):
                    model.ids[role] = _whole(trainer.get(40 + place, model.ids[role]))
            elif number == 3 and isinstance(value, bytes):
                rules = dict(_fields(value))
                model.charsmap = _bytes(rules.get(2, b""))
                model.prefix, model.one_blank = bool(rules.get(3, True)), bool(rules.get(4, True))
    except (ValueError, IndexError, struct.error):
        raise ValueError(f"{path}: no SentencePiece model") from None
    if not model.tokens:
        raise ValueError(f"{path}: a SentencePiece model without pieces")
    if model.kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"{path}: a SentencePiece model of kind {model.kind}, expected BPE or Unigram")
    return model


def sentencepiece_tokenizer(model: SentencePieceModel) -> Tokenizer:
    """A text is encoded as the library itself would, and so is each part between two control tokens."""
    symbols = [token for token, kind in zip(model.tokens, model.types, strict=True) if kind == USER_DEFINED and token]
    if model.kind == _BPE:
        vocab = {token: index for index, token in enumerate(model.tokens)}
        merges = merges_from_scores(model.tokens, model.scores, model.types, vocab)
        unknown = model.role("unk")
        bpe = BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        bpe.ignore_merges = bool(symbols)  # what is a piece as a whole stays whole
        tokenizer = Tokenizer(bpe)
    else:
        pieces = list(zip(model.tokens, model.scores, strict=True))
        tokenizer = Tokenizer(Unigram(pieces, model.ids["unk"], model.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        mapped = normalizers.Precompiled(model.charsmap)
        if mapped.normalize_str("\r") == " ":
            steps.append(normalizers.Replace("\r", " "))  # `tokenizers` looks up "\r\n" as one character
        steps.append(mapped)
    if model.one_blank:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.prefix:
        steps.append(normalizers.Prepend(BLANK))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    ends: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if model.prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    if symbols:  # cut out of the text as it is by then: no blank comes behind them, as one does behind control tokens
        longest_first = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(longest_first), "isolated")
    control = [token for token, kind in zip(model.tokens, model.types, strict=True) if kind in (CONTROL, UNKNOWN) and token]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; so every split of a token into two tokens is a merge, best first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            continue
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(vocab[left], vocab[right], left, right) for left, right in splits if left in vocab and right in vocab]
        ranked.extend((-score, left_id, right_id, left, right) for left_id, right_id, left, right in known)
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer (https://protobuf.dev/programming-guides/encoding)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(data, at)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"wire type {key & 7}")
        if at + size > len(data):
            raise ValueError("the message ends too soon")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return (value - (1 << 64) if value >> 63 else value), at  # negative numbers take 64 bits
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field of another type")
    return value


def _whole(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field of another type")
    return value
