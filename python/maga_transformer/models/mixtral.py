"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with eight experts a layer, of which a token takes two."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.llama import Mistral
from maga_transformer.models.moe import softmax_routing


class Mixtral(Mistral):
    model_type = "mixtral"
    architectures = ("MixtralForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"num_experts": "num_local_experts"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"rope_theta": 1e6})

    def mlp(self, b: Builder, x: View, module: str) -> View:
        moe = module.removesuffix("mlp") + "block_sparse_moe"
        routing = softmax_routing(self.config, 8, 2, renormalise=True)
        logits = b.linear(x, f"{moe}.gate", width=routing.experts)
        experts = b.experts(
            f"{moe}.experts", routing.experts, self.config.integer("intermediate_size"), x.width, ("w1", "w3", "w2")
        )
        return b.moe(x, logits, f"{moe}.experts", experts, routing, self.activation)

    def window(self) -> int:
        return self.config.integer("sliding_window") if self.config.get("sliding_window") is not None else 0
