"""Llama and Mistral (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2310.06825), and what shares Llama's layer."""

from typing import ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Llama(Family):
    model_type = "llama"
    aliases: ClassVar[tuple[str, ...]] = ("Yi",)
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "LLaMAForCausalLM", "YiForCausalLM", "DeciLMForCausalLM")

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        norms = ("ln1", "ln2") if b.has(f"{module}.ln1.weight") else ("input_layernorm", "post_attention_layernorm")  # early Yi
        q, k, v = self.qkv(b, b.norm(x, f"{module}.{norms[0]}", self.norm), f"{module}.self_attn")
        h = self.attend(b, q, k, v, window=self.window())
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=self.attention_bias()))
        return b.add(x, self.mlp(b, b.norm(x, f"{module}.{norms[1]}", self.norm), f"{module}.mlp"))

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        return b.qkv(x, module, self.heads, bias=self.attention_bias())

    def mlp(self, b: Builder, x: View, module: str) -> View:
        bias = self.config.flag("mlp_bias", False)
        return b.gated_mlp(x, module, self.activation, width=self.intermediate, bias=bias)

    def attention_bias(self) -> bool:
        return self.config.flag("attention_bias", False)

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


class Aquila(Llama):
    model_type = "aquila"
    aliases = ("aquila2",)
    architectures = ("AquilaModel", "AquilaForCausalLM")


class Xverse(Llama):
    model_type = "xverse"
    architectures = ("XverseForCausalLM",)
