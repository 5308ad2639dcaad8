"""What model families share: the sizes of a decoder from its config, and the frame around its layers."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from maga_transformer._core import Program, View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.alibi import alibi_slopes
from maga_transformer.models.builder import Builder, Heads, Norm
from maga_transformer.models.config import ModelConfig
from maga_transformer.models.irregular import LayerSize, LayerTensors, PrunedBuilder, layer_sizes
from maga_transformer.models.rope import Rope, read_rope
from maga_transformer.models.task import EMBED, GENERATE, Task

log = logging.getLogger(__name__)

_MOST_LAYERS = 4096  # more would take seconds to describe, with weights or without
_MOST_WORDS = 1 << 24
_MAX_POSITIONS = 1 << 40  # what a scaling factor may make of them
_MAX_HEADS = _MAX_HEAD_DIM = 65536


class Family(ABC):
    """A decoder: embedding, layers, norm, head. A subclass names its checkpoints and writes one layer."""

    model_type: ClassVar[str]  # as MODEL_TYPE names it
    aliases: ClassVar[tuple[str, ...]] = ()  # other names for it, model_type of config.json among them
    architectures: ClassVar[tuple[str, ...]]  # as config.json names them
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({})  # Llama's config keys -> the family's own
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # of config keys that are absent or null
    transposed_linears: bool = False  # whether the checkpoint stores their weights as (in, out)
    layer_tensors: ClassVar[LayerTensors] = LayerTensors()
    mlp_ratio: ClassVar[int] = 0  # of MLP width and hidden size, where the config does not say; 0: the tensors tell
    norm_kind: ClassVar[str] = "rms"
    norm_eps: ClassVar[tuple[str, float]] = ("rms_norm_eps", 1e-6)  # config key and default
    encoder: ClassVar[bool] = False  # it has no head that generates
    latent: ClassVar[bool] = False  # its cache holds states of which every head's keys and values are products
    embedding: str = "model.embed_tokens.weight"  # the tensor's name; tied models may store it as the head
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"

    def __init_subclass__(cls) -> None:
        cls.aliases = cls.__dict__.get("aliases", ())  # those of the family that it is derived from are not its own

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.task = Task(GENERATE)
        self.config = config = ModelConfig(checkpoint.path, checkpoint.config, spellings=self.spellings, defaults=self.defaults)
        self.hidden = config.integer("hidden_size")
        self.layers = config.integer("num_hidden_layers" if config.get("layer_num") is None else "layer_num", most=_MOST_LAYERS)
        self.heads = self._heads()
        self.norm = Norm(self.norm_kind, config.number(*self.norm_eps), bias=self.norm_kind == "layer")
        self.activation = config.text("hidden_act", "silu")
        self.intermediate = self.mlp_width()
        self.rope: Rope | None = None if self.uses_alibi() else self.read_rope()
        self.alibi: Sequence[float] | None = self.alibi_slopes() if self.uses_alibi() else None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "type[Family]":
        """The class for a checkpoint: a family whose architecture's name stands for several kinds of models chooses."""
        return cls

    @abstractmethod
    def layer(self, b: Builder, x: View, i: int) -> View:
        """Appends layer `i` to the program; x and the result are (tokens, hidden)."""

    def build(self) -> Program:
        sizes = layer_sizes(
            self.checkpoint,
            self.config,
            LayerSize(self.heads, self.intermediate),
            self.layers,
            self.layer_tensors,
            transposed=self.transposed_linears,
        )
        builder = PrunedBuilder if any(size.lacks_something for size in sizes.values()) else Builder
        b = builder(self.checkpoint, self.model_type, transposed_linears=self.transposed_linears)
        b.program.max_positions = min(self.positions(), _MAX_POSITIONS)
        self.embedding, self.head = self._vocabulary_tensors(b)
        vocab = self.config.integer("vocab_size", most=_MOST_WORDS) if self.config.get("vocab_size") is not None else None
        x = self.embed(b, vocab)
        for i in range(self.layers):
            if i in sizes:
                self._resize(sizes[i])
            x = self.layer(b, x, i)
        if self.task.kind == GENERATE:
            self.logits(b, self.normed(b, b.select(x)), vocab)
        elif self.task.kind == EMBED:
            b.end(b.pool(self.normed(b, x), self.task.pooling))
        else:
            b.end(b.pool(self.normed(b, x), "last"), "score", width=self.task.labels, bias=False)
        return b.finish()

    def _resize(self, size: LayerSize) -> None:
        """Makes heads and intermediate those of the layer that comes next."""
        self.heads, self.intermediate = size.heads, size.intermediate
        if self.alibi is not None and size.heads.heads:
            self.alibi = self.alibi_slopes()

    def mlp_width(self) -> int | None:
        """None: the tensors' own."""
        if self.config.get("intermediate_size") is not None:
            return self.config.integer("intermediate_size")
        return self.mlp_ratio * self.hidden or None

    def known_width(self) -> int:
        """`intermediate`, of tensors that hold more than the MLP's columns."""
        return self.config.integer("intermediate_size") if self.intermediate is None else self.intermediate

    def embed(self, b: Builder, vocab: int | None) -> View:
        return b.embed(self.embedding, vocab=vocab, hidden=self.hidden)

    def normed(self, b: Builder, x: View) -> View:
        return b.norm(x, self.final_norm, self.norm)

    def logits(self, b: Builder, x: View, vocab: int | None) -> None:
        b.head(x, self.head, vocab=vocab)

    def attend(self, b: Builder, q: View, k: View, v: View, *, window: int = 0, scale: float | None = None) -> View:
        """Attention with the family's positions."""
        if self.rope is not None:
            b.rope([q, k], self.rope, self.heads.head_dim)
        return b.attention(q, k, v, self.heads, window=window, scale=scale, alibi=self.alibi)

    def read_rope(self) -> Rope | None:
        """None: queries and keys are not rotated."""
        return read_rope(self.config, self.heads.head_dim)

    def uses_alibi(self) -> bool:
        return False

    def alibi_slopes(self) -> Sequence[float]:
        return alibi_slopes(self.heads.heads)

    def positions(self) -> int:
        """The longest context."""
        return self.config.integer("max_position_embeddings", 2048) if self.rope is None else self.rope.extended_positions

    def segment_shift(self) -> int:
        """How far the positions of a second text lie behind those of the first; 0: the model does not tell them apart."""
        return 0

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

    def kv_heads(self, heads: int) -> int:
        return self.config.integer("num_key_value_heads", heads)

    def _heads(self) -> Heads:
        config = self.config
        heads = config.integer("num_attention_heads")
        if heads > _MAX_HEADS:  # before ALiBi makes a list of them
            raise config.error("num_attention_heads", heads, f"at most {_MAX_HEADS}")
        kv_heads = self.kv_heads(heads)
        if heads % kv_heads:
            raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, which is {heads}")
        if config.get("head_dim") is None and self.hidden % heads:
            raise config.error("num_attention_heads", heads, f"a divisor of hidden_size, which is {self.hidden}")
        head_dim = config.integer("head_dim", self.hidden // heads)
        if head_dim > _MAX_HEAD_DIM:  # before the rope table makes an array of it
            raise config.error("head_dim", head_dim, f"at most {_MAX_HEAD_DIM} (hidden_size is {self.hidden})")
        return Heads(heads, kv_heads, head_dim)

    def _vocabulary_tensors(self, b: Builder) -> tuple[str, str]:
        """Names of the embedding and of the head. Tied models store one of them, or two equal ones; two that differ are both
        kept, as transformers does."""
        embedding, head, c = self.embedding, self.head, self.checkpoint
        if self.task.kind != GENERATE:
            if b.has(head):
                b.ignore(head)
            return embedding, head
        if not self.config.flag("tie_word_embeddings", False):
            return embedding, head
        if not b.has(head):
            return embedding, embedding
        if not b.has(embedding):
            return head, head
        if c.dtype(head) == c.dtype(embedding) and np.array_equal(c.tensor(head), c.tensor(embedding)):
            b.ignore(head)
            return embedding, embedding
        log.warning("%s: tie_word_embeddings is true, but %s differs from %s; both are kept", c.path, head, embedding)
        return embedding, head
