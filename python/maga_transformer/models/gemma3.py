"""Gemma 3, its text model (https://arxiv.org/abs/2503.19786): Gemma 2 with norms of heads in place of bounds, and layers with a
window, which rotate by a base of their own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.gemma2 import Gemma2
from maga_transformer.models.rope import Rope, read_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma3(Gemma2):
    model_type = "gemma3_text"
    architectures = ("Gemma3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({**Gemma2.defaults, "max_position_embeddings": 131072})
    window_pattern = 6
    soft_caps = (0.0, 0.0)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.config.require("attn_logit_softcapping", None)
        self.local_rope = self._rope_of(_SLIDING, {"rope_theta": self.config.number("rope_local_base_freq", 1e4)})

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        q, k, v = super().qkv(b, x, module)
        b.norm_in_place(q, f"{module}.q_norm", self.norm, self.heads.head_dim)
        b.norm_in_place(k, f"{module}.k_norm", self.norm, self.heads.head_dim)
        return [q, k, v]

    def rope_of(self, window: int) -> Rope:
        return self.local_rope if window else super().rope_of(window)

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
