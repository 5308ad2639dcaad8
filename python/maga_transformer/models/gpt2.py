"""GPT-2 (Radford et al., 2019) and GPT-BigCode (https://arxiv.org/abs/2301.03988), StarCoder's first generation: learned positions.
GPT-2's linears are stored transposed; GPT-BigCode's heads share one key and one value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import Program, View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors


class Gpt2(Family):
    model_type = "gpt2"
    architectures: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)
    transposed_linears = True
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "hidden_act": "activation_function",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"hidden_act": "gelu_new", "tie_word_embeddings": True, "max_position_embeddings": 1024}
    )
    layer_tensors = LayerTensors("h.{}.attn.c_proj", "", "h.{}.attn.c_attn", "h.{}.mlp.c_proj")
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_epsilon", 1e-5)

    def build(self) -> Program:
        self._prefix = "" if "wte.weight" in self.checkpoint.names() else "transformer."
        self.embedding, self.final_norm = f"{self._prefix}wte.weight", f"{self._prefix}ln_f"
        self.config.require("add_cross_attention", False)
        self.transposed_linears = self.config.flag("transposed_linears", self.transposed_linears)  # readers of other layouts say so
        return super().build()

    def embed(self, b: Builder, vocab: int | None) -> View:
        return b.add_positions(super().embed(b, vocab), f"{self._prefix}wpe.weight", positions=self.positions())

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"{self._prefix}h.{i}"
        q, k, v = self.qkv(b, b.norm(x, f"{module}.ln_1", self.norm), f"{module}.attn.c_attn")
        scale = self.heads.head_dim**-0.5 if self.config.flag("scale_attn_weights", True) else 1.0
        if self.config.flag("scale_attn_by_inverse_layer_idx", False):
            scale /= i + 1
        x = b.add(x, b.linear(self.attend(b, q, k, v, scale=scale), f"{module}.attn.c_proj", width=self.hidden, bias=True))
        h = b.norm(x, f"{module}.ln_2", self.norm)
        return b.add(x, b.mlp(h, f"{module}.mlp.c_fc", f"{module}.mlp.c_proj", self.activation, width=self.intermediate, bias=True))

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        return b.split_linear(x, module, self.heads.widths(), bias=True)

    def read_rope(self) -> None:
        return None


class GptBigCode(Gpt2):
    model_type = "gpt_bigcode"
    aliases = ("wizardcoder",)
    architectures = ("GPTBigCodeForCausalLM",)
    transposed_linears = False
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({**Gpt2.defaults, "hidden_act": "gelu_pytorch_tanh"})

    def kv_heads(self, heads: int) -> int:
        return 1 if self.config.flag("multi_query", True) else heads

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        return b.split_linear(x, module, self.heads.widths(), groups=self.heads.kv_heads, bias=True)
