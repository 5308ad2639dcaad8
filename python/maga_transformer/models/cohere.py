"""Command R (https://docs.cohere.com/docs/models) and Command R7B: attention and MLP of one normalised input, scaled logits. In the
second, layers with a window rotate, and the others have no positions at all."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder, Norm
from maga_transformer.models.family import Family
from maga_transformer.models.rope import Rope, read_rope


class Cohere(Family):
    model_type = "cohere"
    architectures: ClassVar[tuple[str, ...]] = ("CohereForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"tie_word_embeddings": True, "logit_scale": 0.0625})
    default_theta: ClassVar[float] = 500000.0
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-5)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.norm = Norm("layer", self.norm.eps)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        q, k, v = b.qkv(h, f"{module}.self_attn", self.heads, bias=bias)
        if self.config.flag("use_qk_norm", False):
            for view, name in ((q, "q_norm"), (k, "k_norm")):
                b.norm_heads(view, f"{module}.self_attn.{name}.weight", self.norm, self.heads.head_dim)
        x = b.add(x, b.linear(self.attend_layer(b, q, k, v, i), f"{module}.self_attn.o_proj", width=self.hidden, bias=bias))
        return b.add(x, b.gated_mlp(h, f"{module}.mlp", self.activation, width=self.intermediate))

    def attend_layer(self, b: Builder, q: View, k: View, v: View, i: int) -> View:
        return self.attend(b, q, k, v)

    def normed(self, b: Builder, x: View) -> View:
        """The head is linear and has no bias, so what scales its input scales the logits."""
        return b.norm(x, self.final_norm, replace(self.norm, scale=self.config.number("logit_scale")))

    def read_rope(self) -> Rope:
        return replace(read_rope(self.config, self.heads.head_dim, theta=self.default_theta), interleaved=True)


class Cohere2(Cohere):
    model_type = "cohere2"
    architectures = ("Cohere2ForCausalLM",)
    default_theta = 10000.0

    def attend_layer(self, b: Builder, q: View, k: View, v: View, i: int) -> View:
        window = self.sliding_window(i)
        return self.attend(b, q, k, v, window=window) if window else b.attention(q, k, v, self.heads)

    def sliding_window(self, i: int) -> int:
        if self.config.get("layer_types") is not None:
            return super().sliding_window(i)
        slides = (i + 1) % self.config.integer("sliding_window_pattern", 4)
        return self.config.integer("sliding_window", 4096) if slides else 0
