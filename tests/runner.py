"""One sequence at a time over an Executable, without the engine: logits of any chunking, and greedy text."""

from collections.abc import Sequence

import numpy as np
from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

PAGE_TOKENS = 16


class Runner:
    def __init__(self, backend: _core.Backend, checkpoint: Checkpoint, *, length: int, tokens: int) -> None:
        """`length`: of the longest sequence; `tokens`: of the largest step."""
        self.program, self.family = build_program(checkpoint)
        pages = -(-length // PAGE_TOKENS)
        self.pages = list(range(pages))[::-1]  # any order must do
        self.executable = backend.load(
            self.program,
            load_weights(backend, self.program, checkpoint),
            tokens=tokens,
            sequences=1,
            logit_rows=tokens,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            kv_dtype="fp32",
        )

    def step(self, ids: Sequence[int], before: int, prompt_length: int, rows: Sequence[int]) -> np.ndarray:
        """Logits (rows, vocab) after `ids`, which follow `before` earlier tokens."""
        length = before + len(ids)
        used = -(-length // PAGE_TOKENS)
        self.executable.run(
            ids=list(ids),
            positions=list(range(before, length)),
            sequence_start=[0, len(ids)],
            kv_length=[length],
            page_start=[0, used],
            pages=self.pages[:used],
            logit_rows=list(rows),
            prompt_length=[prompt_length],
        )
        return self.executable.logits().copy()

    def logits(self, ids: Sequence[int], chunks: Sequence[int] | None = None) -> np.ndarray:
        """Logits (tokens, vocab) of every position; `chunks`: how many tokens each step brings."""
        found, before = [], 0
        for count in chunks or [len(ids)]:
            found.append(self.step(ids[before : before + count], before, len(ids), range(count)))
            before += count
        assert before == len(ids)
        return np.concatenate(found)

    def greedy(self, prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
        """Up to `count` ids after the prompt; an id of `stop` ends them and is kept."""
        ids: list[int] = list(prompt)
        logits = self.step(ids, 0, len(prompt), [len(ids) - 1])
        for _ in range(count):
            ids.append(int(logits[0].argmax()))
            if ids[-1] in stop or len(ids) == len(prompt) + count:
                break
            logits = self.step(ids[-1:], len(ids) - 1, len(prompt), [0])
        return ids[len(prompt) :]
