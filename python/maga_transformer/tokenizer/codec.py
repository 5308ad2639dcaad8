"""What turns text into ids and back: the `tokenizers` library here, code of a checkpoint in remote.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from maga_transformer.tokenizer.stream import Decoder, DecodeStream

NO_CHARACTER = "the text holds a lone surrogate, which is no character"  # half of a UTF-16 pair, as "\\ud800" in JSON gives it


class Codec(Protocol):
    """Safe to use from several threads."""

    @property
    def size(self) -> int:
        """Of the vocabulary, added tokens included."""
        ...

    @property
    def special(self) -> frozenset[int]:
        """Ids that decoding leaves out when it skips special tokens."""
        ...

    def token_id(self, token: str) -> int | None: ...

    def token(self, token_id: int) -> str | None: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to the text when nothing is left out."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """As Tokenizer.offsets."""
        ...

    def encode_input(self, text: str, pair: str | None, limit: int | None) -> tuple[list[int], int | None]:
        """As Tokenizer.encode_input."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def stream(self, skipped: frozenset[int]) -> DecodeStream:
        """`skipped`: ids that it leaves out."""
        ...

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes its files for transformers, and returns what tokenizer_config.json must say of them."""
        ...


class NativeCodec:
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._decoder = Decoder(tokenizer)
        self.size = tokenizer.get_vocab_size()
        self.special = self._decoder.special

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self._decoder.token_bytes(token_id)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # The batch call keeps no offsets, lets go of the GIL, and is several times faster on long texts.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise ValueError(NO_CHARACTER) from None

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return list(self._tokenizer.encode(text).offsets)

    def encode_input(self, text: str, pair: str | None, limit: int | None) -> tuple[list[int], int | None]:
        try:
            first = self._tokenizer.encode(text, add_special_tokens=False)
            second = None if pair is None else self._tokenizer.encode(pair, add_special_tokens=False)
        except TypeError:
            raise ValueError(NO_CHARACTER) from None
        if limit is not None:
            room = max(0, limit - self._tokenizer.num_special_tokens_to_add(second is not None))
            if second is not None:
                first.truncate(min(len(first), room))
                second.truncate(room - len(first))
            else:
                first.truncate(room)
        whole = self._tokenizer.post_process(first, second)
        return whole.ids, next((i for i, kind in enumerate(whole.type_ids) if kind == 1), None)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise ValueError("a token id is negative or beyond any vocabulary") from None

    def stream(self, skipped: frozenset[int]) -> DecodeStream:
        return self._decoder.stream(skipped)

    def save(self, folder: Path) -> dict[str, Any]:
        self._tokenizer.save(str(folder / "tokenizer.json"))
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
