"""Gemma (https://arxiv.org/abs/2403.08295): Llama with norms of 1 + weight, scaled embeddings and wide heads."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.formats.canonical import Dense, rounded
from maga_transformer.models.builder import Builder
from maga_transformer.models.llama import Llama


class Gemma(Llama):
    model_type = "gemma"
    architectures: ClassVar[tuple[str, ...]] = ("GemmaForCausalLM",)
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({"hidden_act": "hidden_activation"})
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.config.require("use_bidirectional_attention", False)
        self.norm = replace(self.norm, offset=1.0)
        if self.activation == "gelu":  # what the first release says and does not mean
            self.activation = "gelu_pytorch_tanh"

    def embed(self, b: Builder, vocab: int | None) -> View:
        dtype = self.checkpoint.dtype(self.embedding)  # the reference code holds the factor in it
        root = Dense(rounded(np.array([self.hidden**0.5], np.float32), dtype), dtype).dequantize()
        return b.embed(self.embedding, vocab=vocab, hidden=self.hidden, scale=float(root[0]))
