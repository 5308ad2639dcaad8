"""Tokenizers of folders without tokenizer.json against the libraries that their models' own code uses."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from maga_transformer.checkpoint import DummyCheckpoint
from maga_transformer.tokenizer import Tokenizer, load_tokenizer
from maga_transformer.tokenizer.bytelevel import LETTER_OF, bytes_of
from test_tokenizer import TEXTS
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast

CORPUS = [
    line for file in sorted(Path(__file__).parents[1].rglob("*.py")) for line in file.read_text().splitlines() if line.strip()
]
CORPUS += ["你好，世界。今天天气很好", "我们今天去北京", "naïve café, été", "한국어 텍스트", "a  b   c"] * 20
SPECIALS = ("<|", "<s>", "</s>", "<unk>", "MASK]", "sop")  # texts that hold special tokens are compared elsewhere


def texts() -> list[str]:
    own, lines = (
        [text for text in all_of_them if not any(special in text for special in SPECIALS)] for all_of_them in (TEXTS, CORPUS)
    )
    lines = random.Random(0).sample(lines, 150)
    return [
        *own,
        *lines,
        " ".join(lines[:20]),
        "\n\n".join(lines[20:40]),
        "  two blanks",
        "end  ",
        " a \n b  \n\n c ",
        "ＦＵＬＬ ｗｉｄｔｈ ﬁ ½",
    ]


def load(folder: Path, config: dict[str, Any] | None = None, **files: dict[str, Any]) -> Tokenizer:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5000, **(config or {})}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    checkpoint = DummyCheckpoint(str(folder))
    return load_tokenizer(str(folder), checkpoint)


# --- tiktoken ---


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    trained = HuggingFaceTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=list(LETTER_OF.values()), show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    return {bytes_of(token): rank for token, rank in trained.get_vocab().items()}


def write_ranks(file: Path, ranks: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
    file.write_text("\n".join(lines) + "\n")


_END = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_PATTERN = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _END % r"\p{N}"
GLM4_PATTERN = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + _END % r"\p{N}{1,3}"


def test_qwen(ranks: dict[bytes, int], tmp_path: Path) -> None:
    write_ranks(tmp_path / "qwen.tiktoken", ranks)
    found = load(tmp_path, {"model_type": "qwen"})
    special = {text: len(ranks) + i for i, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"))}
    expected = tiktoken.Encoding("qwen", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    for text in [*texts(), "a<|im_end|>b<|extra_0|>"]:
        if "\u0301" not in text:  # composed first
            ids = found.encode(text)
            assert ids == expected.encode(text, allowed_special="all"), text
            assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    assert found.encode("e\u0301") == expected.encode("é")
    assert found.eos_ids == {special["<|endoftext|>"], special["<|im_end|>"]} and found.pad_id == special["<|endoftext|>"]
    prompt = found.apply_chat_template([{"role": "user", "content": "Hi"}])
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert prompt == f"{head}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_ranks_named_tokenizer_model(ranks: dict[bytes, int], tmp_path: Path) -> None:
    """GLM-4, whose special tokens stand in tokenizer_config.json."""
    write_ranks(tmp_path / "tokenizer.model", ranks)
    added = {
        str(len(ranks) + i): {"content": text, "special": True} for i, text in enumerate(("<|endoftext|>", "[gMASK]", "<sop>"))
    }
    found = load(tmp_path, tokenizer_config={"added_tokens_decoder": added, "eos_token": "<|endoftext|>"})
    expected = tiktoken.Encoding("glm4", pat_str=GLM4_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in texts():
        assert found.encode(text) == expected.encode(text, disallowed_special=()), text
    assert found.encode("[gMASK]<sop>") == [len(ranks) + 1, len(ranks) + 2] and found.eos_ids == {len(ranks)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"YQ== 0\nnot base64! 1\n", r"qwen\.tiktoken: line 2 is not a token in base64"),
        (b"YQ== 0\nYg==\n", r"qwen\.tiktoken: line 2 is not a token in base64"),
        (b"YQ== 0\nYg== 7\n", r"qwen\.tiktoken: the 2 ranks are not the numbers from 0 on"),
    ],
)
def test_broken_ranks(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


# --- SentencePiece ---

SETTINGS = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "bpe-no-bytes": {"model_type": "bpe"},
    "bpe-no-prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram-no-bytes": {"model_type": "unigram", "normalization_rule_name": "nfkc", "remove_extra_whitespaces": False},
}


def train(file: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    common = {"vocab_size": 1200, "minloglevel": 2, "num_threads": 1, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **{**common, **settings})
    file.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("case", SETTINGS)
def test_sentencepiece(case: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "tokenizer.model", **SETTINGS[case])
    found = load(tmp_path, tokenizer_config={"add_bos_token": False})
    assert (found.bos_id, found.eos_ids, found.unk_id) == (1, {2}, 0)
    for text in texts():
        ids = found.encode(text)
        assert_as(expected, ids, text, ties=case.startswith("unigram"))
        if 0 not in ids:  # the library writes ⁇ for unknown pieces
            assert found.decode(ids) == expected.decode(ids), text
    assert load(tmp_path, tokenizer_config={}).encode("a") == [1, *expected.encode("a")]


def test_chatglm(tmp_path: Path) -> None:
    expected = train(tmp_path / "tokenizer.model", model_type="bpe", byte_fallback=True, normalization_rule_name="identity")
    size = expected.vocab_size()
    found = load(tmp_path, {"model_type": "chatglm"})
    assert found.encode("hello there") == [size + 1, size + 3, *expected.encode("hello there")]
    assert found.eos_ids == {2, size + 6, size + 8}  # the user's turn and an observation end an answer
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "So?"}]
    third = found.encode(found.apply_chat_template(conversation), add_special_tokens=False)
    ids = [size + 1, size + 3]
    for role, content in ((6, "Hi"), (7, "Yes"), (6, "So?")):
        ids += [size + role, *expected.encode("\n"), *expected.encode(content)]
    assert third == [*ids, size + 7]
    second = load(tmp_path, {"model_type": "chatglm", "_name_or_path": "THUDM/chatglm2-6b"})
    text = "[gMASK]sop[Round 1]\n\n问：Hi\n\n答：Yes\n\n[Round 2]\n\n问：So?\n\n答："
    assert second.apply_chat_template(conversation) == text


def assert_as(expected: sentencepiece.SentencePieceProcessor, got: list[int], text: str, *, ties: bool) -> None:
    """The same pieces; with `ties` (of Unigram) others of the same total score too: the rounding of sums decides between those."""
    want = expected.encode(text)
    if not ties:
        assert got == want, text
    elif got != want:
        assert expected.decode(got) == expected.decode(want), text
        scores = [sum(expected.get_score(piece) for piece in pieces) for pieces in (got, want)]
        assert scores[0] == pytest.approx(scores[1], rel=0, abs=1e-6), text


def spelled(text: str) -> str:
    """As ChatGLM-6B's own code writes newlines, tabs and runs of blanks before its SentencePiece model sees them."""
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    for count in range(80, 1, -1):
        text = text.replace(" " * count, f"<|blank_{count}|>")
    return text


