"""Tokenizers from GGUF metadata, rebuilt so that they encode as the original did: byte-level BPE and SentencePiece BPE; of models
that embed, WordPiece and SentencePiece Unigram too."""

import logging
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from maga_transformer.tokenizer.bytelevel import in_alphabet, spelled
from maga_transformer.tokenizer.pretokenizers import PRE_TOKENIZATIONS
from maga_transformer.tokenizer.sentencepiece import BLANK, BYTE, CONTROL, UNKNOWN, USER_DEFINED, merges_from_scores

log = logging.getLogger(__name__)


class GgufVocabulary:
    """The tokenizer.* keys of a file, checked."""

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.model = metadata.get("tokenizer.ggml.model")
        self.tokens = self._list("tokens", str)
        if not self.tokens:
            raise ValueError(
                f"{path}: tokenizer.ggml.tokens is missing: the file brings no tokenizer, give its folder or tokenizer.json"
            )
        self.types = self.numbers("token_type") or [1] * len(self.tokens)
        self.scores = self._list("scores", float)
        self.merges = self._list("merges", str)
        for key, values in (("token_type", self.types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise ValueError(f"{path}: tokenizer.ggml.{key} has {len(values)} items, tokenizer.ggml.tokens {len(self.tokens)}")

    def numbers(self, key: str) -> list[int]:
        return self._list(key, int)

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{key}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"{self.path}: tokenizer.ggml.{key} is not a list of {kind.__name__} values")
        return values

    def id_of(self, role: str) -> int | None:
        """`role`: bos, eos, eot, eom, unknown, padding."""
        value = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if value is None:
            return None
        if isinstance(value, int) and 0 <= value < len(self.tokens):
            return value
        message = f"{self.path}: tokenizer.ggml.{role}_token_id is {value!r}, the vocabulary has {len(self.tokens)} tokens"
        if role == "eos":  # without it answers would not end; files that have no use for another role write -1 or the like
            raise ValueError(message)
        log.warning("%s; it is ignored", message)
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: tokenizer.ggml.{key} is {value!r}, expected true or false")
        return value


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    v = vocabulary
    encoder = v.metadata.get("general.architecture") == "bert"  # its texts have tokens around them, as pairs of them do
    add_bos = add_eos = encoder
    if v.model == "bert":
        return _word_piece(v)
    if v.model == "gpt2":
        tokenizer, family_adds_bos = _byte_level(v)
        add_bos |= family_adds_bos
    elif v.model == "llama":
        tokenizer, add_bos = _sentencepiece(v), True
    elif v.model == "t5":
        tokenizer, add_eos = _unigram(v), True
    else:
        raise ValueError(f"{v.path}: tokenizer.ggml.model {v.model!r} is not supported (supported: bert, gpt2, llama, t5)")
    mask = v.id_of("mask") if encoder else None
    if mask is not None:  # RoBERTa's and XLM-R's takes the blanks before it
        tokenizer.add_special_tokens([AddedToken(v.tokens[mask], normalized=False, special=True, lstrip=True)])
    _add_tokens(tokenizer, v, v.tokens)
    bos = v.id_of("bos") if v.flag("add_bos_token", add_bos) else None
    eos = v.id_of("eos") if v.flag("add_eos_token", add_eos) else None
    surround(tokenizer, bos, eos, pairs=encoder)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, v: GgufVocabulary, texts: list[str]) -> None:
    special = [token for token, kind in zip(texts, v.types, strict=True) if kind in (CONTROL, UNKNOWN) and token]
    plain = [token for token, kind in zip(texts, v.types, strict=True) if kind == USER_DEFINED and token]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def surround(tokenizer: Tokenizer, bos: int | None, eos: int | None, *, pairs: bool = False) -> None:
    """From now on every text that is encoded with special tokens begins with `bos` and ends with `eos`; with `pairs`, two texts
    have two `eos` between them, as RoBERTa has it."""
    used = [(name, token) for name, token in (("<bos>", bos), ("<eos>", eos)) if token is not None]
    begin, end = ["<bos>"] * (bos is not None), ["<eos>"] * (eos is not None)
    single = " ".join([*begin, "$A", *end])
    pair = {"pair": " ".join([*begin, "$A", *end, *end, "$B", *end])} if pairs else {}
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=used, **pair)


