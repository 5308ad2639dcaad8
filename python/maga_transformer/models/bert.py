"""BERT (https://arxiv.org/abs/1810.04805), RoBERTa and XLM-R: encoders whose tokens all see each other. They embed or score."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import Program, View
from maga_transformer.models.builder import Builder
from maga_transformer.models.family import Family
from maga_transformer.models.rope import Rope
from maga_transformer.models.task import COLBERT, SCORE, SPARSE


class Bert(Family):
    model_type = "bert"
    architectures: ClassVar[tuple[str, ...]] = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
    encoder = True
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "gelu", "max_position_embeddings": 512})
    norm_kind = "layer"
    norm_eps = ("layer_norm_eps", 1e-12)
    _prefixes: ClassVar[tuple[str, ...]] = ("bert.", "")

    def build(self) -> Program:
        self.config.require("position_embedding_type", "absolute")
        self.config.require("is_decoder", False)
        b = Builder(self.checkpoint, self.model_type)
        self._prefix = next((p for p in self._prefixes if b.has(f"{p}embeddings.word_embeddings.weight")), self._prefixes[0])
        self.embedding = f"{self._prefix}embeddings.word_embeddings.weight"
        b.program.max_positions = self.positions()
        b.program.set_context(whole=True)
        x = self.embed(b, self.config.integer("vocab_size"))
        for i in range(self.layers):
            x = self.layer(b, x, i)
        if self.task.kind == SCORE:
            self.scores(b, b.pool(x, "first"))
        elif self.task.multi_vector:
            b.end_per_token(x, [COLBERT, SPARSE])
        else:
            b.end(b.pool(x, self.task.pooling))
        b.ignore_rest(rf"(pooler\.|cls\.|lm_head\.|{COLBERT}\.|{SPARSE}\.|.*position_ids$)")
        return b.finish()

    def embed(self, b: Builder, vocab: int | None) -> View:
        module = f"{self._prefix}embeddings"
        x = super().embed(b, vocab)
        # A second segment's tokens have positions behind those of the first: the table of positions stands there again.
        shift, segments = self.segment_shift(), self.config.integer("type_vocab_size", 2)
        table, times = f"{module}.position_embeddings.weight", min(segments, 2)
        x = b.add_positions(x, table, positions=self.positions(), offset=self.first_position(), repeats=times)
        x = b.add_positions(x, f"{module}.token_type_embeddings.weight", positions=segments, divisor=shift)
        return b.norm(x, f"{module}.LayerNorm", self.norm)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"{self._prefix}encoder.layer.{i}"
        names = [f"{module}.attention.self.{name}" for name in ("query", "key", "value")]
        q, k, v = b.linears(x, names, widths=self.heads.widths(), bias=True)
        attended = b.linear(b.attention(q, k, v, self.heads), f"{module}.attention.output.dense", bias=True)
        x = b.norm(b.add(x, attended), f"{module}.attention.output.LayerNorm", self.norm)
        h = b.mlp(x, f"{module}.intermediate.dense", f"{module}.output.dense", self.activation, width=self.intermediate, bias=True)
        return b.norm(b.add(x, h), f"{module}.output.LayerNorm", self.norm)

    def scores(self, b: Builder, first: View) -> None:
        pooled = b.tanh(b.linear(first, f"{self._prefix}pooler.dense", width=self.hidden, bias=True))
        b.end(pooled, "classifier", width=self.task.labels)

    def read_rope(self) -> Rope | None:
        return None

    def first_position(self) -> int:
        """The row of the table that the first token gets."""
        return 0

    def positions(self) -> int:
        return self.config.integer("max_position_embeddings") - self.first_position()

    def segment_shift(self) -> int:
        return self.config.integer("max_position_embeddings")


class Roberta(Bert):
    model_type = "roberta"
    aliases = ("xlm-roberta", "camembert")
    architectures = (
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "CamembertModel",
        "CamembertForSequenceClassification",
    )
    _prefixes = ("roberta.", "")

    def scores(self, b: Builder, first: View) -> None:
        pooled = b.tanh(b.linear(first, "classifier.dense", width=self.hidden, bias=True))
        b.end(pooled, "classifier.out_proj", width=self.task.labels)

    def first_position(self) -> int:
        return self.config.integer("pad_token_id", 1, least=0) + 1
