"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, windows in every other layer, experts with biases and a clamped
gate."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder, Experts
from maga_transformer.models.family import Family
from maga_transformer.models.moe import softmax_routing


class GptOss(Family):
    model_type = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    norm_eps = ("rms_norm_eps", 1e-5)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"num_experts": "num_local_experts"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"head_dim": 64, "rope_theta": 150000.0})

    def layer(self, b: Builder, x: View, i: int) -> View:
        module, bias = f"model.layers.{i}", self.config.flag("attention_bias", True)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        assert self.rope is not None
        b.rope([q, k], self.rope, self.heads.head_dim)
        h = b.attention(q, k, v, self.heads, window=self.sliding_window(i), sinks=f"{module}.self_attn.sinks")
        x = b.add(x, b.linear(h, f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        return b.add(x, self.mixture(b, b.norm(x, f"{module}.post_attention_layernorm", self.norm), f"{module}.mlp"))

    def mixture(self, b: Builder, h: View, module: str) -> View:
        config = self.config
        routing = softmax_routing(config, 128, 4, renormalise=True)
        logits = b.linear(h, f"{module}.router", width=routing.experts, bias=True)
        experts = self.experts(b, f"{module}.experts", routing.experts, config.integer("intermediate_size"))
        alpha, limit = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
        return b.moe(h, logits, module + ".experts", experts, routing, "silu", alpha=alpha, limit=limit, up_offset=1.0)

    def experts(self, b: Builder, module: str, count: int, width: int) -> Experts:
        """Stacks of (columns, rows) in bf16, gates and ups in turn; expert by expert in MXFP4 (formats/mxfp4.py) and GGUF."""
        hidden, joined = self.hidden, f"{module}.gate_up_proj"
        if b.has(joined):
            gate_up = b.stacked(joined, (count, hidden, 2 * width), transposed=True, interleaved=True)
            down = b.stacked(f"{module}.down_proj", (count, width, hidden), transposed=True)
        else:
            alone = b.alone([f"{module}.{e}" for e in range(count)], width, hidden)
            gate_up, down = alone.gate_up, alone.down
        if b.has(f"{module}.0.down_proj.bias"):
            gate_up_bias = [b.vector(f"{module}.{e}.{name}_proj.bias", width) for e in range(count) for name in ("gate", "up")]
            down_bias = [b.vector(f"{module}.{e}.down_proj.bias", hidden) for e in range(count)]
            return Experts(width, gate_up, down, gate_up_bias, down_bias)
        gate_up_bias = b.stacked(f"{module}.gate_up_proj_bias", (count, 2 * width), interleaved=True)
        return Experts(width, gate_up, down, gate_up_bias, b.stacked(f"{module}.down_proj_bias", (count, hidden)))

    def sliding_window(self, i: int) -> int:
        """In every other layer, from the first on, where the config does not say."""
        if self.config.get("layer_types") is None:
            return self.config.integer("sliding_window", 128) if i % 2 == 0 else 0
        return super().sliding_window(i)
