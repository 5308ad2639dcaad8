"""OLMoE (https://arxiv.org/abs/2409.02060): Llama's block with norms over all of q and of k, and experts."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.moe import mixture, softmax_routing


class Olmoe(Family):
    model_type = "olmoe"
    architectures = ("OlmoeForCausalLM",)
    norm_eps = ("rms_norm_eps", 1e-5)

    def layer(self, b: Builder, x: View, i: int) -> View:
        config = self.config
        config.require("clip_qkv")
        module, bias = f"model.layers.{i}", config.flag("attention_bias", False)
        q, k, v = b.qkv(b.norm(x, f"{module}.input_layernorm", self.norm), f"{module}.self_attn", self.heads, bias=bias)
        b.norm_in_place(q, f"{module}.self_attn.q_norm", self.norm, q.width)
        b.norm_in_place(k, f"{module}.self_attn.k_norm", self.norm, k.width)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        routing = softmax_routing(config, 64, 8, renormalise=config.flag("norm_topk_prob", False))
        return b.add(x, mixture(b, h, f"{module}.mlp", routing, config.integer("intermediate_size"), self.activation))
