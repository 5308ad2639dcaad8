"""Embeddings of virtual tokens, which stand before every prompt: PEFT's prompt tuning (https://arxiv.org/abs/2104.08691) and
P-tuning, whose encoder was applied when it was saved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maga_transformer import _core
from maga_transformer.adapters.peft import Adapter
from maga_transformer.formats import Dense

KINDS = ("PROMPT_TUNING", "P_TUNING")
_TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class SoftPrompt:
    adapter: Adapter
    embeddings: Dense  # (tokens, width)

    @staticmethod
    def read(adapter: Adapter) -> SoftPrompt:
        return SoftPrompt(adapter, adapter.only_tensor(_TENSOR, adapter.count("num_virtual_tokens")))

    @property
    def tokens(self) -> int:
        return int(self.embeddings.values.shape[0])

    def check(self, program: _core.Program, layers: int) -> None:
        """ValueError where it was tuned for another model than the program's, of so many layers."""
        width = next(op["out"][2] for op in program.ops if op["op"] == "embed")
        own, tuned = self.embeddings.values.shape[1], self.adapter.settings.get("num_layers")
        if own != width:
            raise self.adapter.other_base(f"embeddings of width {own}", width)
        if tuned is not None and tuned != layers:
            raise self.adapter.other_base(f"{tuned} layers", layers)

    def add_to(self, program: _core.Program, backend: _core.Backend) -> _core.Weight:
        """Gives the program ids behind the vocabulary; returns the packed weight that it has last from now on."""
        shape = list(self.embeddings.values.shape)
        program.add_virtual_tokens(program.weight(_TENSOR, [], shape))
        return backend.pack_dense(
            _TENSOR, shape, np.require(self.embeddings.values, requirements=["C", "A"]), self.embeddings.dtype
        )
