"""Configs drawn at random within each family's rules: heads, KV heads, sizes, windows, biases, rope scalings; the logits are those
of transformers, as a whole prompt, in chunks, decoded, and beside another sequence."""

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import transformers
from folders import class_names, tiny_model
from maga_transformer import _core
from test_families import ROPE_SCALINGS, check
from tiny_families import GEMMA3_ROPE, GLM_MOE, MLA, MLA_YARN, MOE, logits_of

FLAG = (False, True)
WINDOW = (None, 5, 17)
PARTIAL = (0.25, 0.5, 1.0)
MIXTURE = {"num_experts_per_tok": (1, 2, 4), "moe_intermediate_size": (16, 40)}
# What may change beside the sizes; "own_head_dim": the family has the key head_dim, apart from hidden_size; "scaled": it takes
# every rope scaling. A value that is no tuple is fixed.
RULES: dict[str, dict[str, Any]] = {
    "llama": {"own_head_dim": True, "scaled": True, "attention_bias": FLAG, "mlp_bias": FLAG, "tie_word_embeddings": FLAG},
    "mistral": {"own_head_dim": True, "scaled": True, "sliding_window": WINDOW},
    "mixtral": {"own_head_dim": True, "num_local_experts": (3, 8), "num_experts_per_tok": (1, 2), "sliding_window": WINDOW},
    "qwen2": {
        "scaled": True, "tie_word_embeddings": FLAG, "use_sliding_window": FLAG, "sliding_window": (7, 19),
        "max_window_layers": (0, 1),
    },
    "qwen3": {"own_head_dim": True, "scaled": True, "attention_bias": FLAG, "tie_word_embeddings": FLAG},
    "qwen2_moe": {**MOE, **MIXTURE, "norm_topk_prob": FLAG, "decoder_sparse_step": (1, 2), "qkv_bias": FLAG},
    "qwen3_moe": {**MOE, **MIXTURE, "own_head_dim": True, "norm_topk_prob": FLAG, "mlp_only_layers": ([], [1])},
    "olmoe": {"num_experts": (4, 8), "num_experts_per_tok": (1, 3), "norm_topk_prob": FLAG},
    "glm4_moe": {**GLM_MOE, "own_head_dim": True, "use_qk_norm": FLAG, "attention_bias": FLAG, "topk_group": (1, 3)},
    "gemma": {"own_head_dim": True, "scaled": True},
    "gemma2": {
        "own_head_dim": True, "sliding_window": (5, 17), "query_pre_attn_scalar": (8, 20), "attn_logit_softcapping": (None, 2.0),
    },
    "gemma3": {"own_head_dim": True, "sliding_window": (5, 17), "rope_parameters": GEMMA3_ROPE},
    "cohere": {"scaled": True, "use_qk_norm": FLAG, "attention_bias": FLAG, "logit_scale": (0.8, 1.5)},
    "cohere2": {"own_head_dim": True, "sliding_window": (5, 17), "logit_scale": 1.0},
    "glm": {"own_head_dim": True, "attention_bias": FLAG, "pad_token_id": 0},
    "glm4": {"own_head_dim": True, "attention_bias": FLAG, "pad_token_id": 0},
    "olmo": {"attention_bias": FLAG, "clip_qkv": (None, 0.7)},
    "olmo2": {"scaled": True, "attention_bias": FLAG},
    "nemotron": {"own_head_dim": True, "attention_bias": FLAG, "mlp_bias": FLAG, "partial_rotary_factor": PARTIAL},
    "phi": {"partial_rotary_factor": PARTIAL, "qk_layernorm": FLAG},
    "phi3": {"pad_token_id": 0, "sliding_window": WINDOW, "tie_word_embeddings": FLAG},
    "stablelm": {"partial_rotary_factor": PARTIAL, "use_qkv_bias": FLAG, "qk_layernorm": FLAG, "use_parallel_residual": FLAG},
    "starcoder2": {"use_bias": FLAG, "sliding_window": WINDOW, "tie_word_embeddings": FLAG},
    "gpt_neox": {"rotary_pct": PARTIAL, "use_parallel_residual": FLAG, "attention_bias": FLAG},
    "gpt2": {"scale_attn_by_inverse_layer_idx": FLAG, "n_inner": (None, 72), "tie_word_embeddings": FLAG},
    "gpt_bigcode": {"multi_query": FLAG, "n_inner": (None, 72)},
    "opt": {"ffn_dim": (72, 96), "do_layer_norm_before": FLAG, "enable_bias": FLAG},
    "falcon": {"multi_query": FLAG, "parallel_attn": FLAG, "bias": FLAG, "alibi": FLAG},
    "bloom": {"apply_residual_connection_post_layernorm": FLAG},
    "mpt": {"attn_config": ({"clip_qkv": 0.6}, {"softmax_scale": 0.3})},
    "gpt_oss": {"own_head_dim": True, "num_local_experts": (4, 8), "num_experts_per_tok": (1, 3), "sliding_window": (5, 17)},
    "deepseek_v2": {
        **MLA, "q_lora_rank": (None, 20), "kv_lora_rank": (12, 34), "qk_nope_head_dim": (6, 16), "v_head_dim": (6, 18),
        "n_group": 4, "topk_method": ("greedy", "group_limited_greedy"), "topk_group": (1, 3), "first_k_dense_replace": (0, 2),
        "attention_bias": FLAG, "rope_parameters": (None, MLA_YARN),
    },
    "deepseek_v3": {
        **MLA, "q_lora_rank": (None, 20), "kv_lora_rank": (12, 34), "qk_nope_head_dim": (6, 16), "v_head_dim": (6, 18),
        "n_group": (2, 4), "topk_group": (1, 2), "norm_topk_prob": FLAG, "rope_interleave": FLAG,
        "rope_parameters": (None, MLA_YARN),
    },
}  # fmt: skip
# Families whose KV heads are as many as their heads, or follow from other keys.
OWN_KV_HEADS = ("gpt_neox", "gpt2", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "deepseek_v2", "deepseek_v3")

