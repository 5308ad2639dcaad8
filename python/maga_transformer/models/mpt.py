"""MPT (https://www.databricks.com/blog/mpt-7b): ALiBi or learned positions; q, k and v in one tensor, with bounds or norms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.alibi import mpt_slopes
from maga_transformer.models.builder import Builder, Norm
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Mpt(Family):
    model_type = "mpt"
    architectures = ("MptForCausalLM", "MPTForCausalLM")
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "gelu", "tie_word_embeddings": True})
    layer_tensors = LayerTensors("blocks.{}.attn.out_proj", "", "blocks.{}.attn.Wqkv", "blocks.{}.ffn.down_proj")
    norm_kind = "layer"
    norm_eps = ("layer_norm_epsilon", 1e-5)
    embedding = "transformer.wte.weight"
    final_norm = "transformer.norm_f"

    def __init__(self, checkpoint: Checkpoint) -> None:
        attention = checkpoint.config.get("attn_config") or {}
        if not isinstance(attention, dict):
            raise ValueError(f"{checkpoint.path}: config key attn_config is {attention!r}, expected an object")
        self.attention = ModelConfig(f"{checkpoint.path}, attn_config", attention)
        super().__init__(checkpoint)
        for key in ("prefix_lm", "rope", "qk_gn", "sliding_window_size"):
            self.attention.require(key, False, *([-1] if key == "sliding_window_size" else []))
        self.config.require("norm_type", "low_precision_layernorm", "layernorm")
        self._bias = not self.config.flag("no_bias", True)
        self.norm = Norm("layer", self.norm.eps, bias=self._bias)

    def kv_heads(self, heads: int) -> int:
        self.attention.require("attn_type", "multihead_attention", "multiquery_attention", "grouped_query_attention")
        kind = self.attention.text("attn_type", "multihead_attention")
        if kind == "grouped_query_attention":
            return self.attention.integer("kv_n_heads")
        return 1 if kind == "multiquery_attention" else heads

    def embed(self, b: Builder, vocab: int | None) -> View:
        x = super().embed(b, vocab)
        if self.uses_alibi() or not self.config.flag("learned_pos_emb", True):
            return x
        return b.add_positions(x, "transformer.wpe.weight", positions=self.positions())

    def layer(self, b: Builder, x: View, i: int) -> View:
        module, bias = f"transformer.blocks.{i}", self._bias
        h = b.norm(x, f"{module}.norm_1", self.norm)
        q, k, v = b.split_linear(h, f"{module}.attn.Wqkv", self.heads.widths(), bias=bias)
        if self.attention.get("clip_qkv"):
            b.clamp([q, k, v], self.attention.number("clip_qkv"))
        if self.attention.flag("qk_ln", False):
            b.norm_in_place(q, f"{module}.attn.q_ln", self.norm, q.width)
            b.norm_in_place(k, f"{module}.attn.k_ln", self.norm, k.width)
        scale = None if self.attention.get("softmax_scale") is None else self.attention.number("softmax_scale")
        h = b.attention(q, k, v, self.heads, scale=scale, alibi=self.alibi)
        x = b.add(x, b.linear(h, f"{module}.attn.out_proj", width=self.hidden, bias=bias))
        h = b.norm(x, f"{module}.norm_2", self.norm)
        width = self.intermediate
        return b.add(x, b.mlp(h, f"{module}.ffn.up_proj", f"{module}.ffn.down_proj", self.activation, width=width, bias=bias))

    def mlp_width(self) -> int:
        return self.config.integer("expansion_ratio", 4) * self.hidden

    def normed(self, b: Builder, x: View) -> View:
        """The head is linear and has no bias, so what scales its input scales the logits."""
        scale: float = 1.0
        if self.config.get("logit_scale") == "inv_sqrt_d_model":
            scale = self.hidden**-0.5
        elif self.config.get("logit_scale") is not None:
            scale = self.config.number("logit_scale")
        return b.norm(x, self.final_norm, replace(self.norm, scale=scale))

    def read_rope(self) -> None:
        return None

    def uses_alibi(self) -> bool:
        return self.attention.flag("alibi", True)

    def alibi_slopes(self) -> Sequence[float]:
        return mpt_slopes(self.heads.heads, self.attention.number("alibi_bias_max", 8))
