"""MPT (https://www.databricks.com/blog/mpt-7b): ALiBi, no biases, q, k and v in one tensor."""

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
        self.attention.require("attn_type", "multihead_attention")
        self.attention.require("alibi", True)
        for key in ("clip_qkv", "qk_ln", "prefix_lm", "rope", "qk_gn", "sliding_window_size"):
            self.attention.require(key, False, *([-1] if key == "sliding_window_size" else []))
        self.config.require("no_bias", True)
        self.config.require("norm_type", "low_precision_layernorm", "layernorm")
        self.norm = Norm("layer", self.norm.eps)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"transformer.blocks.{i}"
        q, k, v = b.split_linear(b.norm(x, f"{module}.norm_1", self.norm), f"{module}.attn.Wqkv", self.heads.widths())
        scale = None if self.attention.get("softmax_scale") is None else self.attention.number("softmax_scale")
        h = b.attention(q, k, v, self.heads, scale=scale, alibi=self.alibi)
        x = b.add(x, b.linear(h, f"{module}.attn.out_proj", width=self.hidden))
        h = b.norm(x, f"{module}.norm_2", self.norm)
        width = self.config.integer("expansion_ratio", 4) * self.hidden
        return b.add(x, b.mlp(h, f"{module}.ffn.up_proj", f"{module}.ffn.down_proj", self.activation, width=width))

    def normed(self, b: Builder, x: View) -> View:
        """The head is linear and has no bias, so what scales its input scales the logits."""
        scale: float = 1.0
        if self.config.get("logit_scale") == "inv_sqrt_d_model":
            scale = self.hidden**-0.5
        elif self.config.get("logit_scale") is not None:
            scale = self.config.number("logit_scale")
        return b.norm(x, self.final_norm, replace(self.norm, scale=scale))

    def uses_alibi(self) -> bool:
        return True

    def alibi_slopes(self) -> Sequence[float]:
        return mpt_slopes(self.heads.heads, self.attention.number("alibi_bias_max", 8))
