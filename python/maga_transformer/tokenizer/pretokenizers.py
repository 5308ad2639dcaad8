"""How text is cut before byte-level BPE, by the name that GGUF files give it (tokenizer.ggml.pre).

The patterns are part of each vocabulary: merges were learned inside these pieces.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _MARKS
_TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _MARKS
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# What llama.cpp does for files that do not name their pre-tokenizer.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenization:
    splits: tuple[str, ...] = ()  # patterns, applied one after another to the pieces of the one before
    digits: bool = False  # every digit is a piece of its own, then GPT-2's pattern
    whole_words: bool = False  # a piece that is itself a token is not built from merges
    normal_form: bool = False  # NFC first
    add_bos: bool = False  # where the file does not say

    def build(self) -> PreTokenizer:
        if self.digits:
            return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        if not self.splits:
            return ByteLevel(add_prefix_space=False)
        steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in self.splits]
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


_KINDS = {
    PreTokenization(): "gpt-2 gpt2 phi-2 mpt olmo roberta-bpe exaone4",
    PreTokenization(digits=True): "smollm starcoder refact command-r codeshell",
    PreTokenization(
        (_LLAMA3,), whole_words=True, add_bos=True
    ): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenization((_LLAMA3,)): "dbrx smaug-bpe",
    PreTokenization((_QWEN2,), normal_form=True): "qwen2 deepseek-r1-qwen megrez kormo",
    PreTokenization((_GPT4O,)): "gpt-4o llama4",
    PreTokenization((_TEKKEN,), whole_words=True): "tekken",
    PreTokenization(_DEFAULT): "default",
}
PRE_TOKENIZATIONS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
