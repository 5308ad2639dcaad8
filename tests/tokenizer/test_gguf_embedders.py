"""WordPiece and Unigram tokenizers from GGUF metadata, as llama.cpp's converter writes it, give the ids of transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from checkpoints import write_gguf
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.tokenizer import Tokenizer, load_tokenizer
from maga_transformer.tokenizer.sentencepiece import read_sentencepiece
from test_files import CORPUS, texts, train
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
HOSTILE = [
    "",
    " ",
    "\u2581a \u2581 b\u2581\u2581c",
    "\x00a\x07b\ufffdc\ufeffd",
    "a\u200bb\u00adc\u2028d\u3000e\tf\rg",
    "ÀÉîõü İıſß ＡＢＣ ŉ ǅ",
    "e\u0301 \u1100\u1161\u11a8 ﷺ ½ ℡",
    "👩‍👩‍👧‍👦🏳️‍🌈 𝔘𝔫𝔦 \U0010ffff",
    "x" * 101,
    "##ing ing## [UNK] [unused1] [PAD7]",
    "你好，世界。漢字かな 한국어",
    "مرحبا بالعالم שלום",
    "don't--stop... (a)[b]{c}<d>$e^f`g~h",
]
BERT_TOKENS = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]


def gguf_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    sizes = {"bert.block_count": 1, "bert.embedding_length": 1, "bert.attention.head_count": 1}
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    write_gguf(path, {**sizes, **keys}, {}, architecture="bert")
    return load_tokenizer(None, open_checkpoint(str(path)))


def same_ids(found: Tokenizer, expected: Any, specials: list[str]) -> None:
    with_specials = [f"a {token}b{token} {token} c" for token in specials]
    for text in [*texts(), *HOSTILE, *with_specials, " ".join(HOSTILE)]:
        assert found.encode(text) == expected(text)["input_ids"], text
        assert found.encode(text, add_special_tokens=False) == expected(text, add_special_tokens=False)["input_ids"], text
    for first, second in (("a b", "c d"), ("", "c")):
        ids, begin = found.encode_input(first, second)
        whole = expected(first, second, return_token_type_ids=True)
        kinds = whole["token_type_ids"]
        assert ids == whole["input_ids"] and begin == (kinds.index(1) if 1 in kinds else None)


@pytest.fixture(scope="module")
def words() -> dict[bool, list[str]]:
    """WordPiece vocabularies, by whether they tell capitals apart."""
    found = {}
    for cased in (False, True):
        trained = HuggingFaceTokenizer(models.WordPiece(unk_token="[UNK]"))
        trained.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trained.train_from_iterator(
            CORPUS, trainers.WordPieceTrainer(vocab_size=1500, special_tokens=BERT_TOKENS, show_progress=False)
        )
        found[cased] = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    return found


def phantom(token: str, kind: int) -> str:
    """As the converter spells tokens."""
    if kind == CONTROL:
        return token
    return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("cased", [False, True])
def test_word_piece(cased: bool, old: bool, words: dict[bool, list[str]], tmp_path: Path) -> None:
    """`old`: files from before the converter looked at the types of tokens; it left all in brackets as they were."""
    tokens = words[cased]
    types = [CONTROL if token in BERT_TOKENS and token != "[unused1]" else NORMAL for token in tokens]
    spelled = [
        token if old and token.startswith("[") and token.endswith("]") else phantom(token, kind)
        for token, kind in zip(tokens, types, strict=True)
    ]
    assert any(token.isascii() and token[-1:].isupper() for token in spelled) == cased
    ids = {"cls_token_id": 3, "seperator_token_id": 4, "unknown_token_id": 2, "padding_token_id": 0, "mask_token_id": 5}
    found = gguf_tokenizer(tmp_path / "m.gguf", {"model": "bert", "tokens": spelled, "token_type": types, **({} if old else ids)})
    expected = transformers.BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}, do_lower_case=not cased)
    same_ids(found, expected, ["[MASK]", "[SEP]", "[UNK]", "[unused1]"])
    text = "the tokenizer reads words"
    assert found.decode(found.encode(text)) == expected.decode(expected(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("roles", ["unmarked", "marked"])
def test_unigram(roles: str, tmp_path: Path) -> None:
    """`marked`: the mask is a control token, and flags are left to their defaults."""
    train(tmp_path / "m.model", model_type="unigram")
    pieces = read_sentencepiece(str(tmp_path / "m.model"))
    tokens, scores = [*ROBERTA_TOKENS, *pieces.tokens[3:], "<mask>"], [0.0] * 4 + pieces.scores[3:] + [0.0]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *pieces.types[3:], CONTROL if roles == "marked" else USER_DEFINED]
    ids = {"bos": 0, "eos": 2, "unknown": 3, "seperator": 2, "padding": 1, "cls": 0, "mask": len(tokens) - 1}
    metadata = {
        "model": "t5",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "precompiled_charsmap": pieces.charsmap,
        **{f"{role}_token_id": token for role, token in ids.items()},
    }
    flags = ("add_space_prefix", "remove_extra_whitespaces", "add_bos_token", "add_eos_token")
    found = gguf_tokenizer(tmp_path / "m.gguf", {**metadata, **({} if roles == "marked" else dict.fromkeys(flags, True))})
    expected = transformers.XLMRobertaTokenizer(
        vocab=list(zip(tokens, scores, strict=True)), _spm_precompiled_charsmap=pieces.charsmap
    )
    assert pieces.charsmap and found.encode("ﬁ") == found.encode("fi")
    same_ids(found, expected, ["<mask>", "</s>", "<unk>", "<pad>"])
    assert (found.bos_id, found.eos_ids, found.pad_id, found.unk_id) == (0, {2}, 1, 3)
    text = "the tokenizer reads words"
    assert found.decode(found.encode(text)) == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "bert", "tokens": ["\u2581a", "[UNK]"]}, r"tokenizer\.ggml\.cls_token_id is missing, and so is \[CLS\]"),
        ({"model": "t5", "tokens": ["a"], "unknown_token_id": 0}, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "t5", "tokens": ["a"], "scores": [0.0]}, r"tokenizer\.ggml\.unknown_token_id is missing"),
        (
            {"model": "t5", "tokens": ["a"], "scores": [0.0], "unknown_token_id": 0, "precompiled_charsmap": b"\xff"},
            r"tokenizer\.ggml\.precompiled_charsmap: ",
        ),
    ],
)
def test_metadata_that_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        gguf_tokenizer(tmp_path / "odd.gguf", metadata)
    assert "odd.gguf" in str(error.value)
