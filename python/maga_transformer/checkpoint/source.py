"""What a weight is made of: rows of stored tensors. A program (cpp/program/program.h) keeps sources as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint

_TEXT = re.compile(
    r"(.*?)(?:\[#(\d+)\])?(?:\[(transposed|flat)\])?(?:\[(\d+):(\d+)/(\d+)\])?(\[columns\])?(\[unit\])?(?:\[\*([-+.\de]+)\])?"
)


@dataclass(frozen=True)
class Source:
    """All rows of a tensor, or those whose index modulo `period` is in [begin, end): of a tensor that holds the rows of q, k and v
    head by head, the rows of k; with `period` the number of rows, one range of them. As text: name, name[begin:end/period]."""

    tensor: str
    begin: int = 0
    end: int = 0
    period: int = 0  # 0: all rows
    as_columns: bool = False  # the rows become the columns of a matrix; as text: name[columns]
    unit: bool = False  # each row is divided by its Euclidean norm; as text: name[unit]
    factor: float = 1.0  # all values are multiplied by it; as text: name[*factor]
    layout: str = ""  # "transposed", or "flat": a matrix as one vector; as text: name[transposed], before its rows are chosen
    matrix: int | None = None  # of a stack, before its layout; of a matrix, the row as a vector; as text: name[#matrix]

    @staticmethod
    def parse(text: str) -> Source:
        match = _TEXT.fullmatch(text)
        assert match is not None  # the expression takes any text
        begin, end, period = (int(match[group] or 0) for group in (4, 5, 6))
        matrix = None if match[2] is None else int(match[2])
        return Source(
            match[1], begin, end, period, match[7] is not None, match[8] is not None, float(match[9] or 1), match[3] or "", matrix
        )

    def __str__(self) -> str:
        layout = f"[{self.layout}]" if self.layout else ""
        rows = f"[{self.begin}:{self.end}/{self.period}]" if self.period else ""
        part = ("" if self.matrix is None else f"[#{self.matrix}]") + layout
        rows += "[columns]" if self.as_columns else ""
        return self.tensor + part + rows + ("[unit]" if self.unit else "") + (f"[*{self.factor!r}]" if self.factor != 1 else "")

    def rows_of(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows of a tensor in any row-separable form, before they become columns; a single range stays a view of the mapped
        file."""
        if self.matrix is not None:
            values = values[self.matrix]
        if self.layout:
            values = values.T if self.layout == "transposed" else values.reshape(-1)
        if not self.period:
            return values
        if values.shape[0] % self.period:
            raise ValueError(f"tensor {self.tensor} has {values.shape[0]} rows, not a multiple of {self.period}")
        rest = values.shape[1:]
        blocks = values.reshape(-1, self.period, *rest)[:, self.begin : self.end]
        return blocks.reshape(-1, *rest)

    def nbytes(self, checkpoint: Checkpoint) -> int:
        whole = checkpoint.nbytes(self.tensor)
        if self.matrix is not None:
            whole //= checkpoint.shape(self.tensor)[0]
        return whole * (self.end - self.begin) // self.period if self.period else whole


def stored_bytes(checkpoint: Checkpoint, sources: list[str]) -> int:
    return sum(Source.parse(source).nbytes(checkpoint) for source in sources)
