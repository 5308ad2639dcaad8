"""GLM-4.5 (https://arxiv.org/abs/2508.06471): partial rotation, DeepSeek-V3's routing, one MLP that all tokens share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.moe import deepseek_routing, mixture


class Glm4Moe(Family):
    model_type = "glm4_moe"
    architectures = ("Glm4MoeForCausalLM",)
    norm_eps = ("rms_norm_eps", 1e-5)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.5})

    def layer(self, b: Builder, x: View, i: int) -> View:
        config, module = self.config, f"model.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=config.flag("attention_bias", False))
        if config.flag("use_qk_norm", False):
            b.norm_in_place(q, f"{module}.self_attn.q_norm", self.norm, self.heads.head_dim)
            b.norm_in_place(k, f"{module}.self_attn.k_norm", self.norm, self.heads.head_dim)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.self_attn.o_proj", width=self.hidden))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        if i < config.integer("first_k_dense_replace", 1, least=0):
            return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate))
        width = config.integer("moe_intermediate_size", 1408)
        x = b.add(x, mixture(b, h, f"{module}.mlp", deepseek_routing(config, 128, 8), width, self.activation))
        shared = width * config.integer("n_shared_experts", 1)
        return b.add(x, b.gated_mlp(h, f"{module}.mlp.shared_experts", self.activation, width=shared))
