"""GLM-4 (https://arxiv.org/abs/2406.12793) as transformers stores it: half of each head rotates, by neighbouring pairs."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.phi3 import Phi3
from maga_transformer.models.rope import Rope, read_rope


class Glm(Phi3):
    model_type = "glm"
    architectures = ("GlmForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}
    )
    norm_eps = ("rms_norm_eps", 1.5625e-7)

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        return b.qkv(x, module, self.heads, bias=self.config.flag("attention_bias", True))

    def read_rope(self) -> Rope:
        return replace(read_rope(self.config, self.heads.head_dim), interleaved=True)

    def window(self) -> int:
        return 0


class Glm4(Glm):
    """With norms after attention and MLP too."""

    model_type = "glm4"
    architectures = ("Glm4ForCausalLM",)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        q, k, v = self.qkv(b, b.norm(x, f"{module}.input_layernorm", self.norm), f"{module}.self_attn")
        h = b.linear(self.attend(b, q, k, v), f"{module}.self_attn.o_proj", width=self.hidden)
        x = b.add(x, b.norm(h, f"{module}.post_self_attn_layernorm", self.norm))
        h = self.mlp(b, b.norm(x, f"{module}.post_attention_layernorm", self.norm), f"{module}.mlp")
        return b.add(x, b.norm(h, f"{module}.post_mlp_layernorm", self.norm))
