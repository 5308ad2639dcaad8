"""Inputs and results of models that embed or score: what the library and the HTTP routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from maga_transformer.models.task import EMBED, GENERATE, SCORE, Task
from maga_transformer.request import Fault, RequestError
from maga_transformer.tokenizer import Tokenizer

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Input:
    """Token ids of one text or of a pair; those from `segment_start` on belong to the second text."""

    ids: Sequence[int]
    segment_start: int | None = None


@dataclass(frozen=True)
class Embedder:
    """Token ids in, finished vectors and scores out; the engine runs between."""

    tokenizer: Tokenizer
    task: Task
    max_tokens: int  # of an input
    width: int = 0  # of an embedding
    why: str = ""  # there are no more tokens, if not by the model's own limit

    def require(self, *kinds: str) -> None:
        if self.task.kind not in kinds:
            own = {GENERATE: "generates text", EMBED: "embeds texts", SCORE: "scores texts"}[self.task.kind]
            wanted = " or ".join(_WANTED[kind] for kind in kinds)
            raise RequestError(Fault.unsupported, f"this model {own}: it cannot be asked for {wanted}")

    def require_multi_vector(self) -> None:
        if not self.task.multi_vector:
            raise RequestError(
                Fault.unsupported,
                "embedding_config.type: this model has dense embeddings only; others need sparse_linear.pt and colbert_linear.pt",
                "type",
            )

    def encode(self, text: str, pair: str | None = None, *, truncate: int | None = None, field: str = "input") -> Input:
        """`truncate`: tokens that are kept, those of `pair` are the first to go; -1: as many as the model takes; None: an input
        that is too long is refused."""
        limit = self.max_tokens if truncate == -1 else truncate
        try:
            ids, segment_start = self.tokenizer.encode_input(text, pair, limit)
        except ValueError as error:
            raise RequestError(Fault.parameter, f"{field}: {error}", field) from None
        return self.check(Input(ids, segment_start), field)

    def check(self, item: Input, field: str = "input") -> Input:
        count, vocab = len(item.ids), self.tokenizer.vocab_size
        if not count:
            raise RequestError(Fault.empty_prompt, f"{field} is empty: it has no token", field)
        if count > self.max_tokens:
            raise RequestError(
                Fault.long_prompt, f"This model takes at most {self.max_tokens} tokens{self.why}, but {field} has {count}", field
            )
        if not all(0 <= token < vocab for token in item.ids):
            raise RequestError(Fault.parameter, f"{field}: token ids must be from 0 to {vocab - 1}", field)
        return item

    def embedding(self, vector: Vector, *, dimensions: int | None = None, normalize: bool | None = None) -> Vector:
        """`dimensions`: the first so many, for models trained to be cut (Matryoshka). `normalize` None: as the model wants."""
        if self.task.multi_vector:
            vector = vector[: self.width]  # of the first token
        if dimensions is not None:
            if not 1 <= dimensions <= len(vector):
                raise RequestError(Fault.parameter, f"dimensions={dimensions}: valid: 1 to {len(vector)}", "dimensions")
            vector = vector[:dimensions]
        wanted = self.task.normalize if normalize is None else normalize
        return unit(vector) if wanted else vector

    def lexical_weights(self, vector: Vector, ids: Sequence[int]) -> dict[int, float]:
        """Of a model with several vectors: by token id, the largest weight of each that is above 0, without special tokens."""
        weights = vector.reshape(len(ids), -1)[:, -1]
        found: dict[int, float] = {}
        for token, weight in zip(ids, weights.tolist(), strict=True):
            if weight > 0 and token not in self.tokenizer.special_ids:
                found[token] = max(weight, found.get(token, 0.0))
        return found

    def token_vectors(self, vector: Vector, ids: Sequence[int], *, normalize: bool = True) -> Vector:
        """Of such a model too, (tokens - 1, width): of all tokens but the first."""
        vectors = vector.reshape(len(ids), -1)[1:, self.width : -1]
        return np.stack([unit(each) for each in vectors]) if normalize and len(vectors) else vectors

    def relevance(self, logits: Vector, *, normalize: bool = True) -> float:
        """Of a pair, by a model with one label; `normalize` false: the logit itself."""
        if len(logits) != 1:
            raise RequestError(Fault.unsupported, f"this model has {len(logits)} labels: a relevance needs one")
        return float(1 / (1 + np.exp(-np.float64(logits[0])))) if normalize else float(logits[0])


def unit(vector: Vector) -> Vector:
    return np.asarray(vector / np.maximum(np.linalg.norm(vector), 1e-12), np.float32)


_WANTED = {GENERATE: "an answer", EMBED: "embeddings", SCORE: "scores"}
