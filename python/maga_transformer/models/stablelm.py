"""StableLM (https://arxiv.org/abs/2402.17834): Llama with layer norms and a quarter of each head rotating."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class StableLm(Family):
    model_type = "stablelm"
    aliases = ("stablelm_epoch",)
    architectures = ("StableLmForCausalLM", "StableLMEpochForCausalLM")
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"partial_rotary_factor": "rope_pct", "layer_norm_eps": "norm_eps"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.25})
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-5)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=self.config.flag("use_qkv_bias", False))
        if self.config.flag("qk_layernorm", False):
            for view, name in ((q, "q_layernorm"), (k, "k_layernorm")):
                norms = [f"{module}.self_attn.{name}.norms.{head}.weight" for head in range(view.width // self.heads.head_dim)]
                b.norm_heads(view, norms, self.norm, self.heads.head_dim)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.self_attn.o_proj", width=self.hidden))
        if not self.config.flag("use_parallel_residual", False):  # else the MLP reads what the attention read
            h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate))
