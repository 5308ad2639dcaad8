"""Qwen1.5, Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on q, k and v, windows in the upper layers."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Qwen2(Family):
    model_type = "qwen_2"
    aliases = ("qwen2",)
    architectures = ("Qwen2ForCausalLM",)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=self.config.flag("qkv_bias", True))
        h = self.attend(b, q, k, v, window=self.sliding_window(i))
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        return self.feed_forward(b, x, h, i)

    def feed_forward(self, b: Builder, x: View, h: View, i: int) -> View:
        """x plus what layer `i` makes of h."""
        return b.add(x, b.gated_mlp(h, f"model.layers.{i}.mlp", self.activation, width=self.intermediate))
