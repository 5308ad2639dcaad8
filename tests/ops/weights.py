"""Random weights in canonical forms (cpp/program/weight.h), described by a Form and handed to any backend."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from maga_transformer import _core
from maga_transformer.formats import Float8


@dataclass(frozen=True)
class Form:
    """`kind`: fp32, fp16, bf16, affine or fp8. `group` 0: the whole row. `half`: scales and offsets that fp16 holds exactly.
    `points`: offsets that stand for a whole zero point a group, as GPTQ and AWQ have them. `block` of fp8: rows and columns that
    share a scale, 0: all."""

    kind: str
    bits: int = 0
    group: int = 0
    offset: bool = False
    zero: int = 0
    half: bool = True
    points: bool = False
    block: tuple[int, int] = (1, 0)

    def __str__(self) -> str:
        if self.kind == "fp8":
            return f"fp8-by-{self.block[0] or 'all'}-by-{self.block[1] or 'all'}"
        if self.kind != "affine":
            return self.kind
        extras = f"{'-offset' if self.offset else ''}{'' if self.half else '-fp32scale'}{'-points' if self.points else ''}"
        return f"{self.bits}bit-g{self.group or 'row'}-z{self.zero}{extras}"


@dataclass(frozen=True)
class WeightData:
    shape: tuple[int, ...]  # of a stack: (matrices, rows, cols)
    values: np.ndarray  # fp32, fp16, bf16 bits, or codes; the rows of a stack one matrix after another
    form: Form
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """fp32"""
        if self.form.kind == "bf16":
            return from_bf16(self.values)
        if self.form.kind == "fp8":
            return Float8(self.values, self.block(), self.scale).dequantize()
        if self.form.kind != "affine":
            return self.values.astype(np.float32)
        rows, cols = self.values.shape
        codes = self.values.reshape(rows, -1, self.form.group or cols).astype(np.float32)
        values = self.scale[:, :, None] * (codes - np.float32(self.form.zero))
        if self.offset is not None:
            values += self.offset[:, :, None]
        return values.reshape(rows, cols)

    def rounded(self, dtype: str) -> "WeightData":
        """As a device holds it that computes in `dtype`, in fp32."""
        return WeightData(self.shape, rounded(self.dequantize(), dtype), Form("fp32"))

    def matrix(self, i: int) -> "WeightData":
        """Of a stack."""
        _, rows, cols = self.shape
        part = slice(i * rows, (i + 1) * rows)
        scale, offset = (None if each is None else each[part] for each in (self.scale, self.offset))
        if self.form.kind == "fp8":  # blocks divide the rows of a matrix
            high = self.form.block[0] or rows
            scale = self.scale[i * rows // high : (i + 1) * rows // high]
        return WeightData((rows, cols), self.values[part], self.form, scale, offset)

    def block(self) -> tuple[int, int]:
        """Of an fp8 matrix."""
        return self.form.block[0] or self.shape[0], self.form.block[1] or self.shape[1]

    def pack(self, backend: _core.Backend, name: str) -> _core.Weight:
        if len(self.shape) == 3:
            stack = backend.stack(name, self.shape)
            for each in (self.matrix(i) for i in range(self.shape[0])):
                if self.form.kind == "affine":
                    stack.add_affine(each.values, **each.numbers())
                elif self.form.kind == "fp8":
                    stack.add_float8(each.values, block=each.block(), scale=each.scale)
                else:
                    stack.add_dense(each.values, self.form.kind)
            return stack.finish()
        if self.form.kind == "fp8":
            return backend.pack_float8(name, self.shape, self.values, block=self.block(), scale=self.scale)
        if self.form.kind != "affine":
            return backend.pack_dense(name, self.shape, self.values, self.form.kind)
        return backend.pack_affine(name, self.shape, self.values, **self.numbers())

    def numbers(self) -> dict[str, Any]:
        """What the codes of an affine matrix come with."""
        group = self.form.group or self.shape[1]
        return {"bits": self.form.bits, "group": group, "scale": self.scale, "offset": self.offset, "zero": self.form.zero}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values to the nearest that fp32, fp16 or bf16 holds."""
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    return values.astype(np.float16).astype(np.float32) if dtype == "fp16" else values


def dense(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str = "fp32", mean: float = 0.0, deviation: float = 1.0
) -> WeightData:
    values = rng.normal(mean, deviation, shape).astype(np.float32)
    if kind == "fp16":
        values = values.astype(np.float16)
    if kind == "bf16":
        values = to_bf16(values)
    return WeightData(shape, values, Form(kind))


def matrix(rng: np.random.Generator, rows: int, cols: int, form: Form) -> WeightData:
    """Elements of about 1 / sqrt(cols), so that products stay near 1."""
    size = cols**-0.5
    if form.kind == "fp8":
        high, wide = form.block[0] or rows, form.block[1] or cols
        codes = _core.quantize_fp8(rng.normal(0, 1, (rows, cols)).astype(np.float32), "fp32", name="random")[0]
        scale = rng.uniform(0.5, 2, (-(-rows // high), -(-cols // wide))) * size / 150
        return WeightData((rows, cols), codes, form, scale.astype(np.float32))
    if form.kind != "affine":
        return dense(rng, (rows, cols), form.kind, deviation=size)
    codes = rng.integers(0, 2**form.bits, (rows, cols), dtype=np.uint8)
    groups = (rows, cols // (form.group or cols))
    # Some formats have negative scales.
    scale = rng.uniform(0.5, 2, groups) * rng.choice([-1, 1], groups) * size / 2 ** (form.bits - 1)
    offset = rng.normal(0, size, groups) if form.offset else None
    stored = np.float16 if form.half else np.float32
    scale = scale.astype(stored).astype(np.float32)
    if offset is not None:
        offset = offset.astype(stored).astype(np.float32)
    if form.points:
        offset = -scale * rng.integers(0, 2**form.bits, groups).astype(np.float32)
    return WeightData((rows, cols), codes, form, scale, offset)


def stack(rng: np.random.Generator, count: int, rows: int, cols: int, form: Form) -> WeightData:
    return replace(matrix(rng, count * rows, cols, form), shape=(count, rows, cols))
