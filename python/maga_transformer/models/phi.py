"""Phi-1, 1.5 and 2 (https://arxiv.org/abs/2309.05463): attention and MLP of one normalised input, biases everywhere."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Phi(Family):
    model_type = "phi"
    architectures = ("PhiForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"})
    layer_tensors = LayerTensors(output="model.layers.{}.self_attn.dense", down="model.layers.{}.mlp.fc2")
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-5)
    final_norm = "model.final_layernorm"

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=True)
        if self.config.flag("qk_layernorm", False):
            b.norm_in_place(q, f"{module}.self_attn.q_layernorm", self.norm, self.heads.head_dim)
            b.norm_in_place(k, f"{module}.self_attn.k_layernorm", self.norm, self.heads.head_dim)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.self_attn.dense", width=self.hidden, bias=True))
        return b.add(x, b.mlp(h, f"{module}.mlp.fc1", f"{module}.mlp.fc2", self.activation, width=self.intermediate, bias=True))

    def logits(self, b: Builder, x: View, vocab: int | None) -> None:
        b.head(x, self.head, vocab=vocab, bias="lm_head.bias")
