"""Tokenizers of folders and of GGUF files against transformers, and streamed text against decoding at once."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.tokenizer import Tokenizer, load_tokenizer
from maga_transformer.tokenizer.bytelevel import LETTER_OF, bytes_of
from maga_transformer.tokenizer.pretokenizers import PRE_TOKENIZATIONS
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "",
    "Hello world",
    "  leading and trailing  ",
    "a\n\n b\t\tc   d\r\n",
    "1 2 3 4 5 6, 12345 and 3.14",
    "😀 한국 naïve café 🤷🏽‍♀️",
    "日本語、テスト。",
    "def f(x):\n    return x**2  # ok\n",
    "don't I'll WE'VE it's",
    "\u200b\ufeff e\u0301 \u00a0",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_end|><|endoftext|> y",
    "a" * 300,
    "{{ 7*7 }} {% raw %}",
]


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Tokenizer:
    return load_tokenizer(None, open_checkpoint(str(demo_gguf)))


def test_demo_encodes_as_transformers_does(demo: Tokenizer, demo_gguf: Path) -> None:
    expected = PreTrainedTokenizerFast.from_pretrained(str(demo_gguf.parent), gguf_file=demo_gguf.name)
    for text in TEXTS:
        ids = demo.encode(text)
        assert ids == expected(text)["input_ids"], text
        for skip in (True, False):
            assert demo.decode(ids, skip) == expected.decode(ids, skip_special_tokens=skip)


def test_demo_splits_digits_singly(demo: Tokenizer) -> None:
    """Which transformers' own GGUF reader does not do: the model's original tokenizer cuts before and after every digit."""
    spelled = [demo.token(token) for token in demo.encode("x  77 ½")]
    assert spelled == ["x", "ĠĠ", "7", "7", "Ġ", "Â½"]


def test_demo_facts(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_id, demo.eos_ids, demo.unk_id, demo.pad_id) == (49152, 1, {2}, 0, 2)
    assert demo.encode("😀") == [10813, 242, 218]
    assert demo.encode("four") == [13996] and demo.encode(" four") == [1876]
    assert demo.special_ids == set(range(17))
    assert demo.token_id("<|im_end|>") == 2 and demo.token(2) == "<|im_end|>" and demo.token(10**6) is None


def test_demo_folder_agrees(demo: Tokenizer, demo_folder: Path) -> None:
    folder = load_tokenizer(None, open_checkpoint(str(demo_folder)))
    expected = AutoTokenizer.from_pretrained(str(demo_folder))
    messages = [{"role": "user", "content": "Hi"}]
    for text in [*TEXTS, "x  77 ½"]:
        assert folder.encode(text) == expected(text)["input_ids"] == demo.encode(text)
    assert (folder.bos_id, folder.eos_ids, folder.unk_id, folder.pad_id) == (demo.bos_id, demo.eos_ids, demo.unk_id, demo.pad_id)
    assert folder.token_bytes() == demo.token_bytes()
    for generation in (True, False):
        rendered = expected.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        assert folder.apply_chat_template(messages, add_generation_prompt=generation) == rendered
        assert demo.apply_chat_template(messages, add_generation_prompt=generation) == rendered
    assert len(demo.encode(demo.apply_chat_template(messages), add_special_tokens=False)) == 31


def test_a_tokenizer_of_another_place(demo: Tokenizer, demo_gguf: Path, demo_folder: Path) -> None:
    checkpoint = open_checkpoint(str(demo_gguf))
    for path in (demo_folder, demo_folder / "tokenizer.json", demo_gguf):
        assert load_tokenizer(str(path), checkpoint).encode(TEXTS[5]) == demo.encode(TEXTS[5])
    with pytest.raises(FileNotFoundError, match="nowhere: no such"):
        load_tokenizer("nowhere", checkpoint)
    with pytest.raises(ValueError, match=r"config\.json: expected a folder with tokenizer\.json"):
        load_tokenizer(str(demo_folder / "config.json"), checkpoint)


def test_what_is_no_text_or_id(demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        demo.encode("a\ud800b")
    for token in (-1, 10**12):
        with pytest.raises(ValueError, match="token id is negative or beyond"):
            demo.decode([token])
    assert demo.decode([10**6]) == ""


def test_token_bytes_make_the_text(demo: Tokenizer) -> None:
    table = demo.token_bytes()
    assert len(table) == demo.vocab_size
    for text in TEXTS:
        assert b"".join(table[token] for token in demo.encode(text)) == text.encode()
    assert table[2] == b"<|im_end|>" and table[10813] == "😀".encode()[:2]


# --- GGUF vocabularies made here ---

LETTERS = list(LETTER_OF.values())


def bpe_metadata(pre: str | None, merges: list[str], specials: tuple[str, ...] = ("<s>", "</s>")) -> dict[str, Any]:
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in merges), *specials]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(specials)) + [3] * len(specials),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


def gguf_tokenizer(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_gguf(path, metadata, {}, architecture="other")
    return load_tokenizer(None, open_checkpoint(str(path)))


SAMPLE = "I'LL don't 12345 fooBar été  x\n\n  y!?\n"
PIECES = {
    "gpt-2": ["I", "'", "LL", " don", "'t", " 12345", " fooBar", " été", " ", " x", "\n\n ", " y", "!?", "\n"],
    "smollm": ["I", "'", "LL", " don", "'t", " ", "1", "2", "3", "4", "5", " fooBar", " été", " ", " x", "\n\n ", " y", "!?", "\n"],
    "llama-bpe": ["I", "'LL", " don", "'t", " ", "123", "45", " fooBar", " été", " ", " x", "\n\n", " ", " y", "!?\n"],
    "qwen2": ["I", "'LL", " don", "'t", " ", "1", "2", "3", "4", "5", " fooBar", " été", " ", " x", "\n\n", " ", " y", "!?\n"],
    "gpt-4o": ["I'LL", " don't", " ", "123", "45", " foo", "Bar", " été", " ", " x", "\n\n", " ", " y", "!?\n"],
    "tekken": ["I", "'LL", " don", "'t", " ", "1", "2", "3", "4", "5", " foo", "Bar", " été", " ", " x", "\n\n", " ", " y", "!?\n"],
    "default": ["I", "'", "LL", " don", "'", "t", " ", "123", "45", " fooBar", " été", " ", " x", "\n\n ", " y", "!?", "\n"],
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_each_pre_tokenizer(name: str) -> None:
    found = [piece for piece, _ in PRE_TOKENIZATIONS[name].build().pre_tokenize_str(SAMPLE)]
    assert [bytes_of(piece).decode() for piece in found] == PIECES[name]


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-4o", "tekken", "gpt-2"])
def test_byte_level_gguf_against_transformers(name: str, tmp_path: Path) -> None:
    merges = ["a b", "Ġ a", "Ġ Ġ", "1 2", "12 3", "Ċ Ċ", "' t", "l l", "! ?", "Ã ©"]
    specials = ("<|endoftext|>", "<s>", "</s>")  # that reader adds the first of them if it is not there
    metadata = {**bpe_metadata(name, merges, specials), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False}
    found = gguf_tokenizer(tmp_path / "bpe.gguf", metadata)
    expected = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file="bpe.gguf")
    for text in [*TEXTS, SAMPLE, "<s>ab</s>", "ab  ab123"]:
        if name != "qwen2" or text.isascii():  # the original composes characters first, that reader does not
            assert found.encode(text) == expected(text)["input_ids"], text
        assert found.encode(text, add_special_tokens=False) == found.encode(text)[1:]


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    found = gguf_tokenizer(tmp_path / "bpe.gguf", bpe_metadata("qwen2", ["a b"]))
    assert found.encode("e\u0301") == found.encode("é")


def test_llama3_takes_whole_words(tmp_path: Path) -> None:
    """A piece that is a token needs no merges to it; and this vocabulary begins with bos where the file is silent."""
    metadata = bpe_metadata("llama-bpe", ["a b", "c d", "ab cd"])
    metadata["tokenizer.ggml.merges"] = ["a b", "c d"]  # nothing leads to "abcd"
    tokens = metadata["tokenizer.ggml.tokens"]
    found = gguf_tokenizer(tmp_path / "whole.gguf", metadata)
    assert [tokens[token] for token in found.encode("abcd")] == ["<s>", "abcd"]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert [tokens[token] for token in gguf_tokenizer(tmp_path / "merged.gguf", metadata).encode("abcd")] == ["ab", "cd"]


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM += ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc", "abc", "é", "▁▁"]
SPM_SCORES = {"ab": -3.0, "▁a": -1.0, "▁ab": -4.0, "bc": -2.0, "abc": -5.0, "▁▁": -6.0}


def spm_metadata(**more: Any) -> dict[str, Any]:
    types = [2, 3, 3, *[6] * 256]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM,
        "tokenizer.ggml.scores": [SPM_SCORES.get(token, -100.0) for token in SPM],
        "tokenizer.ggml.token_type": types + [1] * (len(SPM) - len(types)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def test_sentencepiece_gguf_against_transformers(tmp_path: Path) -> None:
    found = gguf_tokenizer(tmp_path / "spm.gguf", spm_metadata())
    expected = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file="spm.gguf")
    for text in [*TEXTS, "abc abcab bca", " a", "a</s>b"]:
        ids = found.encode(text)
        assert ids == expected(text)["input_ids"], text
        assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert [SPM[token] for token in found.encode("abc")] == ["<s>", "▁a", "bc"]


def test_sentencepiece_flags(tmp_path: Path) -> None:
    metadata = spm_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    found = gguf_tokenizer(tmp_path / "spm.gguf", metadata)
    assert [SPM[token] for token in found.encode("ab")] == ["ab", "</s>"]
    assert found.decode(found.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, r"tokenizer\.ggml\.pre 'martian' is not supported .supported: .*llama-bpe"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, r"tokenizer\.ggml\.merges joins 'a nothing'"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is not a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 items"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, r"tokenizer\.ggml\.eos_token_id is 1000000"),
        ({"tokenizer.ggml.model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv' is not supported .supported: .*gpt2, llama"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"tokenizer.chat_template": "{% if %}"}, r"tokenizer\.chat_template: line 1 of the chat template"),
    ],
)
def test_metadata_that_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = {key: value for key, value in {**bpe_metadata("gpt-2", ["a b"]), **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=message) as error:
        gguf_tokenizer(tmp_path / "odd.gguf", metadata)
    assert "odd.gguf" in str(error.value)


def test_ids_of_roles_that_are_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = gguf_tokenizer(
            tmp_path / "bpe.gguf", {**bpe_metadata("gpt-2", ["a b"]), "tokenizer.ggml.padding_token_id": 2**32 - 1}
        )
    assert found.pad_id is None and "padding_token_id is 4294967295" in caplog.text


def test_no_pre_tokenizer_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = gguf_tokenizer(tmp_path / "old.gguf", bpe_metadata(None, ["a b"]))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert found.decode(found.encode("ab cd")) == "ab cd"


def test_end_of_turn_tokens_end_answers(tmp_path: Path) -> None:
    metadata = bpe_metadata("gpt-2", ["a b"], ("<|eot_id|>", "<|im_end|>", "<s>", "</s>"))
    template = "{{ messages[0].content }}<|im_end|>"
    found = gguf_tokenizer(tmp_path / "chat.gguf", {**metadata, "tokenizer.chat_template": template})
    assert found.eos_ids == {found.token_id("</s>"), found.token_id("<|im_end|>")}


# --- folders made here ---


def byte_level_folder(folder: Path, config: dict[str, Any], added: tuple[str, ...] = ("<s>", "</s>")) -> Tokenizer:
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_gguf(folder / "model.gguf", {}, {}, architecture="other")
    return load_tokenizer(str(folder), open_checkpoint(str(folder / "model.gguf")))


def test_folder_settings(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 7]}')
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True, "pad_token": None}
    found = byte_level_folder(tmp_path, config)
    assert (found.bos_id, found.eos_ids, found.pad_id) == (256, {257, 7}, None)
    assert found.encode("a") == [256, LETTERS.index("a"), 257]
    found = byte_level_folder(tmp_path, {**config, "add_bos_token": False, "add_eos_token": False})
    assert found.encode("a") == [LETTERS.index("a")]


def test_tokens_that_only_the_config_has(tmp_path: Path) -> None:
    """Plain added tokens get no blanks around them, and are text even where special tokens are left out."""
    entries = {str(258 + i): {"content": text, "special": False} for i, text in enumerate(("<think>", "</think>"))}
    found = byte_level_folder(tmp_path, {"added_tokens_decoder": entries})
    text = "<think>ok</think>1"
    ids = found.encode(text)
    assert ids[0] == 258 and len(ids) == 5
    for skip in (True, False):
        stream = found.decode_stream(skip)
        assert found.decode(ids, skip) == "".join(stream.step(token) or "" for token in ids) + stream.finish() == text


def test_added_tokens_out_of_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added token '<x>' is given the id 300, its place is 258"):
        byte_level_folder(tmp_path, {"added_tokens_decoder": {"300": {"content": "<x>", "special": True}}})


def test_damaged_folders(tmp_path: Path) -> None:
    byte_level_folder(tmp_path, {})
    for name, content in (("tokenizer_config.json", "["), ("generation_config.json", "[]"), ("tokenizer.json", "{}")):
        kept = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            load_tokenizer(str(tmp_path), open_checkpoint(str(tmp_path)))
        (tmp_path / name).write_text(kept)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: no SentencePiece model"):
        load_tokenizer(str(tmp_path), open_checkpoint(str(tmp_path)))


# --- streams ---


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    stream = tokenizer.decode_stream(skip)
    pieces = [stream.step(token) for token in ids]
    assert "" not in pieces
    return "".join(piece or "" for piece in pieces) + stream.finish()


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49_151), st.integers(0, 272)), max_size=12), skip=st.booleans())
def test_streamed_byte_level_text(demo: Tokenizer, ids: list[int], skip: bool) -> None:
    """Ids up to 272 are special tokens and single bytes: characters cut short, and bytes that are none."""
    assert streamed(demo, ids, skip) == demo.decode(ids, skip)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return gguf_tokenizer(tmp_path_factory.mktemp("spm") / "spm.gguf", spm_metadata())


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, len(SPM) - 1), max_size=12), skip=st.booleans())
def test_streamed_sentencepiece_text(sentencepiece: Tokenizer, ids: list[int], skip: bool) -> None:
    assert streamed(sentencepiece, ids, skip) == sentencepiece.decode(ids, skip)


def test_streamed_text_of_another_decoder() -> None:
    words = {word: index for index, word in enumerate(["[UNK]", "un", "##able", "to", "é"])}
    inner = HuggingFaceTokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([AddedToken("[SEP]", special=True)])
    from maga_transformer.tokenizer.tokenizer import SpecialTokens

    tokenizer = Tokenizer(inner, SpecialTokens())
    for ids in ([1, 2, 3, 4], [1, 5, 2], [4, 4, 1]):
        for skip in (True, False):
            assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


def test_no_piece_holds_half_a_character(demo: Tokenizer) -> None:
    stream = demo.decode_stream()
    assert [stream.step(token) for token in [10813, 242, 218]] == [None, None, "😀"]
    assert stream.step(10813) is None and stream.finish() == "\ufffd"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """One U+FFFD for each part that cannot begin a character; the letters between stay."""
    found = byte_level_folder(tmp_path, {})
    ids = [LETTERS.index(LETTER_OF[byte]) for byte in b"\xf0\x9fa\x80b\xed\xa0c\xffd"]
    assert found.decode(ids) == streamed(found, ids, True) == "\ufffda\ufffdb\ufffd\ufffdc\ufffdd"
