"""Qwen, the first generation (https://arxiv.org/abs/2309.16609): beyond seq_length the base of its rotation grows in steps with the
length of the prompt, and queries grow with the logarithm of their position."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.rope import Rope, read_rope


class Qwen(Family):
    model_type = "qwen"
    aliases = ("qwen_7b", "qwen_13b", "qwen_1b8", "qwen_agent", "qwen_tool")
    architectures = ("QWenLMHeadModel",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"head_dim": "kv_channels", "rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    )
    layer_tensors = LayerTensors("h.{}.attn.c_proj", "", "h.{}.attn.c_attn", "h.{}.mlp.c_proj")
    norm_eps = ("layer_norm_epsilon", 1e-6)
    embedding = "transformer.wte.weight"
    final_norm = "transformer.ln_f"

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"transformer.h.{i}"
        self.config.require("no_bias", True)
        h = b.norm(x, f"{module}.ln_1", self.norm)
        q, k, v = b.split_linear(h, f"{module}.attn.c_attn", self.heads.widths(), bias=True)
        if q.width and self.config.flag("use_logn_attn", False) and self.positions() > self._trained():
            b.program.log_scale(q, from_=self._trained())
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.attn.c_proj", width=self.hidden))
        h = b.norm(x, f"{module}.ln_2", self.norm)
        mlp = f"{module}.mlp"
        gate, up = b.linears(h, [f"{mlp}.w2", f"{mlp}.w1"], widths=[self.intermediate] * 2)
        return b.add(x, b.linear(b.activate(gate, up, self.activation), f"{mlp}.c_proj", width=self.hidden))

    def mlp_width(self) -> int:
        return self.config.integer("intermediate_size", least=2) // 2  # the key counts gate and up

    def read_rope(self) -> Rope:
        rope = replace(read_rope(self.config, self.heads.head_dim), max_positions=self._trained())
        return replace(rope, stepped=self._extends())

    def positions(self) -> int:
        return self.config.integer("max_position_embeddings") if self._extends() else self._trained()

    def _trained(self) -> int:
        return self.config.integer("seq_length", 8192)

    def _extends(self) -> bool:
        """Beyond what it was trained on."""
        longest = self.config.integer("max_position_embeddings", self._trained())
        return self.config.flag("use_dynamic_ntk", False) and longest > self._trained()
