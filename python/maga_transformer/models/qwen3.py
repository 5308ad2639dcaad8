"""Qwen3 (https://arxiv.org/abs/2505.09388): a norm on each head of q and k, heads wider than hidden size over heads."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Qwen3(Family):
    model_type = "qwen_3"
    aliases = ("qwen3",)
    architectures = ("Qwen3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"head_dim": 128})

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        b.norm_in_place(q, f"{module}.self_attn.q_norm", self.norm, self.heads.head_dim)
        b.norm_in_place(k, f"{module}.self_attn.k_norm", self.norm, self.heads.head_dim)
        h = self.attend(b, q, k, v, window=self.sliding_window(i))
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        return self.feed_forward(b, x, h, i)

    def feed_forward(self, b: Builder, x: View, h: View, i: int) -> View:
        """x plus what layer `i` makes of h."""
        return b.add(x, b.gated_mlp(h, f"model.layers.{i}.mlp", self.activation, width=self.intermediate))
