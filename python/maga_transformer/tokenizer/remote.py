"""Tokenizers that are code of their checkpoint: transformers runs it, where trust_remote_code says so and only there."""

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from maga_transformer.tokenizer.bytelevel import bytes_of, in_alphabet, spelled
from maga_transformer.tokenizer.codec import NO_CHARACTER
from maga_transformer.tokenizer.stream import DecodeStream, WindowStream

log = logging.getLogger(__name__)

# Classes whose files and what they add to them are known (files.py): their code need not run.
_KNOWN = frozenset(
    {"QWenTokenizer", "ChatGLMTokenizer", "ChatGLM4Tokenizer", "BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer"}
)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACED = "\ufffd"
_Result = TypeVar("_Result")


def own_class(config: dict[str, Any]) -> str:
    """What tokenizer_config.json names as the tokenizer's code, "tokenization_x.XTokenizer"; "": nothing."""
    mapping = config.get("auto_map")
    names = mapping.get("AutoTokenizer") if isinstance(mapping, dict) else mapping
    listed = names if isinstance(names, list | tuple) else [names]  # the slow one and the fast one
    return next((name for name in reversed(listed) if isinstance(name, str) and name), "")


def is_known(own: str) -> bool:
    return own.rpartition(".")[2].removesuffix("Fast") in _KNOWN


def load_code(folder: Path, own: str) -> Any:
    """The tokenizer object that transformers makes of the folder's code. ValueError naming the folder and the class."""
    if "--" in own:
        raise ValueError(
            f"{folder}: the code of its tokenizer ({own}) lies in another repository; put it into this folder, and name it in "
            "tokenizer_config.json's auto_map without '--'"
        )
    try:
        from transformers import AutoTokenizer, PretrainedConfig
    except ImportError:
        raise ValueError(
            f"{folder}: its tokenizer is code of the checkpoint ({own}), which transformers runs, and transformers is not "
            "installed: pip install 'maga_transformer[remote-code]'"
        ) from None
    log.warning("%s: running the code of its tokenizer (%s), as TRUST_REMOTE_CODE says", folder, own)
    try:
        # An empty model config, so that no code of the model runs to make one.
        return AutoTokenizer.from_pretrained(str(folder), config=PretrainedConfig(), trust_remote_code=True, local_files_only=True)
    except Exception as error:
        log.debug("%s: %s", folder, own, exc_info=True)
        raise ValueError(f"{folder}: the code of its tokenizer ({own}) failed: {type(error).__name__}: {error}") from None


class RemoteCodec:
    """Over any tokenizer of transformers, slow or fast. Such code expects one caller at a time."""

    def __init__(self, code: Any, where: str) -> None:
        self._code = code
        self._where = where
        self._lock = threading.RLock()
        added: dict[int, Any] = code.added_tokens_decoder
        self._added = {token: str(entry) for token, entry in added.items()}
        self.size = max([len(code) - 1, *self._added]) + 1
        self.special = frozenset(code.all_special_ids) | {
            token for token, entry in added.items() if getattr(entry, "special", False)
        }
        self._tokens = [self._read_token(token) for token in range(self.size)]
        self._ids = {text: token for token, text in reversed(list(enumerate(self._tokens))) if text is not None}
        self._anchor = next(iter(self.encode("a", add_special_tokens=False)), None)

    def _run(self, call: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
        with self._lock:
            try:
                return call(*arguments, **options)
            except Exception as error:
                log.debug("%s", self._where, exc_info=True)
                raise ValueError(f"{self._where} failed here: {type(error).__name__}: {error}") from None

    def _read_token(self, token: int) -> str | None:
        if token in self._added:
            return self._added[token]
        try:
            text = self._code.convert_ids_to_tokens(token)
        except Exception:  # ids that it leaves free
            return None
        return spelled(text) if isinstance(text, bytes) else text if isinstance(text, str) else None

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < self.size else None

    def token_bytes(self, token_id: int) -> bytes:
        text = self.token(token_id)
        if text is None:
            return b""
        if token_id in self._added or token_id in self.special:
            return text.encode("utf-8", "replace")
        shown = self._shown(token_id)
        if _REPLACED not in shown:
            return shown.encode("utf-8", "replace")
        # A part of a character: how it is spelt tells its bytes, if they look as the decoder shows them.
        match = _BYTE.fullmatch(text)
        spellings = [bytes([int(match[1], 16)])] if match else [bytes_of(text)] if in_alphabet(text) else []
        return next((data for data in spellings if data.decode("utf-8", "replace") == shown), shown.encode("utf-8"))

    def _shown(self, token_id: int) -> str:
        """What it adds to a text that has begun."""
        if self._anchor is not None:
            before = self.decode([self._anchor], skip_special_tokens=False)
            both = self.decode([self._anchor, token_id], skip_special_tokens=False)
            if both.startswith(before):
                return both[len(before) :]
        return self.decode([token_id], skip_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        _check_characters(text)
        return list(self._run(self._code.encode, text, add_special_tokens=add_special_tokens))

    def offsets(self, text: str) -> list[tuple[int, int]]:
        if not getattr(self._code, "is_fast", False):
            raise ValueError(f"{self._where} does not tell where in a text its tokens lie")
        _check_characters(text)
        return list(self._run(self._code, text, return_offsets_mapping=True)["offset_mapping"])

    def encode_input(self, text: str, pair: str | None, limit: int | None) -> tuple[list[int], int | None]:
        _check_characters(text + (pair or ""))
        options: dict[str, Any] = {}
        if limit is not None:
            first = len(self.encode(text, add_special_tokens=False))
            room = max(0, limit - self._run(self._code.num_special_tokens_to_add, pair=pair is not None))
            if pair is not None and first < room:
                options = {"truncation": "only_second", "max_length": limit}
            else:
                pair = None if pair is None else ""
                options = {"truncation": "only_first", "max_length": limit}
        whole = self._run(self._code, text, pair, return_token_type_ids=True, **options)
        return list(whole["input_ids"]), next((i for i, kind in enumerate(whole.get("token_type_ids", [])) if kind == 1), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if any(token < 0 for token in ids):
            raise ValueError("a token id is negative or beyond any vocabulary")
        known = [token for token in ids if self.token(token) is not None and not (skip_special_tokens and token in self.special)]
        return str(self._run(self._code.decode, known, skip_special_tokens=False)) if known else ""

    def stream(self, skipped: frozenset[int]) -> DecodeStream:
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens=False), skipped)

    def save(self, folder: Path) -> dict[str, Any]:
        """Its code goes along."""
        self._run(self._code.save_pretrained, str(folder))
        settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return settings


def _check_characters(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(NO_CHARACTER) from None