def _word_piece(v: GgufVocabulary) -> Tokenizer:
    """BERT's, whose files do not say whether it tells capitals apart: a vocabulary without any does not."""
    words = [_unmarked(token, kind) for token, kind in zip(v.tokens, v.types, strict=True)]
    vocab = {word: index for index, word in enumerate(words)}
    roles = {}
    for text, names in _BERT_ROLES.items():
        index = next((index for name in names if (index := v.id_of(name)) is not None), vocab.get(text))
        if index is None:
            raise ValueError(f"{v.path}: tokenizer.ggml.{names[0]}_token_id is missing, and so is {text} among the tokens")
        roles[text] = index
    ordinary = (word for word in words if not _in_brackets(word))
    cased = any("A" <= letter <= "Z" for word in ordinary for letter in word)
    tokenizer = Tokenizer(WordPiece(vocab, unk_token=words[roles["[UNK]"]], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    tokenizer.add_special_tokens([AddedToken(words[index], normalized=False, special=True) for index in roles.values()])
    _add_tokens(tokenizer, v, words)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(text, roles[text]) for text in ("[CLS]", "[SEP]")],
    )
    return tokenizer


# Names of a role in the metadata, llama.cpp's spelling included.
_BERT_ROLES = {"[CLS]": ("cls", "bos"), "[SEP]": ("seperator", "eos"), "[UNK]": ("unknown",)}


def _unmarked(token: str, kind: int) -> str:
    """The converter marks where words begin, BERT what continues them. Special tokens, in older files all in brackets, have no
    mark."""
    if kind == CONTROL or _in_brackets(token):
        return token
    if token.startswith(BLANK) and token != BLANK:
        return token.removeprefix(BLANK)
    return f"##{token}"


def _in_brackets(token: str) -> bool:
    return len(token) > 2 and token.startswith("[") and token.endswith("]")


def _unigram(v: GgufVocabulary) -> Tokenizer:
    """XLM-R's, as the tokenizer.json of its family has it."""
    unknown = v.id_of("unknown")
    if not v.scores or unknown is None:
        raise ValueError(f"{v.path}: tokenizer.ggml.{'unknown_token_id' if v.scores else 'scores'} is missing")
    tokenizer = Tokenizer(Unigram(list(zip(v.tokens, v.scores, strict=True)), unknown, BYTE in v.types))
    charsmap = bytes(number & 255 for number in v.numbers("precompiled_charsmap"))
    if charsmap:
        try:
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{v.path}: tokenizer.ggml.precompiled_charsmap: {error}") from None
    prefix = "always" if v.flag("add_space_prefix", True) else "never"
    marks = pre_tokenizers.Metaspace(BLANK, prefix)
    one_blank = v.flag("remove_extra_whitespaces", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks]) if one_blank else marks
    tokenizer.decoder = decoders.Metaspace(BLANK, prefix)
    return tokenizer


def _byte_level(v: GgufVocabulary) -> tuple[Tokenizer, bool]:
    if not v.merges:
        raise ValueError(f"{v.path}: tokenizer.ggml.merges is missing")
    name = v.metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("%s: tokenizer.ggml.pre is missing; text is split by the default rules, which may not be the model's", v.path)
        name = "default"
    if name not in PRE_TOKENIZATIONS:
        raise ValueError(
            f"{v.path}: tokenizer.ggml.pre {name!r} is not supported (supported: {', '.join(sorted(PRE_TOKENIZATIONS))})"
        )
    kind = PRE_TOKENIZATIONS[name]
    vocab = {_spelled(token, token_type): index for index, (token, token_type) in enumerate(zip(v.tokens, v.types, strict=True))}
    merges = []
    for merge in v.merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"{v.path}: tokenizer.ggml.merges joins {merge!r}, which is not in the vocabulary")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words))
    if kind.normal_form:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _spelled(token: str, token_type: int) -> str:
    """Ordinary tokens are written in the byte alphabet; some converters left raw text."""
    if token_type in (CONTROL, USER_DEFINED) or in_alphabet(token):
        return token
    return spelled(token.encode("utf-8"))


def _sentencepiece(v: GgufVocabulary) -> Tokenizer:
    if not v.scores:
        raise ValueError(f"{v.path}: tokenizer.ggml.scores is missing")
    vocab = {token: index for index, token in enumerate(v.tokens)}
    unknown = v.id_of("unknown")
    prefix = v.flag("add_space_prefix", True)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges_from_scores(v.tokens, v.scores, v.types, vocab),
            unk_token=None if unknown is None else v.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first" if prefix else "never", split=False)
    steps: list[decoders.Decoder] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
