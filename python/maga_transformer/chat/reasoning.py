"""Thoughts apart from the answer: families write them between two marks before it."""

from __future__ import annotations

from dataclasses import dataclass

from maga_transformer.chat.pieces import Piece, PlainReader, Reader, Reasoning, first_marker, held_suffix


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    open: str
    close: str
    first: bool = False  # an answer is a thought until the closing mark, whatever it begins with
    aliases: tuple[str, ...] = ()  # vLLM's names for it

    def begins_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside a thought: some templates write the opening mark themselves."""
        return self.first or (prompt.rfind(self.open) > prompt.rfind(self.close) and prompt.rstrip().endswith(self.open))


FORMATS = (
    ReasoningFormat("think", "<think>", "</think>", aliases=("qwen3", "glm45", "hunyuan_a13b", "minimax_m2", "step3", "nemotron")),
    ReasoningFormat("think_first", "<think>", "</think>", first=True, aliases=("deepseek_r1", "deepseek_v3", "holo2")),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", aliases=("seed_oss",)),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)
BY_NAME = {name: form for form in FORMATS for name in (form.name, *form.aliases)}


def find_format(template: str) -> ReasoningFormat | None:
    """By the chat template: one that writes or cuts the marks."""
    return next((form for form in FORMATS if not form.first and form.close in template), None)


class ReasoningReader:
    """`behind` reads what follows the thoughts."""

    def __init__(self, form: ReasoningFormat, behind: Reader | None = None, *, open: bool = False) -> None:
        self._form = form
        self._behind = behind or PlainReader()
        self._state = "thought" if open else "start"
        self._held = ""
        self._fresh = True

    @property
    def thinking(self) -> bool:
        return self._state == "thought"

    def push(self, text: str) -> list[Piece]:
        if self._state == "answer":
            return self._behind.push(text)
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            begin = self._held.lstrip()
            if not begin or self._form.open.startswith(begin):
                return []
            if not begin.startswith(self._form.open):
                self._state = "answer"
                return self._released()
            self._state, self._held = "thought", begin[len(self._form.open) :]
        if self._state == "thought":
            if self._fresh:  # the model may repeat the mark that the prompt has written, and begins a line after it
                if self._form.open.startswith(self._held):
                    return []
                self._held = self._held.removeprefix(self._form.open).lstrip("\n")
                self._fresh = not self._held
            pieces += self._thought()
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
                pieces += self._released()
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "thought":
            return ([Reasoning(held)] if held else []) + self._behind.finish()
        return (self._behind.push(held) if held.strip() else []) + self._behind.finish()

    def _thought(self) -> list[Piece]:
        found = first_marker(self._held, (self._form.close,))
        if found is None:
            keep = held_suffix(self._held, (self._form.close, self._form.open))
            text = self._held[: len(self._held) - keep].rstrip()  # white space before the closing mark is no thought
            self._held = self._held[len(text) :]
            return [Reasoning(text)] if text else []
        at, marker = found
        text, self._held = self._held[:at].rstrip(), self._held[at + len(marker) :]
        self._state = "gap"
        return [Reasoning(text)] if text else []

    def _released(self) -> list[Piece]:
        held, self._held = self._held, ""
        return self._behind.push(held)
