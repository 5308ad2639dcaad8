"""Gemma 2 (https://arxiv.org/abs/2408.00118): Gemma with norms on both sides of attention and MLP, bounded scores and logits, and
a window in every second layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.gemma import Gemma
from maga_transformer.models.rope import Rope


class Gemma2(Gemma):
    model_type = "gemma2"
    architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({**Gemma.defaults, "max_position_embeddings": 8192})
    window_pattern: ClassVar[int] = 2  # every layer whose number, from 1, it does not divide has a window
    soft_caps: ClassVar[tuple[float, float]] = (50.0, 30.0)  # of scores and of logits, where the config does not name the keys

    def layer(self, b: Builder, x: View, i: int) -> View:
        module, window = f"model.layers.{i}", self.sliding_window(i)
        q, k, v = self.qkv(b, b.norm(x, f"{module}.input_layernorm", self.norm), f"{module}.self_attn")
        b.rope([q, k], self.rope_of(window), self.heads.head_dim)
        scale = self.config.number("query_pre_attn_scalar", 256) ** -0.5
        cap = self._soft_cap("attn_logit_softcapping", self.soft_caps[0])
        h = b.attention(q, k, v, self.heads, window=window, scale=scale, soft_cap=cap)
        h = b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=self.attention_bias())
        x = b.add(x, b.norm(h, f"{module}.post_attention_layernorm", self.norm))
        h = self.mlp(b, b.norm(x, f"{module}.pre_feedforward_layernorm", self.norm), f"{module}.mlp")
        return b.add(x, b.norm(h, f"{module}.post_feedforward_layernorm", self.norm))

    def logits(self, b: Builder, x: View, vocab: int | None) -> None:
        b.head(x, self.head, vocab=vocab, soft_cap=self._soft_cap("final_logit_softcapping", self.soft_caps[1]))

    def rope_of(self, window: int) -> Rope:
        assert self.rope is not None
        return self.rope

    def sliding_window(self, i: int) -> int:
        if self.config.get("layer_types") is not None:
            return super().sliding_window(i)
        slides = (i + 1) % self.config.integer("sliding_window_pattern", self.window_pattern)
        return self.config.integer("sliding_window", 4096) if slides else 0

    def _soft_cap(self, key: str, default: float) -> float:
        """null: none."""
        if key in self.config.values:
            return 0.0 if self.config.get(key) is None else self.config.number(key)
        return default
