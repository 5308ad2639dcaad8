"""Which of Hugging Face's architectures a Megatron checkpoint is, and its config: from config.json, else from the args it was
trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.torch_pickle import Inert

_LLAMA = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm",
    "head": "lm_head.weight",
    "layer": "model.layers.{}",
    "norm_1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "norm_2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_MIXTRAL = {
    **_LLAMA,
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
_QWEN_MOE = {
    **_LLAMA,
    "router": "mlp.gate",
    **{f"expert_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "shared_router": "mlp.shared_expert_gate",
}
_QWEN = {
    "embedding": "transformer.wte.weight",
    "final_norm": "transformer.ln_f",
    "head": "lm_head.weight",
    "layer": "transformer.h.{}",
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_2": "ln_2",
    "gate": "mlp.w2",
    "up": "mlp.w1",
    "down": "mlp.c_proj",
}
_GPT_2 = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm": "transformer.ln_f",
    "head": "lm_head.weight",
    "layer": "transformer.h.{}",
    "norm_1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_NEOX = {
    "embedding": "gpt_neox.embed_in.weight",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out.weight",
    "layer": "gpt_neox.layers.{}",
    "norm_1": "input_layernorm",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "norm_2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
# Architecture -> its name of each role (megatron.py).
NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), _LLAMA),
        "MixtralForCausalLM": _MIXTRAL,
        **dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"), _QWEN_MOE),
        "QWenLMHeadModel": _QWEN,
        **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCodeForCausalLM"), _GPT_2),
        "GPTNeoXForCausalLM": _NEOX,
    }
)
BY_HEAD = ("GPTBigCodeForCausalLM", "GPTNeoXForCausalLM")  # whose fused qkv is stored head by head
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "QWenLMHeadModel": "qwen",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox",
}
# What RTP-LLM, and others that keep Megatron files, call the keys of Hugging Face's config.json.
_SPELLINGS = {
    "num_hidden_layers": ("n_layer", "layer_num", "num_layers"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("head_num_kv", "num_query_groups"),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("inter_size", "ffn_hidden_size", "n_inner"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("max_seq_len", "seq_length", "n_positions"),
    "head_dim": ("kv_channels", "size_per_head"),
}
# Args that change the arithmetic in ways that no target has -> the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "moe_router_score_function": (None, "softmax"),
    "moe_router_num_groups": (None, 1),
    "moe_router_enable_expert_bias": (None, False),
    "moe_router_topk_scaling_factor": (None, 1, 1.0),
    "apply_layernorm_1p": (None, False),
    "rotary_interleaved": (None, False),
    "multi_latent_attention": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "squared_relu": (None, False),
    "position_embedding_type": (None, "learned_absolute", "rope"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}


@dataclass(frozen=True)
class Sizes:
    """What the translation of tensors must know."""

    target: str  # architecture
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


def config_and_sizes(
    files: list[Path], path: str, args: Mapping[str, Any], rows: Mapping[str, int], *, core: bool
) -> tuple[dict[str, Any], Sizes]:
    """`rows`: of each tensor, over all ranks, by role."""
    file = next((file for file in files if file.is_file()), None)
    if file is not None:
        where, config = str(file), _with_usual_keys(read_json_object(str(file)))
    elif args:
        where, config = f"{path}: args", _config_of_args(f"{path}: args", args)
    else:
        raise FileNotFoundError(f"{files[0]}: no config.json, and {path} does not hold the args of its training")
    architectures = config.get("architectures")
    target = architectures[0] if isinstance(architectures, list) and architectures else _architecture(where, rows, core)
    if target not in NAMES:
        raise ValueError(f"{where}: architecture {target!r} in Megatron's layout is not supported (supported: {', '.join(NAMES)})")

    def count(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}: {key} is {value!r}, expected an integer from 1")
        return value

    heads = count("num_attention_heads")
    config.setdefault("model_type", _MODEL_TYPES.get(target))
    config["architectures"] = [target]
    if target == "GPT2LMHeadModel":
        config["transposed_linears"] = False
    elif target == "GPTBigCodeForCausalLM":
        config["multi_query"] = False
    elif target == "GPTNeoXForCausalLM":
        config.setdefault("use_parallel_residual", False)
    if file is None and target in ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        config |= _experts_of_args(where, args, rows, target)
    elif file is None and args.get("num_experts"):
        raise ValueError(f"{where}: num_experts={args['num_experts']!r} is not supported without Megatron-Core's mlp.router")
    if "head" not in rows:
        config["tie_word_embeddings"] = True
    else:
        config.setdefault("tie_word_embeddings", False)
    sizes = Sizes(
        target=target,
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", count("hidden_size") // heads),
        vocab=count("vocab_size", rows.get("embedding", 1)),
    )
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"{where}: num_key_value_heads is {sizes.kv_heads}, expected a divisor of the {heads} heads")
    return config, sizes


def _experts_of_args(where: str, args: Mapping[str, Any], rows: Mapping[str, int], target: str) -> dict[str, Any]:
    tensor_ranks, of_experts = args.get("tensor_model_parallel_size"), args.get("expert_tensor_parallel_size")
    if of_experts is not None and of_experts != (tensor_ranks or 1):
        raise ValueError(
            f"{where}: expert_tensor_parallel_size={of_experts!r} is not supported, as tensor_model_parallel_size is "
            f"{tensor_ranks!r}; convert the model to safetensors"
        )
    width = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size")
    config = {"num_experts_per_tok": args.get("moe_router_topk")}
    before = args.get("moe_router_pre_softmax") or False  # probabilities of all experts, those of the chosen as they are
    if target == "MixtralForCausalLM":
        if before:
            raise ValueError(f"{where}: moe_router_pre_softmax=True is not supported without q/k norms or a shared expert")
        return {**config, "num_local_experts": args.get("num_experts"), "intermediate_size": width}
    layers = {name.split(".")[1] for name in rows if name.startswith("layers.")}
    dense = sorted(int(layer) for layer in layers if f"layers.{layer}.router.weight" not in rows)
    config |= {"num_experts": args.get("num_experts"), "moe_intermediate_size": width, "norm_topk_prob": not before}
    return {**config, "mlp_only_layers": dense, "shared_expert_intermediate_size": args.get("moe_shared_expert_intermediate_size")}


def _with_usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    for key, spellings in _SPELLINGS.items():
        if config.get(key) is None:
            found = next((config[name] for name in spellings if config.get(name) is not None), None)
            if found is not None:
                config[key] = found
    if config.get("layernorm_eps") is not None:
        for key in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"):
            config.setdefault(key, config["layernorm_eps"])
    return config


def _architecture(where: str, rows: Mapping[str, int], core: bool) -> str:
    """By the tensors of the first layer, and whether there are experts."""
    layer = "layers.0."
    if any(name.endswith(".router.weight") for name in rows):
        if f"{layer}q_norm.weight" in rows:
            return "Qwen3MoeForCausalLM"
        return "Qwen2MoeForCausalLM" if any(".shared_up." in name for name in rows) else "MixtralForCausalLM"
    if f"{layer}norm_1.bias" in rows:
        return "GPT2LMHeadModel" if "positions" in rows else "GPTNeoXForCausalLM"
    if "positions" in rows:
        raise ValueError(f"{where}: learned positions with RMSNorm are not supported")
    if f"{layer}gate.weight" in rows and not core:  # of RTP-LLM's files
        return "QWenLMHeadModel"
    if f"{layer}q_norm.weight" in rows:
        return "Qwen3ForCausalLM"
    return "Qwen2ForCausalLM" if f"{layer}qkv.bias" in rows else "LlamaForCausalLM"


def _config_of_args(where: str, args: Mapping[str, Any]) -> dict[str, Any]:
    for key, asks_nothing in _REFUSED.items():
        value = args.get(key)
        if isinstance(value, Inert) and value.arguments:  # a member of an enumeration
            value = value.arguments[0]
        if value not in asks_nothing:
            raise ValueError(f"{where}: {key}={value!r} is not supported; convert the model to safetensors")
    heads = args.get("num_attention_heads")
    gelu = "gelu_new" if args.get("bias_gelu_fusion", True) or args.get("openai_gelu") else "gelu"
    eps = next((args[key] for key in ("norm_epsilon", "layernorm_epsilon") if args.get(key) is not None), 1e-5)
    config: dict[str, Any] = {
        "num_hidden_layers": args.get("num_layers"),
        "hidden_size": args.get("hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": args.get("num_query_groups") if args.get("group_query_attention") else heads,
        "head_dim": args.get("kv_channels"),
        "intermediate_size": args.get("ffn_hidden_size"),
        "hidden_act": "silu" if args.get("swiglu") else gelu,
        "vocab_size": args.get("vocab_size") or args.get("padded_vocab_size"),
        "max_position_embeddings": args.get("max_position_embeddings") or args.get("seq_length"),
        "rope_theta": args.get("rotary_base") or 10000,
        "partial_rotary_factor": args.get("rotary_percent") or 1.0,
        "rms_norm_eps": eps,
        "layer_norm_epsilon": eps,
        "layer_norm_eps": eps,
    }
    if args.get("use_rope_scaling"):
        scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config["rope_scaling"] = {"rope_type": "llama3", "factor": args.get("rope_scaling_factor") or 8.0, **scaling}
    elif args.get("rotary_seq_len_interpolation_factor"):
        config["rope_scaling"] = {"rope_type": "linear", "factor": args["rotary_seq_len_interpolation_factor"]}
    return {key: value for key, value in config.items() if value is not None}
