"""Tokenizers that are code of their checkpoint: run by transformers where the setting says so, never otherwise."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from maga_transformer.checkpoint import DummyCheckpoint
from maga_transformer.config import Config
from maga_transformer.llm import LLM
from maga_transformer.tokenizer import Tokenizer, load_tokenizer
from maga_transformer.tokenizer.bytelevel import LETTER_OF
from server.chain_model import write_chain
from test_tokenizer import byte_level_folder, streamed
from transformers import AutoTokenizer, PretrainedConfig

# A slow tokenizer over a file of its own kind: words, then bytes. Loading it leaves a marker beside it.
CODE = """
import os
from transformers import PreTrainedTokenizer

open(os.path.join({folder!r}, "code_ran"), "w").close()


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "words.own"}}

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file, encoding="utf-8") as file:
            self.words = file.read().split("\\n")
        self.ids = {{word: index for index, word in enumerate(self.words)}}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.words) + 256

    def get_vocab(self):
        return {{**self.ids, **self.added_tokens_encoder}}

    def _tokenize(self, text):
        if "crash" in text:
            raise KeyError("crash")
        tokens = []
        for index, word in enumerate(text.split(" ")):
            word = (" " if index else "") + word
            tokens += [word] if word in self.ids else [f"<0x{{byte:02X}}>" for byte in word.encode()]
        return tokens

    def _convert_token_to_id(self, token):
        return self.ids[token] if token in self.ids else len(self.words) + int(token[3:5], 16)

    def _convert_id_to_token(self, index):
        return self.words[index] if index < len(self.words) else f"<0x{{index - len(self.words):02X}}>"

    def convert_tokens_to_string(self, tokens):
        pieces = [bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.encode() for token in tokens]
        return b"".join(pieces).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        path = os.path.join(save_directory, "words.own")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\\n".join(self.words))
        return (path,)

    def build_inputs_with_special_tokens(self, first, second=None):
        whole = [self.bos_token_id, *first]
        return whole if second is None else [*whole, self.sep_token_id, *second]

    def create_token_type_ids_from_sequences(self, first, second=None):
        return [0] * (len(first) + 1) + ([] if second is None else [0] + [1] * len(second))
