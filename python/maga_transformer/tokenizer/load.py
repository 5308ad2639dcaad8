"""Finds a model's tokenizer: tokenizer.json and the files beside it, an older file in its place, or the metadata of a GGUF file."""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import tokenizers

from maga_transformer.chat_template import ChatTemplate
from maga_transformer.checkpoint import Checkpoint, DummyCheckpoint, GgufCheckpoint
from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.gguf_file import GgufFile
from maga_transformer.tokenizer.byte_ids import byte_id_tokenizer
from maga_transformer.tokenizer.files import tokenizer_from_files
from maga_transformer.tokenizer.gguf import GgufVocabulary, build_tokenizer, surround
from maga_transformer.tokenizer.llama2 import CHAT, is_llama_2_chat
from maga_transformer.tokenizer.remote import RemoteCodec, is_known, load_code, own_class
from maga_transformer.tokenizer.tokenizer import SpecialTokens, Tokenizer

log = logging.getLogger(__name__)

_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
# Control tokens that end a turn; files whose eos is the base model's still use them in their chat template.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def load_tokenizer(path: str | None, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> Tokenizer:
    """`path`: a folder with tokenizer.json, such a file, or a GGUF file; None: the checkpoint's own. `trust_remote_code`: code of
    the folder may run, where nothing else reads its files."""
    size = checkpoint.config.get("vocab_size")
    vocab_size = size if isinstance(size, int) and size > 0 else None
    if path is None:
        if isinstance(checkpoint, GgufCheckpoint):
            return _from_gguf(checkpoint.path, checkpoint.metadata, vocab_size)
        if isinstance(checkpoint, DummyCheckpoint) and vocab_size and not (Path(checkpoint.path) / "tokenizer.json").is_file():
            log.warning("%s: no tokenizer.json here: token ids stand for bytes, for want of a real tokenizer", checkpoint.path)
            return byte_id_tokenizer(vocab_size, _id_list(checkpoint.config.get("eos_token_id")))
        return _from_folder(Path(checkpoint.path), checkpoint.config, vocab_size, trust_remote_code)
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if place.suffix == ".gguf":
        return _from_gguf(path, GgufFile(path).metadata, vocab_size)
    if place.is_file() and place.name != "tokenizer.json":
        raise ValueError(f"{path}: expected a folder with tokenizer.json, such a file, or a GGUF file")
    return _from_folder(place if place.is_dir() else place.parent, checkpoint.config, vocab_size, trust_remote_code)


def _from_folder(folder: Path, model_config: dict[str, Any], vocab_size: int | None, trust: bool) -> Tokenizer:
    file = folder / "tokenizer.json"
    config = _optional_object(folder / "tokenizer_config.json")
    generation = _optional_object(folder / "generation_config.json")
    turn_ends: tuple[str, ...] = ()
    if file.is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise ValueError(f"{file}: {error}") from None
    else:
        own = own_class(config)
        built = None if trust and own and not is_known(own) else tokenizer_from_files(folder, config, model_config, generation)
        if built is None and own:
            if not trust:
                raise ValueError(
                    f"{folder}: its tokenizer is code of the checkpoint ({own}, in tokenizer_config.json's auto_map), which does "
                    "not run unless TRUST_REMOTE_CODE=1 (--trust-remote-code) says so"
                )
            return _from_code(folder, own, _ends(folder, model_config, generation), vocab_size)
        if built is None:
            raise FileNotFoundError(f"{file}: no tokenizer here")
        if own and not is_known(own):
            log.warning(
                "%s: the tokenizer's own code (%s) does not run, and what it adds to its files is not known here; "
                "TRUST_REMOTE_CODE=1 runs it",
                folder,
                own,
            )
        tokenizer, turn_ends = built.tokenizer, built.turn_ends
        config = {**built.settings, **{key: value for key, value in config.items() if value is not None}}
    _add_tokens(tokenizer, config.get("added_tokens_decoder"), str(folder / "tokenizer_config.json"))
    texts = {f"{role}_token": text for role in _ROLES if (text := _token_text(config.get(f"{role}_token"))) is not None}
    ids = {role: tokenizer.token_to_id(texts[f"{role}_token"]) for role in _ROLES if f"{role}_token" in texts}
    if "add_bos_token" in config or "add_eos_token" in config:  # they overrule tokenizer.json
        asked = {role: ids.get(role) if config.get(f"add_{role}_token") is True else None for role in ("bos", "eos")}
        surround(tokenizer, asked["bos"], asked["eos"])
    special = _special(ids, [*map(tokenizer.token_to_id, turn_ends), *_ends(folder, model_config, generation)], texts)
    templates = _folder_templates(folder, config)
    if not templates and is_llama_2_chat(model_config.get("model_type"), vocab_size, folder, model_config.get("_name_or_path")):
        templates["default"] = ChatTemplate(CHAT, f"{folder}: the chat template of Llama 2")
    return Tokenizer(tokenizer, special, vocab_size=vocab_size, templates=templates)


