"""Sequences over an Executable, without the engine: logits of any chunking, and greedy text of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from maga_transformer import _core
from maga_transformer.adapters.ptuning import open_ptuning
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program

PAGE_TOKENS = 16


@dataclass
class Part:
    """What one sequence brings to a step: `ids` after `before` earlier tokens."""

    sequence: int
    ids: Sequence[int]
    before: int
    prompt_length: int
    rows: Sequence[int]  # of `ids`, whose logits are wanted
    prompt: Sequence[int] = ()  # of models with a ContextRule


class Runner:
    def __init__(
        self,
        backend: _core.Backend,
        checkpoint: Checkpoint,
        *,
        length: int,
        tokens: int,
        sequences: int = 1,
        kv_dtype: str = "fp32",
        model_type: str | None = None,
        quantization: str = "",
        ptuning: str = "",
    ) -> None:
        """`length`: of the longest sequence; `tokens`: of the largest step; `ptuning`: a folder, whose virtual tokens have the ids
        behind the vocabulary, or whose K/V entries every sequence begins with."""
        tuned = open_ptuning(ptuning) if ptuning else None
        self.program, self.family = build_program(checkpoint, model_type)
        weights = load_weights(backend, self.program, checkpoint, quantization=quantization)
        if tuned:
            tuned.check(self.program, self.family)
            weights += tuned.add_to(self.program, backend)
        self.given = tuned.tokens if tuned and tuned.in_pages else 0  # K/V entries before a sequence's own
        self.shift = self.given if tuned and tuned.has_positions else 0  # of positions
        self.pages_each = -(-(self.given + length) // PAGE_TOKENS)
        given = -(-self.given // PAGE_TOKENS)
        count = given + self.pages_each * sequences
        self.pages = list(range(given, count))[::-1]  # any order must do
        self.tokens = tokens
        self.executable = backend.load(
            self.program,
            weights,
            tokens=tokens,
            sequences=sequences,
            logit_rows=tokens,
            pages=count,
            page_tokens=PAGE_TOKENS,
            kv_dtype=kv_dtype,
        )
        if tuned:
            tuned.fill(self.executable, self.program)
        for i in range(given):
            for sequence in range(sequences):
                self.executable.copy_page(i, self.pages[sequence * self.pages_each + i])

    def step(self, parts: Sequence[Part]) -> np.ndarray:
        """Logits (rows of all parts, vocab)."""
        starts = np.cumsum([0, *(len(part.ids) for part in parts)]).tolist()
        lengths = [self.given + part.before + len(part.ids) for part in parts]
        pages = [
            self.pages[part.sequence * self.pages_each :][: -(-n // PAGE_TOKENS)] for part, n in zip(parts, lengths, strict=True)
        ]
        end, held, whole = self.program.context
        places: dict[str, list[int]] = {"context": [], "block_positions": []}
        positions = []
        for part in parts:
            context, kept = part.prompt_length if whole else 0, 0
            if part.prompt:
                context, kept = part.prompt.index(end), next(part.prompt.index(token) for token in held if token in part.prompt)
            indices = range(part.before, part.before + len(part.ids))
            positions += [self.shift + (i if not part.prompt or i < context else kept) for i in indices]
            places["block_positions"] += [0 if not part.prompt or i < context else i - context + 1 for i in indices]
            places["context"].append(self.given + context)
        self.executable.run(
            ids=[token for part in parts for token in part.ids],
            positions=positions,
            sequence_start=starts,
            kv_length=lengths,
            page_start=np.cumsum([0, *map(len, pages)]).tolist(),
            pages=[page for own in pages for page in own],
            logit_rows=[start + row for start, part in zip(starts, parts, strict=False) for row in part.rows],
            prompt_length=[self.shift + part.prompt_length for part in parts],
            **(places if end >= 0 or whole else {}),
        )
        return self.executable.logits().copy()

    def logits(self, ids: Sequence[int], chunks: Sequence[int] | None = None) -> np.ndarray:
        """Logits (tokens, vocab) of every position; `chunks`: how many tokens each step brings."""
        found, before = [], 0
        for count in chunks or [len(ids)]:
            found.append(self.step([Part(0, ids[before : before + count], before, len(ids), range(count))]))
            before += count
        assert before == len(ids)
        return np.concatenate(found)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int, stop: frozenset[int]) -> list[list[int]]:
        """Up to `count` ids after each prompt, all decoded as one batch; an id of `stop` ends them and is kept."""
        texts = [list(prompt) for prompt in prompts]
        live = list(range(len(prompts)))
        for sequence, ids in enumerate(texts):
            ids.append(int(self.step([Part(sequence, ids, 0, len(ids), [len(ids) - 1])]).argmax()))
        for _ in range(count - 1):
            live = [sequence for sequence in live if texts[sequence][-1] not in stop]
            if not live:
                break
            parts = [
                Part(sequence, texts[sequence][-1:], len(texts[sequence]) - 1, len(prompts[sequence]), [0]) for sequence in live
            ]
            for sequence, token in zip(live, self.step(parts).argmax(axis=1), strict=True):
                texts[sequence].append(int(token))
        return [ids[len(prompt) :] for ids, prompt in zip(texts, prompts, strict=True)]


def embedded(backend: _core.Backend, checkpoint: Checkpoint, texts: Sequence[Sequence[int]], kv_dtype: str = "fp32") -> np.ndarray:
    """What a model that embeds or scores makes of texts, all in one step."""
    length = max(map(len, texts))
    tokens = sum(map(len, texts))
    runner = Runner(backend, checkpoint, length=length, tokens=tokens, sequences=len(texts), kv_dtype=kv_dtype)
    assert runner.program.embeds
    return runner.step([Part(i, ids, 0, len(ids), [len(ids) - 1]) for i, ids in enumerate(texts)])
