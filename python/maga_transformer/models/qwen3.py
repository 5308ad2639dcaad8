"""Qwen3 (https://arxiv.org/abs/2505.09388): a norm on each head of q and k, heads wider than hidden size over heads."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Qwen3(Family):
    model_type = "qwen_3"
    aliases = ("qwen3",)
    architectures = ("Qwen3ForCausalLM",)
    default_head_dim = 128

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        h = b.rms_norm(x, f"{module}.input_layernorm", self.eps)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        b.head_norm(q, f"{module}.self_attn.q_norm", self.eps, self.heads.head_dim)
        b.head_norm(k, f"{module}.self_attn.k_norm", self.eps, self.heads.head_dim)
        b.rope([q, k], self.rope, self.heads.head_dim)
        h = b.attention(q, k, v, self.heads, window=self.sliding_window(i))
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        h = b.rms_norm(x, f"{module}.post_attention_layernorm", self.eps)
        return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate))