@pytest.mark.parametrize("images", [0, 50])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_first_chatglm(kind: str, images: int, tmp_path: Path) -> None:
    symbols = ["<n>", "<|tab|>", *(f"<|blank_{count}|>" for count in range(2, 81))]
    control = ["<pad>", "[MASK]", "[gMASK]", "<sop>", "<eop>"]
    rules = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    expected = train(tmp_path / "ice_text.model", model_type=kind, user_defined_symbols=symbols, control_symbols=control, **rules)
    found = load(tmp_path, {"model_type": "chatglm"}, tokenizer_config={"num_image_tokens": images})
    ids = {token: expected.piece_to_id(token) + images for token in control}
    end = [ids["[gMASK]"], ids["<sop>"]]
    for text in [*texts(), "a\n\tb  c" + " " * 200 + "d\n", "\n", "  ", "x<n>y", "<image_3>"]:
        own = found.encode(text)
        assert own[-2:] == end
        assert_as(expected, [token - images for token in own[:-2]], spelled(text), ties=kind == "unigram")
        told_apart = "<n>" not in text and "▁" not in text  # from a new line, from a blank
        if 0 not in expected.encode(spelled(text)) and told_apart:
            assert found.decode(own) == text
        stream = found.decode_stream()
        assert "".join(piece for token in own if (piece := stream.step(token))) + stream.finish() == found.decode(own)
    before, behind = ([token + images for token in expected.encode(text)] for text in ("a", "b"))
    assert found.encode("a[MASK]b") == [*before, ids["[MASK]"], *behind, *end]
    assert (found.bos_id, found.eos_ids, found.pad_id) == (ids["<sop>"], {ids["<eop>"]}, ids["<pad>"])
    assert found.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi[gMASK]<sop>"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "So?"}]
    text = "[Round 0]\n问：Hi\n答：Yes\n[Round 1]\n问：So?\n答："
    assert found.apply_chat_template(chat) == text + "[gMASK]<sop>"
    assert found.encode(found.apply_chat_template(chat), add_special_tokens=False) == found.encode(text)


