"""Bloom (https://arxiv.org/abs/2211.05100): ALiBi, a norm after the embedding, q, k and v head by head."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import Program, View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Bloom(Family):
    model_type = "bloom"
    aliases = ("sgpt_bloom",)
    architectures = ("BloomForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"tie_word_embeddings": True})
    layer_tensors = LayerTensors("h.{}.self_attention.dense", "", "h.{}.self_attention.query_key_value", "h.{}.mlp.dense_4h_to_h")
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_epsilon", 1e-5)

    def build(self) -> Program:
        prefix = "transformer." if "transformer.word_embeddings.weight" in self.checkpoint.names() else ""
        self.embedding, self.final_norm, self._prefix = f"{prefix}word_embeddings.weight", f"{prefix}ln_f", prefix
        return super().build()

    def embed(self, b: Builder, vocab: int | None) -> View:
        return b.norm(super().embed(b, vocab), f"{self._prefix}word_embeddings_layernorm", self.norm)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"{self._prefix}h.{i}"
        normed_residual = self.config.flag("apply_residual_connection_post_layernorm", False)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        attention, mlp = f"{module}.self_attention", f"{module}.mlp"
        q, k, v = b.split_linear(h, f"{attention}.query_key_value", self.heads.widths(), groups=self.heads.heads, bias=True)
        attended = b.linear(self.attend(b, q, k, v), f"{attention}.dense", width=self.hidden, bias=True)
        x = b.add(h if normed_residual else x, attended)
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        up, down = f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"
        out = b.mlp(h, up, down, "gelu_new", width=self.intermediate, bias=True)
        return b.add(h if normed_residual else x, out)

    def uses_alibi(self) -> bool:
        return True
