"""InternLM and InternLM2 (https://arxiv.org/abs/2403.17297): Llama with biases; q, k and v in one tensor, group by group."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.llama import Llama


class InternLM(Llama):
    model_type = "internlm"
    architectures = ("InternLMForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"attention_bias": "bias"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"attention_bias": True})

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.config.require("rotary", {"base": 10000, "type": "origin"})  # of the 8k chat model: dynamic, in its own way


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
