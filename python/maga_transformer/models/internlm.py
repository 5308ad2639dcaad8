"""InternLM and InternLM2 (https://arxiv.org/abs/2403.17297): Llama with biases; q, k and v in one tensor, group by group."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.config import positive_number
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.llama import Llama
from maga_transformer.models.rope import Rope, read_rope


class InternLM(Llama):
    model_type = "internlm"
    architectures = ("InternLMForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_bias": "bias"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"attention_bias": True})

    def read_rope(self) -> Rope:
        """`rotary` of the 8k chat model is dynamic with a factor of 1: plain, up to where the context ends."""
        rotary = self.config.get("rotary")
        if rotary is None:
            return read_rope(self.config, self.heads.head_dim)
        if not isinstance(rotary, dict) or rotary.get("type") not in ("origin", "dynamic") or rotary.get("scaling_factor", 1) != 1:
            raise self.config.error("rotary", rotary, "an object with type origin or dynamic, and no scaling_factor beside 1")
        return read_rope(self.config, self.heads.head_dim, theta=positive_number(self.config, "rotary.base", rotary.get("base")))


class InternLM2(Family):
    model_type = "internlm2"
    architectures = ("InternLM2ForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_bias": "bias"})
    layer_tensors = LayerTensors(
        "layers.{}.attention.wo", "layers.{}.attention.wk", "layers.{}.attention.wqkv", "layers.{}.feed_forward.w2"
    )
    embedding = "model.tok_embeddings.weight"
    head = "output.weight"

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        h = b.norm(x, f"{module}.attention_norm", self.norm)
        widths, groups = self.heads.widths(), self.heads.kv_heads
        if b.has(f"{module}.attention.wq.weight"):  # apart, as GGUF files have them
            q, k, v = b.linears(h, [f"{module}.attention.w{name}" for name in "qkv"], widths=widths, bias=bias)
        else:
            q, k, v = b.split_linear(h, f"{module}.attention.wqkv", widths, groups=groups, bias=bias)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.attention.wo", width=self.hidden, bias=bias))
        h = b.norm(x, f"{module}.ffn_norm", self.norm)
        mlp = f"{module}.feed_forward"
        gate, up = b.linears(h, [f"{mlp}.w1", f"{mlp}.w3"], widths=[self.intermediate] * 2)
        return b.add(x, b.linear(b.activate(gate, up, self.activation), f"{mlp}.w2", width=self.hidden))
