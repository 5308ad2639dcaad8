"""ChatGLM2, ChatGLM3 and GLM-4 (https://arxiv.org/abs/2406.12793), as their own code stores them: half of each head rotates, by
neighbouring pairs."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder
from maga_transformer.models.chatglm1 import ChatGlm1
from maga_transformer.models.family import Family
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.rope import Rope, read_rope

_VOCABULARY_GLM4 = 151552


class ChatGlm(Family):
    model_type = "chatglm"
    aliases: ClassVar[tuple[str, ...]] = ("chat_glm",)
    architectures: ClassVar[tuple[str, ...]] = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
    spellings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "num_hidden_layers": "num_layers",
            "vocab_size": "padded_vocab_size",
            "intermediate_size": "ffn_hidden_size",
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
        }
    )
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"partial_rotary_factor": 0.5})
    layer_tensors = LayerTensors(
        "encoder.layers.{}.self_attention.dense",
        "",
        "encoder.layers.{}.self_attention.query_key_value",
        "encoder.layers.{}.mlp.dense_4h_to_h",
    )
    norm_eps = ("layernorm_epsilon", 1e-5)
    embedding = "transformer.embedding.word_embeddings.weight"
    final_norm = "transformer.encoder.final_layernorm"
    head = "transformer.output_layer.weight"

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> type[Family]:
        return cls if checkpoint.config.get("position_encoding_2d") is None else ChatGlm1

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        for key in ("rmsnorm", "post_layer_norm"):
            self.config.require(key, True)
        for key in ("add_bias_linear", "apply_residual_connection_post_layernorm"):
            self.config.require(key, False)

    def kv_heads(self, heads: int) -> int:
        return self.config.integer("multi_query_group_num") if self.config.flag("multi_query_attention", False) else heads

    def read_rope(self) -> Rope:
        ratio = self.config.number("rope_ratio", 1.0)
        if ratio != 1 and self.config.get("vocab_size") != _VOCABULARY_GLM4:
            raise ValueError(
                f"{self.config.path}: config key rope_ratio is {ratio}, which ChatGLM2 and ChatGLM3 read differently: "
                "set MODEL_TYPE to chatglm2 or chatglm3"
            )
        return self.stretched_rope(theta_ratio=ratio)

    def stretched_rope(self, *, theta_ratio: float = 1.0) -> Rope:
        return replace(read_rope(self.config, self.heads.head_dim, theta=10000.0 * theta_ratio), interleaved=True)

    def layer(self, b: Builder, x: View, i: int) -> View:
        module = f"transformer.encoder.layers.{i}"
        h = b.norm(x, f"{module}.input_layernorm", self.norm)
        groups = 1 if self.config.flag("multi_query_attention", False) else self.heads.heads
        bias = self.config.flag("add_qkv_bias", False)
        attention, mlp = f"{module}.self_attention", f"{module}.mlp"
        q, k, v = b.split_linear(h, f"{attention}.query_key_value", self.heads.widths(), groups=groups, bias=bias)
        x = b.add(x, b.linear(self.attend(b, q, k, v), f"{attention}.dense", width=self.hidden))
        h = b.norm(x, f"{module}.post_attention_layernorm", self.norm)
        gate, up = b.split_linear(h, f"{mlp}.dense_h_to_4h", [self.known_width()] * 2)
        return b.add(x, b.linear(b.activate(gate, up, self.activation), f"{mlp}.dense_4h_to_h", width=self.hidden))


class ChatGlm2(ChatGlm):
    """rope_ratio divides positions."""

    model_type = "chatglm2"
    aliases = ("chat_glm_2",)
    architectures = ()

    def read_rope(self) -> Rope:
        rope, ratio = self.stretched_rope(), self.config.number("rope_ratio", 1.0)
        return replace(rope, inv_freq=[frequency / ratio for frequency in rope.inv_freq])


class ChatGlm3(ChatGlm):
    """rope_ratio multiplies theta, as in GLM-4."""

    model_type = "chatglm3"
    aliases = ("chat_glm_3", "chatglm4")
    architectures = ()

    def read_rope(self) -> Rope:
        return self.stretched_rope(theta_ratio=self.config.number("rope_ratio", 1.0))
