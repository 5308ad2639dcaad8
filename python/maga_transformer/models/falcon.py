"""Falcon (https://arxiv.org/abs/2311.16867) in its three shapes: 7B (one KV head), 40B and later (grouped KV heads, two norms side
by side), and RW (ALiBi, attention before the MLP)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.formats.canonical import Dense, rounded
from maga_transformer.models.alibi import alibi_slopes
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Falcon(Family):
    model_type = "falcon"
    aliases = ("RefinedWeb", "RefinedWebModel")
    architectures = ("FalconForCausalLM", "RWForCausalLM")
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_kv_heads": "n_head_kv",
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "gelu", "tie_word_embeddings": True})
    layer_tensors = LayerTensors("h.{}.self_attention.dense", "", "h.{}.self_attention.query_key_value", "h.{}.mlp.dense_4h_to_h")
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_epsilon", 1e-5)
    embedding = "transformer.word_embeddings.weight"
    final_norm = "transformer.ln_f"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.grouped = False  # of 40B and later
        super().__init__(checkpoint)
        self.parallel = self.grouped or self.config.flag("parallel_attn", True)
        if self.grouped:
            self.config.require("parallel_attn", True)
            self.config.require("num_ln_in_parallel_attn", 1, 2)

    def kv_heads(self, heads: int) -> int:
        config = self.config
        self.grouped = config.flag("new_decoder_architecture", config.get("model_type") == "RefinedWeb")
        if self.grouped:
            return config.integer("num_kv_heads", heads)
        return 1 if config.flag("multi_query", True) else heads

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"transformer.h.{i}"
        bias = self.config.flag("bias", False)
        two_norms = self.grouped and self.config.integer("num_ln_in_parallel_attn", 2) == 2
        h = b.norm(x, f"{module}.ln_attn" if two_norms else f"{module}.input_layernorm", self.norm)
        attention, mlp = f"{module}.self_attention", f"{module}.mlp"
        q, k, v = b.split_linear(h, f"{attention}.query_key_value", self.heads.widths(), groups=self.heads.kv_heads, bias=bias)
        attended = b.add(x, b.linear(self.attend(b, q, k, v), f"{attention}.dense", width=self.hidden, bias=bias))
        if two_norms:
            h = b.norm(x, f"{module}.ln_mlp", self.norm)
        elif not self.parallel:
            h = b.norm(attended, f"{module}.post_attention_layernorm", self.norm)
        width = self.intermediate
        return b.add(attended, b.mlp(h, f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", self.activation, width=width, bias=bias))

    def uses_alibi(self) -> bool:
        return self.config.flag("alibi", False)

    def alibi_slopes(self) -> Sequence[float]:
        """In bf16, and scaled with the products of q and k. (The reference code also rounds slope * position to bf16.)"""
        slopes = np.array(alibi_slopes(self.heads.heads), np.float32)
        exact = Dense(rounded(slopes, "bf16"), "bf16").dequantize()
        return [float(slope) * self.heads.head_dim**-0.5 for slope in exact]
