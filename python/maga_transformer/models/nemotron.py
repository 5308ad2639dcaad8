"""Nemotron and Minitron (https://arxiv.org/abs/2402.16819): layer norms of 1 + weight, half of each head rotates, squared ReLU."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.llama import Llama


class Nemotron(Llama):
    model_type = "nemotron"
    architectures = ("NemotronForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.5, "hidden_act": "relu2"})
    norm_kind = "layer"
    norm_eps = ("norm_eps", 1e-5)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.norm = replace(self.norm, offset=1.0)

    def mlp(self, b: Builder, x: View, module: str) -> View:
        bias = self.config.flag("mlp_bias", False)
        return b.mlp(x, f"{module}.up_proj", f"{module}.down_proj", self.activation, width=self.intermediate, bias=bias)
