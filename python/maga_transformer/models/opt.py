"""OPT (https://arxiv.org/abs/2205.01068): learned positions, from row 2 of their table on. The 350M model has its norms after
the residuals, and an embedding narrower than its layers."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import Program, View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors

_FIRST_ROW = 2


class Opt(Family):
    model_type = "opt"
    architectures = ("OPTForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "relu", "tie_word_embeddings": True})
    layer_tensors = LayerTensors(
        "decoder.layers.{}.self_attn.out_proj", "decoder.layers.{}.self_attn.k_proj", "", "decoder.layers.{}.fc2"
    )
    mlp_ratio = 4
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-5)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._norm_first = self.config.flag("do_layer_norm_before", True)
        self._bias = self.config.flag("enable_bias", True)
        self._embedded = self.config.integer("word_embed_proj_dim", self.hidden)
        affine = self.config.flag("layer_norm_elementwise_affine", True)
        self.norm = replace(self.norm, weight=affine, bias=affine)

    def build(self) -> Program:
        self._decoder = "decoder" if "decoder.embed_tokens.weight" in self.checkpoint.names() else "model.decoder"
        self.embedding, self.final_norm = f"{self._decoder}.embed_tokens.weight", f"{self._decoder}.final_layer_norm"
        return super().build()

    def embed(self, b: Builder, vocab: int | None) -> View:
        x = b.embed(self.embedding, vocab=vocab, hidden=self._embedded)
        if self._embedded != self.hidden:
            x = b.linear(x, f"{self._decoder}.project_in", width=self.hidden)
        return b.add_positions(x, f"{self._decoder}.embed_positions.weight", positions=self.positions(), offset=_FIRST_ROW)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"{self._decoder}.layers.{i}"
        q, k, v = b.qkv(
            self._norm(b, x, f"{module}.self_attn_layer_norm", True), f"{module}.self_attn", self.heads, bias=self._bias
        )
        attended = b.linear(self.attend(b, q, k, v), f"{module}.self_attn.out_proj", width=self.hidden, bias=self._bias)
        x = self._norm(b, b.add(x, attended), f"{module}.self_attn_layer_norm", False)
        h = self._norm(b, x, f"{module}.final_layer_norm", True)
        out = b.add(x, b.mlp(h, f"{module}.fc1", f"{module}.fc2", self.activation, width=self.intermediate, bias=self._bias))
        return self._norm(b, out, f"{module}.final_layer_norm", False)

    def _norm(self, b: Builder, x: View, module: str, before: bool) -> View:
        """A norm that stands `before` its block, or behind it, in models that have it there."""
        return b.norm(x, module, self.norm) if before == self._norm_first else x

    def normed(self, b: Builder, x: View) -> View:
        if self._norm_first and not self.config.flag("_remove_final_layer_norm", False):
            x = super().normed(b, x)
        return x if self._embedded == self.hidden else b.linear(x, f"{self._decoder}.project_out", width=self._embedded)

    def read_rope(self) -> None:
        return None
