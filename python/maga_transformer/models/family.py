"""What model families share: the sizes of a decoder from its config, and the frame around its layers."""

import logging
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from maga_transformer._core import Program, View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder, Heads
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.rope import read_rope

log = logging.getLogger(__name__)

_MAX_HEAD_DIM = 65536
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Family(ABC):
    """A decoder: embedding, layers, norm, head. A subclass names its checkpoints and writes one layer."""

    model_type: ClassVar[str]  # as MODEL_TYPE names it
    aliases: ClassVar[tuple[str, ...]] = ()  # other names for it, model_type of config.json among them
    architectures: ClassVar[tuple[str, ...]]  # as config.json names them
    default_head_dim: ClassVar[int | None] = None  # where the config has no head_dim; None: hidden size over heads

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = config = ModelConfig(checkpoint.path, checkpoint.config)
        quantization = config.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ValueError(f"{checkpoint.path}: quantization_config with quant_method {method!r} is not supported")
        self.hidden = config.integer("hidden_size")
        self.layers = config.integer("num_hidden_layers")
        self.heads = self._heads()
        self.eps = config.number("rms_norm_eps", 1e-6)
        self.activation = config.text("hidden_act", "silu")
        self.intermediate = config.integer("intermediate_size") if config.get("intermediate_size") is not None else None
        self.rope = read_rope(config, self.heads.head_dim)
        self.embedding = _EMBEDDING  # the tensor's name; tied models may store it as the head

    @abstractmethod
    def layer(self, b: Builder, x: View, i: int) -> View:
        """Appends layer `i` to the program; x and the result are (tokens, hidden)."""

    def build(self) -> Program:
        b = Builder(self.checkpoint, self.model_type)
        b.program.max_positions = self.rope.extended_positions
        self.embedding, head = self._vocabulary_tensors(b)
        vocab = self.config.integer("vocab_size") if self.config.get("vocab_size") is not None else None
        x = b.embed(self.embedding, vocab=vocab, hidden=self.hidden)
        for i in range(self.layers):
            x = self.layer(b, x, i)
        b.head(b.rms_norm(b.select(x), "model.norm", self.eps), head, vocab=vocab)
        return b.finish()

    def sliding_window(self, i: int) -> int:
        """Of layer `i` in the families whose config has use_sliding_window (Qwen); 0: none."""
        config = self.config
        types = config.get("layer_types")
        if types is not None:
            if not isinstance(types, list) or len(types) != self.layers:
                raise config.error("layer_types", types, f"a list of {self.layers} names")
            slides = types[i] == "sliding_attention"
        else:
            slides = config.flag("use_sliding_window", False) and i >= config.integer("max_window_layers", 28, least=0)
        return config.integer("sliding_window", 4096) if slides else 0

    def _heads(self) -> Heads:
        config = self.config
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")
        if config.get("head_dim") is None and self.default_head_dim is None and self.hidden % heads:
            raise config.error("num_attention_heads", heads, f"a divisor of hidden_size, which is {self.hidden}")
        head_dim = config.integer("head_dim", self.default_head_dim or self.hidden // heads)
        if head_dim > _MAX_HEAD_DIM:  # before the rope table makes an array of it
            raise config.error("head_dim", head_dim, f"at most {_MAX_HEAD_DIM} (hidden_size is {self.hidden})")
        return Heads(heads, kv_heads, head_dim)

    def _vocabulary_tensors(self, b: Builder) -> tuple[str, str]:
        """Names of the embedding and of the head. Tied models store one of them, or two equal ones; two that differ are both
        kept, as transformers does."""
        if not self.config.flag("tie_word_embeddings", False):
            return _EMBEDDING, _HEAD
        if not b.has(_HEAD):
            return _EMBEDDING, _EMBEDDING
        if not b.has(_EMBEDDING):
            return _HEAD, _HEAD
        c = self.checkpoint
        if c.dtype(_HEAD) == c.dtype(_EMBEDDING) and np.array_equal(c.tensor(_HEAD), c.tensor(_EMBEDDING)):
            b.ignore(_HEAD)
            return _EMBEDDING, _EMBEDDING
        log.warning("%s: tie_word_embeddings is true, but %s differs from %s; both are kept", c.path, _HEAD, _EMBEDDING)
        return _EMBEDDING, _HEAD