"""
WORDS = ["hello", " hello", " world", "héé", " <tool>"]
ADDED = {"<s>": True, "</s>": True, "<sep>": True, "<think>": False}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
AUTO = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
TEXTS = ["hello world", "x hello  world <think>ok</think>", "héé 😀 한국 \n", "</s>hello<s>", "", " "]


def write(folder: Path, words: list[str] = WORDS, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "tokenization_own.py").write_text(CODE.format(folder=str(folder)))
    (folder / "words.own").write_text("\n".join(words), encoding="utf-8")
    first = len(words) + 256
    settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": AUTO,
        **{f"{role}_token": text for role, text in (("bos", "<s>"), ("eos", "</s>"), ("sep", "<sep>"))},
        "added_tokens_decoder": {
            str(first + index): {"content": text, "special": special} for index, (text, special) in enumerate(ADDED.items())
        },
        "chat_template": TEMPLATE,
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "vocab_size": first + 8}))
    return folder


def load(folder: Path, trust: bool = True) -> Tokenizer:
    return load_tokenizer(str(folder), DummyCheckpoint(str(folder)), trust_remote_code=trust)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("remote") / "own")


@pytest.fixture(scope="module")
def found(home: Path) -> Tokenizer:
    return load(home)


@pytest.fixture(scope="module")
def expected(home: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(home), config=PretrainedConfig(), trust_remote_code=True)


def test_without_the_setting_no_code_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "own")
    with pytest.raises(ValueError, match=r"own: its tokenizer is code of the checkpoint \(tokenization_own\.OwnTokenizer") as error:
        load(folder, trust=False)
    assert "TRUST_REMOTE_CODE=1 (--trust-remote-code)" in str(error.value)
    assert not (folder / "code_ran").exists()
    load(folder)
    assert (folder / "code_ran").exists()


def test_without_transformers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"OwnTokenizer\), which transformers runs, and transformers is not installed"):
        load(home)


def test_the_setting() -> None:
    assert not Config.without_environment().trust_remote_code
    for flags, environment in (({"trust_remote_code": "true"}, {}), ({}, {"TRUST_REMOTE_CODE": "1"})):
        assert Config.load(flags, environ=environment).trust_remote_code


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_its_own(text: str, found: Tokenizer, expected: Any) -> None:
    for special in (True, False):
        ids = found.encode(text, add_special_tokens=special)
        assert ids == expected.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert found.decode(ids, skip) == streamed(found, ids, skip) == expected.decode(ids, skip_special_tokens=skip)
    assert found.encode("héé") == [found.bos_id, WORDS.index("héé")] and found.opening() == [found.bos_id]


def test_special_ids(found: Tokenizer, expected: Any) -> None:
    first = len(WORDS) + 256
    assert (found.bos_id, found.eos_ids, found.pad_id) == (first, {first + 1}, None)
    assert found.special_ids == set(expected.all_special_ids) == {first, first + 1, first + 2}
    assert found.token_id("<think>") == first + 3 and found.token(first + 3) == "<think>"
    assert found.token_id("nothing") is None and found.token(first + 4) is None and found.vocab_size == first + 8
    assert found.decode([first + 7, 0]) == "hello"
    with pytest.raises(ValueError, match="token id is negative"):
        found.decode([-1])


def test_bytes_of_tokens(found: Tokenizer) -> None:
    table = found.token_bytes()
    assert [table[WORDS.index(word)] for word in WORDS] == [word.encode() for word in WORDS]
    assert table[len(WORDS) : len(WORDS) + 256] == [bytes([byte]) for byte in range(256)]
    assert table[len(WORDS) + 256 :] == [*(text.encode() for text in ADDED), *[b""] * 4]


def test_a_character_of_several_tokens_streams_whole(found: Tokenizer) -> None:
    stream = found.decode_stream()
    assert [stream.step(token) for token in found.encode("😀", False)] == [None, None, None, "😀"]
    assert stream.step(found.encode("😀", False)[0]) is None and stream.finish() == "\ufffd"


def test_pairs(found: Tokenizer) -> None:
    bos, separator = found.bos_id, found.token_id("<sep>")
    assert found.encode_input("hello world", "hello hello") == ([bos, 0, 2, separator, 0, 1], 4)
    assert found.encode_input("hello world", "hello hello", limit=5) == ([bos, 0, 2, separator, 0], 4)
    assert found.encode_input("hello world", "hello hello", limit=3)[0] == [bos, 0, separator]
    assert found.encode_input("hello world", limit=2) == ([bos, 0], None)


def test_chat_template(found: Tokenizer, home: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = found.apply_chat_template(messages)
    assert text == "<s>hello</s>"
    assert found.encode(text, add_special_tokens=False) == [found.bos_id, 0, *found.eos_ids]
    folder = write(tmp_path / "own", chat_template=None)
    assert load(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("from a file")
    assert load(folder).apply_chat_template(messages) == "from a file"


def test_code_that_fails_is_named(tmp_path: Path, found: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the code of the tokenizer \(.*OwnTokenizer\) failed here: KeyError: 'crash'"):
        found.encode("crash")
    with pytest.raises(ValueError, match="lone surrogate"):
        found.encode("a\ud800b")
    folder = write(tmp_path / "own")
    (folder / "words.own").unlink()
    with pytest.raises(ValueError, match=r"own: the code of its tokenizer \(tokenization_own\.OwnTokenizer\) failed"):
        load(folder)
    elsewhere = write(tmp_path / "other", auto_map={"AutoTokenizer": ["org/name--tokenization_own.OwnTokenizer", None]})
    with pytest.raises(ValueError, match="lies in another repository"):
        load(elsewhere)
    assert not (elsewhere / "code_ran").exists()


def test_what_is_read_natively_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tokenizer.json says all; and of a class that is known here, so do its other files."""
    folder = write(tmp_path / "fast")
    byte_level_folder(folder, {"auto_map": AUTO})
    assert load(folder).encode("a") == [list(LETTER_OF.values()).index("a")] and not (folder / "code_ran").exists()

    auto_map = {"AutoTokenizer": ["tokenization_own.QWenTokenizer", None]}
    folder = write(tmp_path / "known", auto_map=auto_map)
    (folder / "tokenization_own.py").write_text(CODE.format(folder=str(folder)).replace("OwnTokenizer", "QWenTokenizer"))
    (folder / "qwen.tiktoken").write_text("".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert load(folder).encode("a") == [ord("a")] and not (folder / "code_ran").exists()


def test_files_that_are_read_without_code_of_an_unknown_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "own")
    (folder / "vocab.json").write_text(json.dumps({letter: index for index, letter in enumerate(LETTER_OF.values())}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"auto_map": AUTO, "bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(folder, trust=False).encode("a") == [list(LETTER_OF.values()).index("a")]
    assert "own code (tokenization_own.OwnTokenizer) does not run" in caplog.text and not (folder / "code_ran").exists()
    assert load(folder).decode([WORDS.index(" world")]) == " world" and (folder / "code_ran").exists()


def test_it_is_saved_with_its_code(found: Tokenizer, tmp_path: Path) -> None:
    found.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    again = load(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == found.encode(text)
    assert again.chat_template == TEMPLATE and again.eos_ids == found.eos_ids


def test_a_model_speaks_through_it(tmp_path: Path) -> None:
    """The chain model's ids are three special tokens and one id a byte."""
    folder = write_chain(tmp_path / "chain", ["Qab😀cd", "<|endoftext|>"])
    config = (folder / "config.json").read_text()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    for file in write(tmp_path / "own", words=["one", "two", "three"]).iterdir():
        file.rename(folder / file.name)
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match="TRUST_REMOTE_CODE=1"):
        LLM(folder, kv_cache_mem_mb=16)
    with LLM(folder, kv_cache_mem_mb=16, trust_remote_code=True, chat_template="Q{# #}") as llm:
        assert llm.generate("Q", max_new_tokens=20, temperature=0).text == "ab😀cd"
        assert llm.generate("Q", max_new_tokens=20, temperature=0, stop_words_str=["😀c"]).text == "ab"
        assert "".join(llm.stream("Q", max_new_tokens=20, temperature=0)) == "ab😀cd"
        assert llm.chat([{"role": "user", "content": "x"}], max_new_tokens=2, temperature=0).text == "ab"
