"""GPT-NeoX and Pythia (https://arxiv.org/abs/2204.06745): attention and MLP side by side, a quarter of each head rotates."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class GptNeoX(Family):
    model_type = "gpt_neox"
    aliases = ("gpt_neox_13b",)
    architectures = ("GPTNeoXForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.25, "hidden_act": "gelu"})
    layer_tensors = LayerTensors(
        "layers.{}.attention.dense", "", "layers.{}.attention.query_key_value", "layers.{}.mlp.dense_4h_to_h"
    )
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-5)
    embedding = "gpt_neox.embed_in.weight"
    final_norm = "gpt_neox.final_layer_norm"
    head = "embed_out.weight"

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"gpt_neox.layers.{i}"
        bias = self.config.flag("attention_bias", True)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        attention = f"{module}.attention"
        q, k, v = b.split_linear(h, f"{attention}.query_key_value", self.heads.widths(), groups=self.heads.heads, bias=bias)
        attended = b.add(x, b.linear(self.attend(b, q, k, v), f"{attention}.dense", width=self.hidden, bias=bias))
        parallel = self.config.flag("use_parallel_residual", True)
        h = b.norm(x if parallel else attended, f"{module}.post_attention_layernorm", self.norm)
        mlp = f"{module}.mlp"
        width = self.intermediate
        return b.add(attended, b.mlp(h, f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", self.activation, width=width, bias=True))
