"""Baichuan and Baichuan 2 (https://arxiv.org/abs/2309.10305): Llama with q, k and v in one tensor. The 13B models have ALiBi, the
second generation's head is a matrix of rows of length 1."""

from typing import ClassVar

from maga_transformer._core import View
from maga_transformer.models.builder import Builder
from maga_transformer.models.irregular import LayerTensors
from maga_transformer.models.llama import Llama

_VOCABULARY_2, _HIDDEN_13B = 125696, 5120


class Baichuan(Llama):
    model_type = "baichuan"
    layer_tensors = LayerTensors(fused="model.layers.{}.self_attn.W_pack")
    architectures: ClassVar[tuple[str, ...]] = ("BaichuanForCausalLM", "BaiChuanForCausalLM")

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        if b.has(f"{module}.q_proj.weight"):  # apart, as GGUF files have them
            return super().qkv(b, x, module)
        return b.split_linear(x, f"{module}.W_pack", self.heads.widths())

    def logits(self, b: Builder, x: View, vocab: int | None) -> None:
        b.head(x, self.head, vocab=vocab, unit_rows=self.second(vocab))

    def second(self, vocab: int | None) -> bool:
        return self.config.get("z_loss_weight") is not None or vocab == _VOCABULARY_2

    def uses_alibi(self) -> bool:
        """No key says so: the 13B models have only model_max_length where the 7B ones have max_position_embeddings."""
        long = self.config.get("max_position_embeddings") is None and self.config.get("model_max_length") is not None
        return long or self.hidden == _HIDDEN_13B

    def positions(self) -> int:
        if self.config.get("max_position_embeddings") is None:
            return self.config.integer("model_max_length", 4096)
        return super().positions()


class Baichuan2(Baichuan):
    """Named by MODEL_TYPE, where a config does not show which generation it is of."""

    model_type = "baichuan2"
    architectures = ()

    def second(self, vocab: int | None) -> bool:
        return True
