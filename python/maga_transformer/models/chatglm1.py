"""ChatGLM-6B, the first (https://arxiv.org/abs/2103.10360): the prompt is read in both directions, each half of a head rotates by a
position of its own, and what a block adds to is its normalised input, scaled."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from maga_transformer._core import Program, View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.rope import Rope, read_rope

_LAYERS = 28  # of the released model; smaller ones keep the scale that it gives


class ChatGlm1(Family):
    model_type = "chatglm1"
    architectures = ()
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "num_hidden_layers": "num_layers",
            "intermediate_size": "inner_hidden_size",
            "max_position_embeddings": "max_sequence_length",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "gelu_new"})
    norm_kind = "layer"
    norm_eps = ("layernorm_epsilon", 1e-5)
    embedding = "transformer.word_embeddings.weight"
    final_norm = "transformer.final_layernorm"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.config.require("position_encoding_2d", True)
        self.config.require("quantization_bit", 0)

    def build(self) -> Program:
        program = super().build()
        ids = ("bos_token_id", "gmask_token_id", "mask_token_id")
        end, *held = (
            self.config.integer(key, default, least=0) for key, default in zip(ids, (130004, 130001, 130000), strict=True)
        )
        program.set_context(end, held)
        return program

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"transformer.layers.{i}"
        attention, mlp = f"{module}.attention", f"{module}.mlp"
        h, residual = self._normed_twice(b, x, f"{module}.input_layernorm")
        q, k, v = b.split_linear(h, f"{attention}.query_key_value", self.heads.widths(), groups=self.heads.heads, bias=True)
        x = b.add(residual, b.linear(self.attend(b, q, k, v), f"{attention}.dense", width=self.hidden, bias=True))
        h, residual = self._normed_twice(b, x, f"{module}.post_attention_layernorm")
        width = self.intermediate or 4 * self.hidden
        up, down = f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"
        return b.add(residual, b.mlp(h, up, down, self.activation, width=width, bias=True))

    def attend(self, b: Builder, q: View, k: View, v: View, *, window: int = 0, scale: float | None = None) -> View:
        assert self.rope is not None
        half = self.heads.head_dim // 2
        b.rope([q, k], self.rope, self.heads.head_dim)
        b.rope([q, k], self.block_rope, self.heads.head_dim, offset=half)
        return b.attention(q, k, v, self.heads)

    def read_rope(self) -> Rope:
        rope = read_rope(self.config, self.heads.head_dim // 2)
        halves = np.array(rope.inv_freq, np.float16).astype(float).tolist()  # as the reference code holds them
        rope = replace(rope, inv_freq=halves)
        self.block_rope = replace(rope, by_block=True)
        return rope

    def _normed_twice(self, b: Builder, x: View, module: str) -> tuple[View, View]:
        """As the block reads it, and as the block adds to it."""
        return b.norm(x, module, self.norm), b.norm(x, module, replace(self.norm, scale=(2 * _LAYERS) ** 0.5))
