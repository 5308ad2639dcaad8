"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FLOOR = -9999.0  # JSON has no -inf


class CompletionLogprobs:
    """The lists of /v1/completions; text_offset counts characters over the whole output."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._offset = 0

    def take_prompt(self, prompt: Sequence[int], logprobs: Sequence[tuple[float, int, list[tuple[int, float]]]]) -> dict[str, Any]:
        """The prompt's own tokens; nothing is known of the first."""
        rest = self.take(prompt[1:], [(value, top) for value, _, top in logprobs], begin=len(_text(self._token_bytes[prompt[0]])))
        return {
            "tokens": [self._name(prompt[0]), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *rest["text_offset"]],
        }

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[tuple[float, list[tuple[int, float]]]], *, begin: int = 0
    ) -> dict[str, Any]:
        self._offset += begin
        names = [self._name(token) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(_text(self._token_bytes[token]))
        return {
            "tokens": names,
            "token_logprobs": [_finite(logprob) for logprob, _ in logprobs],
            "top_logprobs": [self._top(token, *entry) for token, entry in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, chosen: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, float]:
        """The most likely tokens and the chosen one, each under a key of its own."""
        entries: dict[str, float] = {}
        for token, value in [*top, (chosen, logprob)]:
            name = self._name(token)
            if name in entries and token != chosen:
                name = f"token_id:{token}"
            entries[name] = _finite(value)
        return entries

    def _name(self, token: int) -> str:
        raw = self._token_bytes[token]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    token_bytes: Sequence[bytes], prompt: Sequence[int], logprobs: Sequence[tuple[float, int, list[tuple[int, float]]]]
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each token its own entry and those of the most likely ones, by id."""

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(value), "rank": rank, "decoded_token": _text(token_bytes[token])}

    told: list[dict[str, Any] | None] = [None]
    for token, (value, rank, top) in zip(prompt[1:], logprobs, strict=True):
        best = {str(other): entry(other, score, at + 1) for at, (other, score) in enumerate(top)}
        told.append({str(token): entry(token, value, rank), **{other: each for other, each in best.items() if other != str(token)}})
    return told


def chat_logprobs(
    token_bytes: Sequence[bytes], tokens: Sequence[int], logprobs: Sequence[tuple[float, list[tuple[int, float]]]]
) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes[token]
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*candidate) for candidate in top]}
        for token, (logprob, top) in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR
