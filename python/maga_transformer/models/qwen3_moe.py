"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): Qwen3 with experts in place of its MLPs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.moe import is_sparse, mixture, softmax_routing
from maga_transformer.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    model_type = "qwen_3_moe"
    aliases = ("qwen3_moe",)
    architectures = ("Qwen3MoeForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"num_experts": "num_local_experts"})  # transformers 5's

    def feed_forward(self, b: Builder, x: View, h: View, i: int) -> View:
        config = self.config
        if not is_sparse(config, i):
            return super().feed_forward(b, x, h, i)
        routing = softmax_routing(config, 128, 8, renormalise=config.flag("norm_topk_prob", False))
        width = config.integer("moe_intermediate_size", 768)
        return b.add(x, mixture(b, h, f"model.layers.{i}.mlp", routing, width, self.activation))

    def sliding_window(self, i: int) -> int:
        """In every layer or none."""
        return self.config.integer("sliding_window", 4096) if self.config.flag("use_sliding_window", False) else 0