def _from_code(folder: Path, own: str, ends: list[int], vocab_size: int | None) -> Tokenizer:
    code = load_code(folder, own)
    codec = RemoteCodec(code, f"{folder}: the code of the tokenizer ({own})")
    texts = {role: str(text) for role, text in code.special_tokens_map.items() if role.removesuffix("_token") in _ROLES}
    ids = {role: codec.token_id(texts[f"{role}_token"]) for role in _ROLES if f"{role}_token" in texts}
    special = _special(ids, ends, texts)
    named = code.chat_template
    listed = [{"name": name, "template": text} for name, text in named.items()] if isinstance(named, dict) else named
    templates = _folder_templates(folder, {"chat_template": listed})
    return Tokenizer(codec, special, vocab_size=vocab_size, templates=templates)


def _from_gguf(path: str, metadata: dict[str, Any], vocab_size: int | None) -> Tokenizer:
    vocabulary = GgufVocabulary(path, metadata)
    tokenizer = build_tokenizer(vocabulary)
    ids = {
        ours: vocabulary.id_of(theirs) for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    templates = {}
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template") and isinstance(value, str):
            name = key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"
            templates[name] = ChatTemplate(value, f"{path}: {key}")
    size = vocab_size or len(vocabulary.tokens)
    if not templates and is_llama_2_chat(metadata.get("general.architecture"), size, path, metadata.get("general.name")):
        templates["default"] = ChatTemplate(CHAT, f"{path}: the chat template of Llama 2")
    ends = {vocabulary.id_of("eot"), vocabulary.id_of("eom")}
    if "default" in templates:
        added = tokenizer.get_added_tokens_decoder()
        ends |= {
            token for token, text in added.items() if text.content in _TURN_ENDS and text.content in templates["default"].source
        }
    texts = {f"{role}_token": vocabulary.tokens[token] for role, token in ids.items() if token is not None}
    return Tokenizer(tokenizer, _special(ids, ends, texts), vocab_size=size, templates=templates)


def _special(ids: Mapping[str, int | None], ends: Iterable[int | None], texts: Mapping[str, str]) -> SpecialTokens:
    """`ids` by role; `ends`: what ends an answer besides eos."""
    return SpecialTokens(
        bos_id=ids.get("bos"),
        eos_ids=frozenset(token for token in (ids.get("eos"), *ends) if token is not None),
        unk_id=ids.get("unk"),
        pad_id=ids.get("pad"),
        texts=texts,
    )


def _optional_object(file: Path) -> dict[str, Any]:
    return read_json_object(str(file)) if file.is_file() else {}


def _token_text(value: object) -> str | None:
    """Special tokens are stored as text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _id_list(value: object) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if _is_id(item)]


def _ends(folder: Path, model_config: dict[str, Any], generation: dict[str, Any]) -> list[int]:
    named = {"config.json": model_config.get("eos_token_id"), "generation_config.json": generation.get("eos_token_id")}
    odd = [
        f"{value!r:.64} ({file})"
        for file, values in named.items()
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not _is_id(value)
    ]
    if odd:
        log.warning("%s: eos_token_id must hold integers from 0, so these end no answer: %s", folder, ", ".join(odd))
    return [token for values in named.values() for token in _id_list(values)]


def _add_tokens(tokenizer: tokenizers.Tokenizer, listed: object, where: str) -> None:
    """Tokens of tokenizer_config.json that tokenizer.json lacks (older files)."""
    if not isinstance(listed, dict):
        return
    known = tokenizer.get_added_tokens_decoder()
    missing = {int(key): entry for key, entry in listed.items() if key.isdecimal() and int(key) not in known}
    for index, entry in sorted(missing.items(), key=lambda item: item[0]):
        text = _token_text(entry)
        if text is None or not isinstance(entry, dict):
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])
        if tokenizer.token_to_id(text) != index:
            raise ValueError(f"{where}: added token {text!r} is given the id {index}, its place is {tokenizer.token_to_id(text)}")


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """chat_template.jinja and additional_chat_templates/ before the string, or list of named strings, of tokenizer_config.json."""
    where = os.path.join(folder, "tokenizer_config.json")
    found: dict[str, ChatTemplate] = {}
    listed = config.get("chat_template")
    for entry in listed if isinstance(listed, list) else [{"name": "default", "template": listed}]:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            name = str(entry.get("name", "default"))
            found[name] = ChatTemplate(entry["template"], f"{where}: chat_template {name!r}")
    for file in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if file.is_file():
            name = "default" if file.parent == folder else file.stem
            try:
                found[name] = ChatTemplate(file.read_text(encoding="utf-8"), str(file))
            except UnicodeDecodeError:
                raise ValueError(f"{file}: the chat template is not UTF-8") from None
    return found
