"""The one tokenizer class: a codec, the special tokens and the chat templates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from maga_transformer.chat_template import ChatTemplate, Message
from maga_transformer.tokenizer.codec import Codec, NativeCodec
from maga_transformer.tokenizer.stream import DecodeStream


@dataclass(frozen=True)
class SpecialTokens:
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()  # any of them ends an answer
    unk_id: int | None = None
    pad_id: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: what a chat template may name


class Tokenizer:
    """Safe to use from several threads. Texts that look like special tokens are read as special tokens, in prompts too."""

    def __init__(
        self,
        codec: tokenizers.Tokenizer | Codec,
        special: SpecialTokens,
        *,
        vocab_size: int | None = None,
        templates: Mapping[str, ChatTemplate] | None = None,
    ) -> None:
        """`vocab_size`: the model's, where it differs from the tokenizer's (padded embeddings)."""
        self._codec: Codec = NativeCodec(codec) if isinstance(codec, tokenizers.Tokenizer) else codec
        self._special = special
        self._templates = dict(templates or {})
        self._keys = ("default", "tool_use")  # of the templates without and with tools
        self.vocab_size = vocab_size or self._codec.size
        self.eos_ids = frozenset(token for token in special.eos_ids if token < self.vocab_size)
        self.foreign_eos_ids = sorted(special.eos_ids - self.eos_ids)  # which the model can never draw

    def save(self, folder: Path) -> None:
        """As transformers reads it: its files, tokenizer_config.json, and generation_config.json with what ends an answer."""
        settings = {**self._codec.save(folder), **self._special.texts}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        ends = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids), "pad_token_id": self.pad_id}
        for name, content in (
            ("tokenizer_config.json", settings),
            ("generation_config.json", {key: value for key, value in ends.items() if value not in (None, [])}),
        ):
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    # --- ids ---

    @property
    def bos_id(self) -> int | None:
        return self._special.bos_id

    @property
    def unk_id(self) -> int | None:
        return self._special.unk_id

    @property
    def pad_id(self) -> int | None:
        return self._special.pad_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out when it skips special tokens."""
        return self._codec.special

    def token_id(self, token: str) -> int | None:
        return self._codec.token_id(token)

    def token(self, token_id: int) -> str | None:
        """As the vocabulary spells it, in the byte alphabet for byte-level models."""
        return self._codec.token(token_id)

    # --- text ---

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: bos and eos as the model wants them around a plain text; chat templates write their own."""
        return self._codec.encode(text, add_special_tokens)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """For each token of `encode(text)` where it begins and ends, in characters; special tokens that are no text are (0, 0).
        ValueError where the checkpoint's own code does not tell."""
        return self._codec.offsets(text)

    def opening(self) -> list[int]:
        """What `encode` puts before every text."""
        whole, text = self.encode("a"), self.encode("a", add_special_tokens=False)
        return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(text)] == text), [])

    def encode_input(self, text: str, pair: str | None = None, limit: int | None = None) -> tuple[list[int], int | None]:
        """A text, or a text and its pair, with the special tokens around them, for models that embed or score; and where the second
        segment begins, if the model tells segments apart. `limit`: tokens that are kept; those of `pair` go first."""
        return self._codec.encode_input(text, pair, limit)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> str:
        """Bytes that form no character become U+FFFD; ids outside the vocabulary add nothing. `keep`: special tokens that are not
        skipped."""
        kept = list(ids)
        if skip_special_tokens and keep:
            skipped, skip_special_tokens = self._codec.special - keep, False
            kept = [token for token in kept if token not in skipped]
        return self._codec.decode(kept, skip_special_tokens)

    def decode_stream(self, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> DecodeStream:
        """Joined, its pieces and its `finish` equal `decode` of all ids."""
        return self._codec.stream(self._codec.special - keep if skip_special_tokens else frozenset())

    def token_bytes(self) -> list[bytes]:
        """For each id of the model's vocabulary the bytes that it adds to the text; special tokens stand for their own text, so
        that a stop string can name them. Ids without a token are b""."""
        return [self._codec.token_bytes(token) for token in range(self.vocab_size)]

    # --- chat ---

    @property
    def special_texts(self) -> Mapping[str, str]:
        """bos_token, eos_token, ...: the variables that a chat template gets of itself."""
        return self._special.texts

    @property
    def chat_templates(self) -> list[str]:
        """The sources of all of the model's templates."""
        return [template.source for template in self._templates.values()]

    @property
    def chat_template_place(self) -> str:
        """Where the template of conversations without tools stands: a file, or a key of one; "": there is none."""
        template = self._templates.get(self._keys[0])
        return template.where if template else ""

    @property
    def template_names(self) -> list[str]:
        return list(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the template that apply_chat_template uses without tools; None: the model has none."""
        template = self._templates.get(self._keys[0])
        return None if template is None else template.source

    def set_chat_template(self, source: str, where: str = "chat template") -> None:
        """Replaces the model's templates. ValueError naming `where` and the line if it does not parse."""
        self._templates = {"default": ChatTemplate(source, where)}
        self._keys = ("default", "tool_use")

    def choose_chat_templates(self, plain: str, with_tools: str) -> None:
        """Which of the model's named templates conversations take, without tools and with some (where there is such a one)."""
        if plain != "default" and plain not in self._templates:
            raise ValueError(f"there is no such template: the model has {', '.join(self._templates) or 'none'}")
        self._keys = (plain, with_tools)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        key: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, to be encoded with add_special_tokens=False. `variables` reach the template as they are.
        `template`: a source to use instead of the model's; `key`: which of its named ones.
        ValueError with the template's own words where it refuses."""
        plain, with_tools = self._keys
        name = key or (with_tools if tools and with_tools in self._templates else plain)
        chosen = self._templates.get(name) if template is None else ChatTemplate(template, "chat_template")
        if chosen is None:
            raise ValueError("the model has no chat template: give one, or send a plain prompt")
        for reserved in ("messages", *self._special.texts):
            if reserved in variables:
                raise ValueError(f"{reserved} cannot be set as a variable of the chat template")
        return chosen.render(
            messages,
            **self._special.texts,
            **{"documents": None, **variables},
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
        )
