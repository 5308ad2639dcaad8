"""compressed-tensors, as llm-compressor writes it: pack-quantized (weight_packed of 2 to 8 bits), int-quantized and
float-quantized. Only weights are quantised here: activations, which some schemes round as well, keep their precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from maga_transformer.checkpoint.interface import Checkpoint
from maga_transformer.formats.canonical import Affine, Canonical
from maga_transformer.formats.fp8 import Fp8
from maga_transformer.formats.quantized import floats, setting, tensor_of, unpack

_PARTS = (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".input_scale", ".input_zero_point")


def compressed_tensors(checkpoint: Checkpoint, settings: dict[str, Any]) -> PackedInt | Int8 | Fp8:
    """The reader of the format that all groups of the config share."""
    layouts = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    layout = setting(checkpoint, settings, "format", layouts)
    groups = settings.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not weights or not all(isinstance(entry, dict) for entry in weights):
        raise ValueError(
            f"{checkpoint.path}: quantization_config config_groups is {groups!r}, expected an object of groups with weights"
        )
    kinds = {(entry.get("type"), entry.get("num_bits")) for entry in weights}
    if len(kinds) != 1:
        raise ValueError(
            f"{checkpoint.path}: quantization_config config_groups have weights of several kinds, which is not supported"
        )
    kind, bits = kinds.pop()
    if kind == "float":
        setting(checkpoint, {"num_bits": bits}, "num_bits", (8,))
        return Fp8(checkpoint, {"weight_block_size": weights[0].get("block_structure")})
    if layout == "pack-quantized":
        return PackedInt(checkpoint, bits, zeros=all(entry.get("symmetric") is False for entry in weights))
    setting(checkpoint, {"num_bits": bits}, "num_bits", (8,))
    return Int8()


def _parts(module: str, names: set[str], needed: tuple[str, ...]) -> tuple[str, ...]:
    """A module's tensors: those that it must have, and others that are there."""
    others = [part for part in _PARTS if part not in needed and module + part in names]
    return tuple(module + part for part in (*needed, *others))


class PackedInt:
    """weight_packed int32 (N, K * bits / 32) along K, the lowest bits first, codes + 2^(bits - 1); weight_scale (N, groups);
    weight_zero_point int32 (N * bits / 32, groups), packed along N."""

    def __init__(self, checkpoint: Checkpoint, bits: object, *, zeros: bool) -> None:
        """`zeros`: whether a linear must have zero points; without, it may."""
        self._bits: int = setting(checkpoint, {"num_bits": bits}, "num_bits", (2, 3, 4, 8))
        self._needed = (".weight_packed", ".weight_scale", ".weight_shape", *((".weight_zero_point",) if zeros else ()))

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        names = set(checkpoint.names())
        found = sorted(name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed"))
        return {module: _parts(module, names, self._needed) for module in found}

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        rows, columns = tensor_of(checkpoint, module + ".weight_shape", ("int64", "int32"), (2,)).tolist()
        return rows, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        zeros = ", zeros" if module + ".weight_zero_point" in checkpoint.names() else ""
        return f"packed int{self._bits} by {self._group(checkpoint, module)}{zeros}"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        if module + ".weight_g_idx" in checkpoint.names():
            raise ValueError(
                f"{checkpoint.file(module + '.weight_g_idx')}: the groups of {module} are no runs of columns (actorder), "
                "which is not supported"
            )
        rows, columns = self.shape(checkpoint, module)
        group = self._group(checkpoint, module)
        middle = 1 << (self._bits - 1)
        words = -(-columns * self._bits // 32)
        codes = unpack(tensor_of(checkpoint, module + ".weight_packed", ("int32",), (rows, words)), self._bits, columns)
        scale = floats(checkpoint, module + ".weight_scale", (rows, columns // group))
        if module + ".weight_zero_point" not in checkpoint.names():
            return Affine(codes, self._bits, group, scale, None, middle)
        packed = tensor_of(checkpoint, module + ".weight_zero_point", ("int32",), (-(-rows * self._bits // 32), columns // group))
        zeros = unpack(np.ascontiguousarray(packed.T), self._bits, rows).T
        return Affine(codes, self._bits, group, scale, -scale * zeros.astype(np.float32), 0)

    def _group(self, checkpoint: Checkpoint, module: str) -> int:
        """Columns of a group: the scale says how many there are."""
        _, columns = self.shape(checkpoint, module)
        groups: int = tensor_of(checkpoint, module + ".weight_scale", ("fp32", "fp16", "bf16"), (None, None)).shape[1]
        if not groups or columns % groups:
            raise ValueError(f"{checkpoint.file(module + '.weight_scale')}: {module} has {columns} columns in {groups} groups")
        return columns // groups


class Int8:
    """weight int8 (N, K) with weight_scale (N, 1), or one for all of it."""

    def modules(self, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
        names = set(checkpoint.names())
        found = sorted(
            name.removesuffix(".weight") for name in names if name.endswith(".weight") and checkpoint.dtype(name) == "int8"
        )
        return {module: _parts(module, names, (".weight", ".weight_scale")) for module in found}

    def shape(self, checkpoint: Checkpoint, module: str) -> tuple[int, int]:
        rows, columns = tensor_of(checkpoint, module + ".weight", ("int8",), (None, None)).shape
        return rows, columns

    def form(self, checkpoint: Checkpoint, module: str) -> str:
        return f"int8 by {self.shape(checkpoint, module)[1]}"

    def read(self, checkpoint: Checkpoint, module: str) -> Canonical:
        if module + ".weight_zero_point" in checkpoint.names() and checkpoint.tensor(module + ".weight_zero_point").any():
            raise ValueError(
                f"{checkpoint.file(module + '.weight_zero_point')}: {module} has zero points, which int8 weights have not elsewhere"
            )
        rows, columns = self.shape(checkpoint, module)
        codes = tensor_of(checkpoint, module + ".weight", ("int8",), (rows, columns)).view(np.uint8) ^ np.uint8(128)
        name = module + ".weight_scale"
        shape = checkpoint.shape(name)
        if shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
            raise ValueError(f"{checkpoint.file(name)}: tensor {name} has shape {shape} for a weight of ({rows}, {columns})")
        scale = floats(checkpoint, name, (None,) * len(shape)).reshape(-1, 1)
        return Affine(codes, 8, columns, np.ascontiguousarray(np.broadcast_to(scale, (rows, 1))), None, 128)
