"""OLMo, the first generation (https://arxiv.org/abs/2402.00838): Llama with norms that have no weights, and bounded q, k, v."""

from maga_transformer._core import View
from maga_transformer.checkpoint import Checkpoint
from maga_transformer.models.builder import Builder, Norm
from maga_transformer.models.llama import Llama

_EPS = 1e-5  # no key says so


class Olmo(Llama):
    model_type = "olmo"
    architectures = ("OlmoForCausalLM",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.norm = Norm("layer", _EPS, weight=False)

    def qkv(self, b: Builder, x: View, module: str) -> list[View]:
        views = super().qkv(b, x, module)
        if self.config.get("clip_qkv") is not None:
            b.clamp(views, self.config.number("clip_qkv"))
        return views
