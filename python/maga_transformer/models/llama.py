"""Llama and Mistral (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2310.06825)."""

from typing import ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Llama(Family):
    model_type = "llama"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "LLaMAForCausalLM")

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        h = b.rms_norm(x, f"{module}.input_layernorm", self.eps)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        b.rope([q, k], self.rope, self.heads.head_dim)
        h = b.attention(q, k, v, self.heads, window=self.window())
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        h = b.rms_norm(x, f"{module}.post_attention_layernorm", self.eps)
        mlp_bias = self.config.flag("mlp_bias", False)
        return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate, bias=mlp_bias))

    def window(self) -> int:
        return 0


class Mistral(Llama):
    """Llama with a sliding window in every layer, 4096 keys where the config does not say; null turns it off."""

    model_type = "mistral"
    architectures = ("MistralForCausalLM",)

    def window(self) -> int:
        if "sliding_window" in self.config.values and self.config.get("sliding_window") is None:
            return 0
        return self.config.integer("sliding_window", 4096)