OWN_WIDTH = ("gpt2", "gpt_bigcode", "opt", "falcon", "bloom", "mpt")  # of their MLP: by another key, or four times the hidden size
KEPT = ("sliding_window", "q_lora_rank", "num_key_value_heads")  # keys for which None is a value


def drawn(kind: str, seed: int) -> dict[str, Any]:
    dice, rules = random.Random(zlib.crc32(f"{kind} {seed}".encode())), dict(RULES[kind])
    own_head_dim, scaled = rules.pop("own_head_dim", False), rules.pop("scaled", False)
    heads, head_dim = dice.choice([2, 4, 6]), dice.choice([8, 16, 24])
    settings: dict[str, Any] = {
        "num_attention_heads": heads,
        "hidden_size": dice.choice([40, 48, 72]) if own_head_dim else heads * head_dim,
        "num_hidden_layers": dice.choice([2, 3]),
    }
    if kind not in OWN_WIDTH:
        settings["intermediate_size"] = dice.choice([56, 80])
    if own_head_dim:
        settings["head_dim"] = head_dim
        settings["hidden_size"] = heads * (settings["hidden_size"] // heads)
    if kind not in OWN_KV_HEADS:
        settings["num_key_value_heads"] = dice.choice([n for n in (1, 2, heads) if heads % n == 0])
    settings |= {key: dice.choice(value) if isinstance(value, tuple) else value for key, value in rules.items()}
    scaling = dice.choice([None, "linear", "llama3", "yarn"]) if scaled else None
    if scaling:
        default = getattr(transformers, class_names(kind)[0])().rope_parameters
        settings["rope_parameters"] = {**default, **ROPE_SCALINGS[scaling]}
    return {key: value for key, value in settings.items() if value is not None or key in KEPT}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", RULES)
def test_logits(kind: str, seed: int, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path, seed=seed, **drawn(kind, seed))
    check(logits_of(model), tmp_path, _core.cpu_backend(threads=1, quantize_activations=False))
