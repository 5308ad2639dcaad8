"""Phi-3 and Phi-3.5 (https://arxiv.org/abs/2404.14219): Llama with fused tensors, q | k | v and gate | up."""

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.llama import Llama


class Phi3(Llama):
    model_type = "phi3"
    architectures = ("Phi3ForCausalLM",)
    layer_tensors = LayerTensors(fused="model.layers.{}.self_attn.qkv_proj")
    norm_eps = ("rms_norm_eps", 1e-5)

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        return b.split_linear(x, f"{module}.qkv_proj", self.heads.widths())

    def mlp(self, b: Builder, x: View, module: str) -> View:
        gate, up = b.split_linear(x, f"{module}.gate_up_proj", [self.known_width()] * 2)
        return b.linear(b.activate(gate, up, self.activation), f"{module}.down_proj", width=self.hidden)

    def attention_bias(self) -> bool:
        return False

    def window(self) -> int:
        return 0 if self.config.get("sliding_window") is None else self.config.integer("sliding_window")
