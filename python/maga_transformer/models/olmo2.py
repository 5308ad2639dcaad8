"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and MLP, and on all heads of q and of k together."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family


class Olmo2(Family):
    model_type = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    norm_eps = ("rms_norm_eps", 1e-5)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"model.layers.{i}"
        bias = self.config.flag("attention_bias", False)
        q, k, v = b.qkv(x, f"{module}.self_attn", self.heads, bias=bias)
        b.norm_in_place(q, f"{module}.self_attn.q_norm", self.norm, q.width)
        b.norm_in_place(k, f"{module}.self_attn.k_norm", self.norm, k.width)
        h = b.linear(self.attend(b, q, k, v), f"{module}.self_attn.o_proj", width=self.hidden, bias=bias)
        x = b.add(x, b.norm(h, f"{module}.post_attention_layernorm", self.norm))
        h = b.gated_mlp(x, f"{module}.mlp", self.activation, width=self.intermediate)
        return b.add(x, b.norm(h, f"{module}.post_feedforward_layernorm", self.norm))
