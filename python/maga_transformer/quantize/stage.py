"""One stage's tensors: its linears quantised, the others as they were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.checkpoint.safetensors_writer import Stored
from maga_transformer.formats import read_weight
from maga_transformer.formats.canonical import rounded
from maga_transformer.formats.ggml import FORMATS
from maga_transformer.quantize import awq, layouts
from maga_transformer.quantize.calibrate import Inputs
from maga_transformer.quantize.gptq import gptq
from maga_transformer.quantize.grid import Floats, round_to_nearest
from maga_transformer.quantize.plan import Linear, Stage, View
from maga_transformer.quantize.recipe import Recipe


@dataclass(frozen=True)
class StageQuantizer:
    checkpoint: Checkpoint
    program: _core.Program
    recipe: Recipe
    float_type: str  # of tensors that the source stores in blocks, or apart from the others; "": as they are

    def quantize(self, stage: Stage, inputs: dict[View, Inputs] | None) -> dict[str, Stored]:
        linears = {linear.tensor: linear for linear in stage.linears}
        floats = {name: self._floats(name) for name in linears}
        for name, values in floats.items():
            if not np.isfinite(values).all():
                raise ValueError(f"{self.checkpoint.file(name)}: {name} has values that are not finite")
        changed: set[str] = set()
        if self.recipe.method == "awq":
            assert inputs is not None
            inputs, changed = self._scale(stage, inputs, floats)
        stored: dict[str, Stored] = {}
        for name in stage.tensors:
            if name in linears:
                stored |= self._linear(linears[name], floats[name], None if inputs is None else inputs[linears[name].input])
            else:
                stored[name] = self._rounded(name, floats[name]) if name in changed else self.kept(name)
        return stored

    def kept(self, name: str) -> Stored:
        """A tensor that is not quantised."""
        dtype = self.checkpoint.dtype(name)
        if dtype in FORMATS or (self.float_type and dtype in ("fp32", "fp16", "bf16") and dtype != self.float_type):
            return self._rounded(name, self._floats(name))
        return dtype, self.checkpoint.tensor(name)

    def _scale(self, stage: Stage, inputs: dict[View, Inputs], floats: dict[str, Floats]) -> tuple[dict[View, Inputs], set[str]]:
        """Folds AWQ's scales into `floats`; the inputs afterwards, and which tensors besides linears have changed."""
        changed: set[str] = set()
        for fold in awq.folds(self.program, stage):
            for name in fold.tensors:
                floats.setdefault(name, self._floats(name))
            weights = [floats[linear.tensor] for linear in stage.linears if linear.input == fold.input]
            scale = awq.search_scale(weights, inputs[fold.input], self.recipe.bits, self.recipe.group(len(inputs[fold.input].gram)))
            awq.apply(fold, scale, floats, stage.linears)
            inputs = {**inputs, fold.input: awq.scaled_inputs(inputs[fold.input], scale)}
            changed.update(fold.tensors)
        return inputs, changed

    def _linear(self, linear: Linear, weight: Floats, inputs: Inputs | None) -> dict[str, Stored]:
        recipe, module = self.recipe, linear.module
        if recipe.method in ("int8", "fp8"):
            layout = layouts.int8 if recipe.method == "int8" else layouts.fp8
            try:
                return layout(module, weight, self._type_of(linear.tensor))
            except ValueError as error:
                raise ValueError(f"{self.checkpoint.file(linear.tensor)}: {linear.tensor}: {error}") from None
        assert inputs is not None
        if recipe.method == "gptq":
            return layouts.gptq(module, gptq(weight, inputs.gram, recipe), recipe)
        group = recipe.group(linear.columns)
        return layouts.awq(module, round_to_nearest(weight, recipe.bits, group, symmetric=False, gram=inputs.gram))

    def _floats(self, name: str) -> Floats:
        return np.asarray(read_weight(self.checkpoint, [name]).dequantize(), np.float32)

    def _type_of(self, name: str) -> str:
        return self.float_type or self.checkpoint.dtype(name)

    def _rounded(self, name: str, values: Floats) -> Stored:
        dtype = self._type_of(name)
        stored = rounded(np.ascontiguousarray(values), dtype)
        if dtype == "fp16" and not np.isfinite(stored).all():
            raise ValueError(f"{self.checkpoint.file(name)}: {name} has values beyond fp16")
        return dtype, stored
