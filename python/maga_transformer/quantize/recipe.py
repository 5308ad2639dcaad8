"""What `maga quantize` is asked for. Every field is checked when it is made; a mistake names the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METHODS = ("gptq", "awq", "int8", "fp8")
ACT_ORDERS = ("none", "static", "dynamic")
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,), "int8": (8,), "fp8": (8,)}
_DEFAULT_BITS = {"gptq": 4, "awq": 4, "int8": 8, "fp8": 8}


@dataclass(frozen=True)
class Recipe:
    method: str
    bits: int  # 0: the method's own
    group_size: int  # columns that share a scale; -1: all of a row
    symmetric: bool  # gptq: codes around the middle one, without zero points
    act_order: str  # gptq: in which order columns are rounded, see gptq.py
    damp: float  # gptq: what is added to the Hessian's diagonal, as a share of its mean
    checkpoint_format: str  # gptq, or gptq_v2, which stores zeros as they are

    def __post_init__(self) -> None:
        _one_of("--method", self.method, METHODS)
        bits = self.bits or _DEFAULT_BITS[self.method]
        object.__setattr__(self, "bits", bits)
        _one_of(f"--bits, with --method {self.method},", bits, _BITS[self.method])
        if self.group_size < 1 and self.group_size != -1:
            raise ValueError(f"--group-size {self.group_size}: a number of columns is expected, or -1 for all of them")
        _one_of("--act-order", self.act_order, ACT_ORDERS)
        if not 0 < self.damp < 1:
            raise ValueError(f"--damp {self.damp:g}: it must lie between 0 and 1")
        _one_of("--checkpoint-format", self.checkpoint_format, ("gptq", "gptq_v2"))

    @property
    def calibrated(self) -> bool:
        return self.method in ("gptq", "awq")

    def group(self, columns: int) -> int:
        return columns if self.group_size == -1 else self.group_size


@dataclass(frozen=True)
class Calibration:
    file: str  # UTF-8 text; "": the one that comes with the package
    samples: int  # sequences, as far as the text gives them
    length: int  # tokens of each

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"--samples {self.samples}: at least 1 is needed")
        if self.length < 8:
            raise ValueError(f"--sample-length {self.length}: at least 8 tokens are needed")


def _one_of(option: str, value: Any, valid: tuple[Any, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{option} {value}: not supported (supported: {', '.join(map(str, valid))})")
