"""StarCoder2 (https://arxiv.org/abs/2402.19173): layer norms, biases, an MLP without a gate, a sliding window."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Starcoder2(Family):
    model_type = "starcoder2"
    architectures = ("Starcoder2ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True})
    layer_tensors = LayerTensors(down="model.layers.{}.mlp.c_proj")
    norm_kind = "layer"
    norm_eps = ("norm_epsilon", 1e-5)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("use_bias", True)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        window = 0 if self.config.get("sliding_window") is None else self.config.integer("sliding_window")
        h = self.attend(b, q, k, v, window=window)
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        mlp = f"{module}.mlp"
        return b.add(x, b.mlp(h, f"{mlp}.c_fc", f"{mlp}.c_proj", self.activation, width=self.intermediate, bias=bias))
