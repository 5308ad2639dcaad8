"""Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671): experts, and one that all tokens share, times a gate of its own."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder, Routing
from maga_transformer.models.moe import is_sparse, mixture, softmax_routing
from maga_transformer.models.qwen2 import Qwen2


class Qwen2Moe(Qwen2):
    model_type = "qwen_2_moe"
    aliases = ("qwen2_moe",)
    architectures = ("Qwen2MoeForCausalLM",)

    def feed_forward(self, b: Builder, x: View, h: View, i: int) -> View:
        config = self.config
        if not is_sparse(config, i):
            return super().feed_forward(b, x, h, i)
        module = f"model.layers.{i}.mlp"
        routing = softmax_routing(config, 60, 4, renormalise=config.flag("norm_topk_prob", False))
        x = b.add(x, mixture(b, h, module, routing, config.integer("moe_intermediate_size", 1408), self.activation))
        # A mixture of one expert, whose weight is the sigmoid of its gate.
        shared = b.alone([f"{module}.shared_expert"], config.integer("shared_expert_intermediate_size", 5632), h.width)
        gate = b.linear(h, f"{module}.shared_expert_gate", width=1)
        return b.add(x, b.moe(h, gate, f"{module}.shared_expert", shared, Routing(1, 1, score="sigmoid"), self.activation))

    def sliding_window(self, i: int) -> int:
        if self.config.get("layer_types") is None:
            self.config.require("use_sliding_window", False)
        return super().sliding_window(i)
