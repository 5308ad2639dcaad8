"""How well a model predicts a text: its perplexity, measured through the engine with the kernels and the K/V cache that serve."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from maga_transformer.config import Config, ConfigError
from maga_transformer.progress import Progress, progress_bar
from maga_transformer.texts import read_text

if TYPE_CHECKING:
    from rich.console import Console

    from maga_transformer.llm import LLM

_WINDOW = 1024  # tokens, where the model takes more
_AT_ONCE = 16  # windows that wait or run


@dataclass(frozen=True)
class Perplexity:
    nats: float  # mean of -log p
    tokens: int  # that were scored
    seconds: float

    @property
    def value(self) -> float:
        return math.exp(self.nats)


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, of which those from `scored` on count."""

    begin: int
    scored: int
    end: int


def windows(tokens: int, size: int, stride: int) -> list[Window]:
    """Runs of `size` tokens, `stride` apart, so that every token but the first is scored once, and all but those of the first
    window with at least `size - stride` tokens before it."""
    found = [Window(0, 1, min(size, tokens))]
    while found[-1].end < tokens:
        begin, scored = found[-1].begin + stride, found[-1].end
        found.append(Window(begin, scored, min(begin + size, tokens)))
    return found


def perplexity(llm: LLM, text: str, *, window: int = 0, stride: int = 0, progress: Progress | None = None) -> Perplexity:
    """`window`: tokens that the model sees at once, 0: 1024, or its context if that is less. `stride`: from one window to the
    next, 0: half of one. Where the tokenizer puts a token before every text, every window begins with it. `progress` hears
    (tokens scored, tokens in all). Raises ValueError."""
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    head = llm.tokenizer.opening()
    longest = llm.context - 1 - len(head)  # one token is left for an answer
    window = window or min(_WINDOW, longest)
    if not 2 <= window <= longest:
        raise ValueError(f"--window {window}: valid are 2 to {longest} tokens, what this model takes")
    stride = stride or max(1, window // 2)
    if not 1 <= stride < window:
        raise ValueError(f"--stride {stride}: valid are 1 to {window - 1}, less than --window")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens: it needs at least 2")
    began = time.monotonic()
    parts = windows(len(ids), window, stride)
    total, scored = 0.0, 0
    for first in range(0, len(parts), _AT_ONCE):
        some = parts[first : first + _AT_ONCE]
        for part, found in zip(some, llm.prompt_logprobs([head + ids[w.begin : w.end] for w in some]), strict=True):
            counted = found[len(found) - (part.end - part.scored) :]
            total -= float(np.sum(counted, dtype=np.float64))
            scored += len(counted)
        if progress is not None:
            progress(scored, len(ids) - 1)
    return Perplexity(total / scored, scored, time.monotonic() - began)


def other_settings(text: str) -> dict[str, object]:
    """ "quantization=int8,kv_cache_dtype=fp16" as settings; an item without "=" names another checkpoint."""
    found: dict[str, object] = {}
    for item in (part.strip() for part in text.split(",")):
        name, equals, value = item.partition("=")
        key = name.strip().replace("-", "_") if equals else "checkpoint_path"
        if not item or key not in Config.model_fields:
            raise ConfigError(f"--against {text}: {item!r} is neither SETTING=VALUE nor the path of a checkpoint")
        found[key] = value.strip() if equals else item
    return found


def evaluate(
    settings: dict[str, object], *, against: Sequence[str], text_file: str, window: int, stride: int, console: Console
) -> None:
    """Prints a table: the model with its `settings`, and below it with each of the others and its ratio to the first."""
    from rich.table import Table

    from maga_transformer.llm import LLM

    name, text = read_text(text_file, "alice")
    runs = [settings, *({**settings, **other_settings(other)} for other in against)]
    for run in runs:  # a mistake in the last should not cost the first
        Config.without_environment(**run)
    table = Table("setting", "perplexity", "ratio", "tokens", "tokens/s", title=f"{settings['checkpoint_path']} on {name}")
    for column in table.columns[1:]:
        column.justify = "right"
    first: Perplexity | None = None
    for label, run in zip(["as given", *against], runs, strict=True):
        path = str(run["checkpoint_path"])
        others = {key: value for key, value in run.items() if key != "checkpoint_path"}
        with LLM(path, **others) as llm, progress_bar(label) as progress:
            found = perplexity(llm, text, window=window, stride=stride, progress=progress)
        first = first or found
        ratio = math.exp(found.nats - first.nats)
        table.add_row(label, f"{found.value:.4f}", f"{ratio:.5f}", str(found.tokens), f"{found.tokens / found.seconds:.0f}")
    console.print(table)
