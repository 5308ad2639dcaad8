"""Nomic BERT (https://arxiv.org/abs/2402.01613): BERT with rotary positions, a gated MLP and no biases. What its texts begin with
("search_document: " and the like) is the client's to write."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import Program, View
from maga_transformer.models.bert import Bert
from maga_transformer.models.builder import Builder
from maga_transformer.models.rope import Rope, read_rope

_GATED = {"swiglu": "silu", "geglu": "gelu"}  # published names of the gate's function; transformers' name the function itself


class NomicBert(Bert):
    model_type = "nomic_bert"
    aliases = ("nomic-bert",)
    architectures = ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining")
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "layer_norm_eps": "layer_norm_epsilon",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_emb_fraction",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"hidden_act": "silu", "max_position_embeddings": 2048})
    _prefixes = ("nomic_bert.", "bert.", "")

    def build(self) -> Program:
        for key, supported in (
            ("prenorm", False),
            ("parallel_block", False),
            ("use_rms_norm", False),
            ("causal", False),
            ("rotary_emb_interleaved", False),
            ("moe_every_n_layers", 0),
        ):
            self.config.require(key, supported)
        self.activation = _GATED.get(self.activation, self.activation)
        return super().build()

    def embed(self, b: Builder, vocab: int | None) -> View:
        x = b.embed(self.embedding, vocab=vocab, hidden=self.hidden)
        segments = self.config.integer("type_vocab_size", 2, least=0)
        if segments:  # a text by itself is of the first
            table = f"{self._prefix}embeddings.token_type_embeddings.weight"
            x = b.add_positions(x, table, positions=segments, divisor=self.positions())
        return b.norm(x, f"{self._prefix}emb_ln", self.norm)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"{self._prefix}encoder.layers.{i}"
        q, k, v = b.split_linear(x, f"{module}.attn.Wqkv", self.heads.widths())
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{module}.attn.out_proj", width=self.hidden))
        x = b.norm(x, f"{module}.norm1", self.norm)
        names = [f"{module}.mlp.{name}" for name in ("fc12", "fc11")]
        gate, up = b.linears(x, names, widths=[self.intermediate] * 2)
        h = b.linear(b.activate(gate, up, self.activation), f"{module}.mlp.fc2", width=self.hidden)
        return b.norm(b.add(x, h), f"{module}.norm2", self.norm)

    def read_rope(self) -> Rope | None:
        config = self.config
        if config.get("partial_rotary_factor") == 0:
            raise config.error("partial_rotary_factor", 0, "more than 0: learned positions are not supported")
        factor = config.get("rotary_scaling_factor")
        if factor is not None:
            trained = config.integer("max_trained_positions", 2048)
            config.values |= {"rope_scaling": {"rope_type": "dynamic", "factor": factor}, "max_position_embeddings": trained}
        return read_rope(config, self.heads.head_dim, theta=1000.0)

    def positions(self) -> int:
        assert self.rope is not None
        return self.rope.extended_positions

    def segment_shift(self) -> int:
        return 0
