"""Embeddings of virtual tokens, which stand before every prompt: PEFT's prompt tuning (https://arxiv.org/abs/2104.08691) and
P-tuning, whose encoder was applied when it was saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from maga_transformer import _core
from maga_transformer.adapters.peft import Adapter
from maga_transformer.formats import Dense
from maga_transformer.models import Family

KINDS = ("PROMPT_TUNING", "P_TUNING")
_TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class SoftPrompt:
    adapter: Adapter
    embeddings: Dense  # (tokens, width)
    has_positions: ClassVar[bool] = True
    in_pages: ClassVar[bool] = False

    @staticmethod
    def read(adapter: Adapter) -> SoftPrompt:
        return SoftPrompt(adapter, adapter.only_tensor(_TENSOR, adapter.count("num_virtual_tokens")))

    @property
    def tokens(self) -> int:
        return int(self.embeddings.values.shape[0])

    @property
    def file(self) -> str:
        return self.adapter.file

    def check(self, program: _core.Program, family: Family) -> None:
        """ValueError where it was tuned for another model than the program's."""
        width = next(op["out"][2] for op in program.ops if op["op"] == "embed")
        own, tuned = self.embeddings.values.shape[1], self.adapter.settings.get("num_layers")
        if own != width:
            raise self.adapter.other_base(f"embeddings of width {own}", width)
        if tuned is not None and tuned != family.layers:
            raise self.adapter.other_base(f"{tuned} layers", family.layers)

    def add_to(self, program: _core.Program, backend: _core.Backend) -> list[_core.Weight]:
        """Gives the program ids behind the vocabulary; returns the packed weights that it has last from now on."""
        shape = list(self.embeddings.values.shape)
        program.add_virtual_tokens(program.weight(_TENSOR, [], shape))
        values = np.require(self.embeddings.values, requirements=["C", "A"])
        return [backend.pack_dense(_TENSOR, shape, values, self.embeddings.dtype)]

    def fill(self, model: _core.Executable, program: _core.Program) -> None:
        """Its keys and values are computed."""
