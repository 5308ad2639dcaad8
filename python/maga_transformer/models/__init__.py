"""Model families as programs. To add one: a file with a Family here, and its class in _FAMILIES."""

import difflib
import re

from maga_transformer._core import Program
from maga_transformer.checkpoint import Checkpoint, GgufCheckpoint
from maga_transformer.checkpoint.gguf_config import ARCHITECTURES
from maga_transformer.formats import open_quantized
from maga_transformer.models.baichuan import Baichuan, Baichuan2
from maga_transformer.models.bert import Bert, Roberta
from maga_transformer.models.bloom import Bloom
from maga_transformer.models.chatglm import ChatGlm, ChatGlm2, ChatGlm3
from maga_transformer.models.chatglm1 import ChatGlm1
from maga_transformer.models.cohere import Cohere, Cohere2
from maga_transformer.models.deepseek import DeepseekV2, DeepseekV3
from maga_transformer.models.falcon import Falcon
from maga_transformer.models.family import Family
from maga_transformer.models.gemma import Gemma
from maga_transformer.models.gemma2 import Gemma2
from maga_transformer.models.gemma3 import Gemma3
from maga_transformer.models.glm import Glm, Glm4
from maga_transformer.models.glm4_moe import Glm4Moe
from maga_transformer.models.gpt2 import Gpt2, GptBigCode
from maga_transformer.models.gpt_neox import GptNeoX
from maga_transformer.models.gpt_oss import GptOss
from maga_transformer.models.internlm import InternLM, InternLM2
from maga_transformer.models.llama import Aquila, Llama, Mistral, Xverse
from maga_transformer.models.mixtral import Mixtral
from maga_transformer.models.mpt import Mpt
from maga_transformer.models.nemotron import Nemotron
from maga_transformer.models.nomic_bert import NomicBert
from maga_transformer.models.olmo import Olmo
from maga_transformer.models.olmo2 import Olmo2
from maga_transformer.models.olmoe import Olmoe
from maga_transformer.models.opt import Opt
from maga_transformer.models.phi import Phi
from maga_transformer.models.phi3 import Phi3
from maga_transformer.models.qwen import Qwen
from maga_transformer.models.qwen2 import Qwen2
from maga_transformer.models.qwen2_moe import Qwen2Moe
from maga_transformer.models.qwen3 import Qwen3
from maga_transformer.models.qwen3_moe import Qwen3Moe
from maga_transformer.models.stablelm import StableLm
from maga_transformer.models.starcoder2 import Starcoder2
from maga_transformer.models.task import read_task

__all__ = ["Family", "build_program", "families"]

_FAMILIES: tuple[type[Family], ...] = (
    Llama,
    Mistral,
    Mixtral,
    Qwen,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Aquila,
    Baichuan,
    Baichuan2,
    Bert,
    Roberta,
    Bloom,
    ChatGlm,
    ChatGlm1,
    ChatGlm2,
    ChatGlm3,
    Cohere,
    Cohere2,
    DeepseekV2,
    DeepseekV3,
    Falcon,
    Gemma,
    Gemma2,
    Gemma3,
    Glm,
    Glm4,
    Gpt2,
    GptBigCode,
    Glm4Moe,
    GptNeoX,
    GptOss,
    InternLM,
    InternLM2,
    Mpt,
    Nemotron,
    NomicBert,
    Olmo,
    Olmo2,
    Opt,
    Olmoe,
    Phi,
    Phi3,
    StableLm,
    Starcoder2,
    Xverse,
)


def families() -> dict[str, type[Family]]:
    """Every family by MODEL_TYPE name, alias and architecture."""
    return {name: family for family in _FAMILIES for name in (family.model_type, *family.aliases, *family.architectures)}


def build_program(checkpoint: Checkpoint, model_type: str | None = None, task: str = "auto") -> tuple[Program, Family]:
    """`model_type` None: by the checkpoint's `architectures`. `task`: auto, generate, embed or score. ValueError for a type or
    architecture that is not known, and for a type that contradicts a known architecture."""
    family = _choose(checkpoint, model_type)(open_quantized(checkpoint))
    family.task = read_task(checkpoint, task, encoder=family.encoder)
    return family.build(), family


def _near(name: str) -> str:
    """What it may have been meant to be."""
    spelled = {known.lower(): known for known in reversed(families())}  # of two that differ in case, the first
    close = [spelled[match] for match in difflib.get_close_matches(name.lower(), spelled, n=3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _runs(family: type[Family], architecture: str) -> bool:
    """A decoder's own architectures, and what sentence-transformers and rerankers make of them."""
    if architecture in family.architectures or family.encoder:
        return architecture in family.architectures
    stem = re.sub(r"(Model|ForSequenceClassification)$", "", architecture)
    return stem != architecture and f"{stem}ForCausalLM" in family.architectures


def _choose(checkpoint: Checkpoint, model_type: str | None) -> type[Family]:
    known = families()
    types = ", ".join(family.model_type for family in _FAMILIES)
    listed = checkpoint.config.get("architectures") or []
    architectures = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    found = next((family for name in architectures for family in _FAMILIES if _runs(family, name)), None)
    if model_type is None:
        if found is None and not architectures:
            found = known.get(str(checkpoint.config.get("model_type")))
        if found is None:
            name = architectures[0] if architectures else checkpoint.config.get("model_type")
            valid = f"of GGUF: {', '.join(ARCHITECTURES)}" if isinstance(checkpoint, GgufCheckpoint) else f"model types: {types}"
            raise ValueError(f"{checkpoint.path}: architecture {name!r} is not supported{_near(str(name))} ({valid})")
        return found.of(checkpoint)
    if model_type not in known:
        raise ValueError(f"model type {model_type!r} is not known{_near(model_type)} (model types: {types})")
    wanted = known[model_type].of(checkpoint)
    found = None if found is None else found.of(checkpoint)
    if found in wanted.__bases__ and not wanted.architectures:
        return wanted  # one of several models that share an architecture's name
    if found is not None and found is not wanted and not issubclass(found, wanted):
        raise ValueError(f"model type {model_type!r} does not fit {checkpoint.path}, which is of type {found.model_type!r}")
    return wanted if found is None else found
