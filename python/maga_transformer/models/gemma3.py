"""Gemma 3, its text model (https://arxiv.org/abs/2503.19786): Gemma with norms on both sides of attention and MLP, norms of heads,
and layers with a window, which rotate by a base of their own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.gemma import Gemma
from maga_transformer.models.rope import Rope, read_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma3(Gemma):
    model_type = "gemma3_text"
    architectures = ("Gemma3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({**Gemma.defaults, "max_position_embeddings": 131072})

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            self.config.require(key, None)
        self.local_rope = self._rope_of(_SLIDING, {"rope_theta": self.config.number("rope_local_base_freq", 1e4)})

    def layer(self, b: Builder, x: View, i: int) -> View:
        module, heads = f"model.layers.{i}", self.heads
        window = self.sliding_window(i)
        q, k, v = self.qkv(b, b.norm(x, f"{module}.input_layernorm", self.norm), f"{module}.self_attn")
        b.norm_in_place(q, f"{module}.self_attn.q_norm", self.norm, heads.head_dim)
        b.norm_in_place(k, f"{module}.self_attn.k_norm", self.norm, heads.head_dim)
        rope = self.local_rope if window else self.rope
        assert rope is not None
        b.rope([q, k], rope, heads.head_dim)
        scale = self.config.number("query_pre_attn_scalar", 256) ** -0.5
        h = b.attention(q, k, v, heads, window=window, scale=scale)
        h = b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=self.attention_bias())
        x = b.add(x, b.norm(h, f"{module}.post_attention_layernorm", self.norm))
        h = self.mlp(b, b.norm(x, f"{module}.pre_feedforward_layernorm", self.norm), f"{module}.mlp")
        return b.add(x, b.norm(h, f"{module}.post_feedforward_layernorm", self.norm))

    def sliding_window(self, i: int) -> int:
        if self.config.get("layer_types") is not None:
            return super().sliding_window(i)
        slides = (i + 1) % self.config.integer("sliding_window_pattern", 6)
        return self.config.integer("sliding_window", 4096) if slides else 0

    def read_rope(self) -> Rope:
        keys = ("rope_theta", "rope_scaling")
        return self._rope_of(_FULL, {key: self.config.get(key) for key in keys if self.config.get(key) is not None}, 1e6)

    def _rope_of(self, layer_type: str, flat: dict[str, Any], theta: float = 1e4) -> Rope:
        """From transformers 5's rope_parameters, one object a layer type, or from the `flat` keys of earlier configs."""
        nested = self.config.get("rope_parameters")
        if nested is not None:
            if not isinstance(nested, dict) or not isinstance(nested.get(layer_type), dict):
                raise self.config.error("rope_parameters", nested, f"an object with {_FULL} and {_SLIDING}")
            flat = {"rope_parameters": nested[layer_type]}
        positions = {"max_position_embeddings": self.config.get("max_position_embeddings")}
        return read_rope(ModelConfig(self.config.path, {**positions, **flat}), self.heads.head_dim, theta=theta)
