"""Tokenizers of folders without tokenizer.json, from the files that their models' own code reads: tiktoken ranks, SentencePiece
models, GPT-2's vocab.json and merges.txt. None of that code runs: what a family adds to its file stands here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers.models import BPE

from maga_transformer.tokenizer import ice_text
from maga_transformer.tokenizer.pretokenizers import PRE_TOKENIZATIONS
from maga_transformer.tokenizer.sentencepiece import SentencePieceModel, read_sentencepiece, sentencepiece_tokenizer
from maga_transformer.tokenizer.tiktoken import is_rank_file, read_ranks, tiktoken_tokenizer

_CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATGLM_MASKS = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_CHATGLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_CHATGLM2 = (
    "[gMASK]sop{% set turn = namespace(number=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set turn.number = turn.number + 1 %}[Round {{ turn.number }}]\n\n问：{{ message.content }}\n\n答："
    "{% else %}{{ message.content }}\n\n{% endif %}{% endfor %}"
)
_CHATGLM3 = (
    "[gMASK]sop{% for message in messages %}<|{{ message.role }}|>\n {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_BAICHUAN = (
    "{{% for message in messages %}}{{% if message.role == 'user' %}}{user}{{% elif message.role == 'assistant' %}}{assistant}"
    "{{% endif %}}{{{{ message.content }}}}{{% endfor %}}{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
)
_INTERNLM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<|User|>:{{ message.content }}<eoh>\n"
    "{% elif message.role == 'assistant' %}<|Bot|>:{{ message.content }}<eoa>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Bot|>:{% endif %}"
)
_FIRST_CHATGLM = (150528, 20000)  # vocabulary of its first release, whose files do not say how many ids are images; and how many
# What tokenizer_config.json says of the class -> how it cuts text; other byte-level classes do as GPT-2.
_CUTS = {"Qwen2Tokenizer": "qwen2"}


@dataclass(frozen=True)
class FileTokenizer:
    tokenizer: tokenizers.Tokenizer
    settings: dict[str, Any] = field(default_factory=dict)  # for keys that tokenizer_config.json leaves out
    turn_ends: tuple[str, ...] = ()  # tokens that end an answer beside eos


def tokenizer_from_files(
    folder: Path, settings: dict[str, Any], model: dict[str, Any], generation: dict[str, Any]
) -> FileTokenizer | None:
    """`settings`, `model` and `generation` are tokenizer_config.json, config.json and generation_config.json. None: no file here is
    one of a tokenizer."""
    ranks = next(iter(sorted(folder.glob("*.tiktoken"))), None)
    if ranks is not None:
        return _qwen(str(ranks))
    pieces = folder / "ice_text.model"
    if pieces.is_file():
        return _ice_text(str(pieces), settings, model)
    pieces = folder / "tokenizer.model"
    if pieces.is_file():
        if is_rank_file(str(pieces)):  # GLM-4 and Llama 3
            return FileTokenizer(tiktoken_tokenizer(read_ranks(str(pieces)), "llama-bpe"))
        return _sentencepiece(str(pieces), model, generation)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder, str(settings.get("tokenizer_class")))
    return None


def _qwen(path: str) -> FileTokenizer:
    tokenizer = tiktoken_tokenizer(read_ranks(path), "qwen2")
    end, turns = "<|endoftext|>", ("<|im_start|>", "<|im_end|>")
    _add_special(tokenizer, [end, *turns, *(f"<|extra_{number}|>" for number in range(205))])
    return FileTokenizer(tokenizer, {"eos_token": end, "pad_token": end, "chat_template": _CHATML}, turns[1:])


def _ice_text(path: str, settings: dict[str, Any], model: dict[str, Any]) -> FileTokenizer:
    images = settings.get("num_image_tokens")
    if images is None:
        vocabulary, count = _FIRST_CHATGLM
        images = count if model.get("vocab_size") == vocabulary else 0
    if not isinstance(images, int) or isinstance(images, bool) or not 0 <= images < 1 << 20:
        raise ValueError(f"{path}: num_image_tokens in tokenizer_config.json is {images!r}, expected an integer from 0")
    roles = {f"{role}_token": text for role, text in ice_text.SPECIAL.items()}
    return FileTokenizer(ice_text.ice_text_tokenizer(path, images), {**roles, "chat_template": ice_text.CHAT})


def _sentencepiece(path: str, model: dict[str, Any], generation: dict[str, Any]) -> FileTokenizer:
    pieces = read_sentencepiece(path)
    tokenizer = sentencepiece_tokenizer(pieces)
    roles = {f"{role}_token": text for role in pieces.ids if (text := pieces.role(role)) is not None}
    kind = model.get("model_type")
    if kind == "chatglm":
        _add_special(tokenizer, [*_CHATGLM_MASKS, *_CHATGLM_ROLES])
        prefix = [(text, tokenizer.token_to_id(text)) for text in ("[gMASK]", "sop")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[gMASK] sop $A", special_tokens=prefix)
        second = "chatglm2" in str(model.get("_name_or_path"))  # nothing else in its files tells it from the third
        return FileTokenizer(
            tokenizer, {**roles, "chat_template": _CHATGLM2 if second else _CHATGLM3}, ("<|user|>", "<|observation|>")
        )
    settings = {**roles, "add_bos_token": True}
    if kind == "internlm":
        settings["chat_template"] = _INTERNLM
        return FileTokenizer(tokenizer, settings, ("<eoa>",))
    if kind == "baichuan" and (turns := _turn_tokens(pieces, generation)) is not None:
        user, assistant = turns
        _add_special(tokenizer, [user, assistant])
        settings["chat_template"] = _BAICHUAN.format(user=user, assistant=assistant)
    return FileTokenizer(tokenizer, settings)


def _turn_tokens(pieces: SentencePieceModel, generation: dict[str, Any]) -> tuple[str, str] | None:
    """Baichuan's tokens before what the user and what the assistant says; base models name none."""
    user, assistant = generation.get("user_token_id", -1), generation.get("assistant_token_id", -1)
    if not all(isinstance(token, int) and 0 <= token < len(pieces.tokens) for token in (user, assistant)):
        return None
    return pieces.tokens[int(user)], pieces.tokens[int(assistant)]


def _byte_level(folder: Path, tokenizer_class: str) -> FileTokenizer:
    kind = PRE_TOKENIZATIONS[_CUTS.get(tokenizer_class.removesuffix("Fast"), "gpt-2")]
    try:
        model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{folder}: vocab.json and merges.txt: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    if kind.normal_form:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return FileTokenizer(tokenizer)


def _add_special(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
