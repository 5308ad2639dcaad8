"""MXFP4 as gpt-oss stores its experts: blocks of 32 numbers of four bits that share a power of two
(OCP Microscaling Formats 1.0). All experts of a layer are one tensor, gate and up rows in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Affine
from maga_transformer.formats.quantized import tensor_of

BLOCK = 32
ZERO = 12
# Twice the number that a code of one sign bit, two of exponent and one of mantissa stands for, above ZERO: as whole numbers they
# are an affine weight of five bits, which holds them exactly.
CODES = np.array([ZERO + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12)], np.uint8)

_FUSED, _DOWN = "gate_up_proj", "down_proj"
_PARTS = {"gate_proj": (_FUSED, slice(0, None, 2)), "up_proj": (_FUSED, slice(1, None, 2)), _DOWN: (_DOWN, slice(None))}


def scales_of(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Of whole numbers that are twice the stored ones."""
    scales: npt.NDArray[np.float32] = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    return scales


def affine(blocks: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> Affine:
    """Blocks (rows, groups, 16), of each byte the low half first; exponents (rows, groups)."""
    rows, groups, _ = blocks.shape
    codes = np.empty((rows, groups, BLOCK // 2, 2), np.uint8)
    codes[..., 0], codes[..., 1] = CODES[blocks & 15], CODES[blocks >> 4]
    return Affine(codes.reshape(rows, groups * BLOCK), 5, BLOCK, scales_of(exponents), None, ZERO)


class Mxfp4:
    """Each expert's linears are shown as modules of their own: experts.3.gate_proj, .up_proj, .down_proj."""

    def __init__(self, checkpoint: Checkpoint, settings: dict[str, Any]) -> None:
        self._places: dict[str, tuple[str, int, slice]] = {}  # module -> its tensor, without _blocks; expert; rows
        names = set(checkpoint.names())
        stacks = [name.removesuffix(f".{_DOWN}_blocks") for name in names if name.endswith(f".{_DOWN}_blocks")]
        for stack in sorted(stacks):
            for expert in range(checkpoint.shape(f"{stack}.{_DOWN}_blocks")[0]):
                for part, (tensor, rows) in _PARTS.items():
                    self._places[f"{stack}.{expert}.{part}"] = (f"{stack}.{tensor}", expert, rows)

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        return {module: (f"{tensor}_blocks", f"{tensor}_scales") for module, (tensor, _, _) in self._places.items()}

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        tensor, _, rows = self._places[module]
        name = f"{tensor}_blocks"
        shape = checkpoint.shape(name)
        if len(shape) != 4 or shape[3] != BLOCK // 2:
            raise ValueError(f"{checkpoint.file(name)}: tensor {name} has shape {shape}, expected (experts, rows, blocks, 16)")
        return len(range(*rows.indices(shape[1]))), shape[2] * BLOCK

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        return "mxfp4"

    def read(self, checkpoint: Checkpoint, module: str) -> Affine:
        tensor, expert, rows = self._places[module]
        blocks = tensor_of(checkpoint, f"{tensor}_blocks", ("uint8",), (None, None, None, BLOCK // 2))
        exponents = tensor_of(checkpoint, f"{tensor}_scales", ("uint8", "fp8_e8m0"), blocks.shape[:3])
        return affine(blocks[expert, rows], exponents[expert, rows].view(np.uint8))