def test_images_of_the_first_release(tmp_path: Path) -> None:
    train(tmp_path / "ice_text.model", model_type="bpe")
    assert min(load(tmp_path, {"model_type": "chatglm", "vocab_size": 150528}).encode("ab")) > 20000
    assert min(load(tmp_path, {"model_type": "chatglm", "vocab_size": 130528}).encode("ab")) < 1500
    with pytest.raises(ValueError, match=r"ice_text\.model: num_image_tokens in tokenizer_config\.json is -1"):
        load(tmp_path, {"model_type": "chatglm"}, tokenizer_config={"num_image_tokens": -1})


def test_internlm(tmp_path: Path) -> None:
    symbols = ["<eoh>", "<eoa>", "<|User|>", "<|Bot|>"]
    expected = train(tmp_path / "tokenizer.model", model_type="bpe", byte_fallback=True, user_defined_symbols=symbols)
    found = load(tmp_path, {"model_type": "internlm"})
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "So?"}]
    text = "<s><|User|>:Hi<eoh>\n<|Bot|>:Yes<eoa>\n<|User|>:So?<eoh>\n<|Bot|>:"
    assert found.apply_chat_template(chat) == text
    assert found.encode(text, add_special_tokens=False) == [1, *expected.encode(text.removeprefix("<s>"))]
    assert expected.piece_to_id("<|Bot|>") in expected.encode(text)
    assert found.eos_ids == {2, expected.piece_to_id("<eoa>")}


def test_baichuan(tmp_path: Path) -> None:
    symbols = ["<reserved_106>", "<reserved_107>"]
    expected = train(tmp_path / "tokenizer.model", model_type="bpe", byte_fallback=True, control_symbols=symbols)
    generation = {
        f"{role}_token_id": expected.piece_to_id(symbol) for role, symbol in zip(("user", "assistant"), symbols, strict=True)
    }
    found = load(tmp_path, {"model_type": "baichuan"}, generation_config=generation, tokenizer_config={"add_bos_token": False})
    prompt = found.apply_chat_template([{"role": "user", "content": "Hello"}])
    user, assistant = generation.values()
    assert found.encode(prompt) == [user, *expected.encode("Hello"), assistant]
    base = load(tmp_path, {"model_type": "baichuan"}, generation_config={})
    assert base.chat_template is None


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"\x0a\x03abc", b"\x0b", b"\xff" * 20, b"\x0a\x02\x08\x01", b"plain text"])
def test_broken_sentencepiece(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.model: (no|a) SentencePiece model"):
        load(tmp_path)


# --- vocab.json and merges.txt ---


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocab_and_merges(kind: str, ranks: dict[bytes, int], tmp_path: Path) -> None:
    trained = HuggingFaceTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=list(LETTER_OF.values()), special_tokens=["</s>"], show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    trained.model.save(str(tmp_path))
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "bos_token": "</s>"}
    found = load(tmp_path, tokenizer_config={**settings, "added_tokens_decoder": {"0": {"content": "</s>", "special": True}}})
    plain = GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in texts():
        assert found.decode(found.encode(text)) == text or "\u0301" in text
        if kind == "GPT2Tokenizer":
            assert found.encode(text) == plain(text)["input_ids"], text
    assert (len(found.encode("12")) == 2) >= (kind == "Qwen2Tokenizer")  # digits singly
    assert found.eos_ids == {0} and found.encode("</s>") == [0]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no tokenizer here"):
        load(tmp_path)
