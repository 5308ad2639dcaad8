"""Runs a program without an engine: one sequence, all of whose tokens come in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def limits(tokens: int, page_tokens: int, logit_rows: int) -> dict[str, int]:
    """What `Backend.load` is to make room for."""
    pages = -(-tokens // page_tokens)
    return {"tokens": tokens, "sequences": 1, "logit_rows": logit_rows, "pages": pages, "page_tokens": page_tokens}


def step(ids: Sequence[int], page_tokens: int, logit_rows: Sequence[int]) -> dict[str, Any]:
    """What `Executable.run` takes."""
    count, pages = len(ids), -(-len(ids) // page_tokens)
    return {
        "ids": list(ids),
        "positions": list(range(count)),
        "sequence_start": [0, count],
        "kv_length": [count],
        "page_start": [0, pages],
        "pages": list(range(pages)),
        "logit_rows": logit_rows,
    }
