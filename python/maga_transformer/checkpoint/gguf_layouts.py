"""What llama.cpp's converter makes of each model family, undone: names, the order of fused rows, and what it adds to norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any


def _names(*others: Mapping[str, str], **modules: str) -> Mapping[str, str]:
    """Those of `others` and `modules`; where several have one, the last counts."""
    return MappingProxyType({module: name for names in (*others, modules) for module, name in names.items()})


@dataclass(frozen=True)
class Layout:
    architecture: str  # Hugging Face's
    model_type: str
    outside: Mapping[str, str]  # module -> name in the target
    layer: str  # "{}" stands for the number
    modules: Mapping[str, str]  # module of a layer -> its name in the target, after the layer's
    # Rows of q and k are stored for the rotation of neighbours, the target rotates halves.
    pairs: bool = False
    # Fused q|k|v is, in the target, a run of q, k and v for each "head" or "group" (of a KV head), or "apart".
    qkv: str = ""
    norm_offset: float = 0.0  # that the converter added to the weights of norms
    eps: str = "rms_norm_eps"
    config: Mapping[str, Any] = field(default_factory=dict)  # keys that all files of the architecture have
    # Keys whose value is whether a tensor is there.
    flags: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # more keys -> metadata keys, after the architecture's prefix


_LLAMA_OUTSIDE = _names(token_embd="model.embed_tokens", output_norm="model.norm", output="lm_head")
_LLAMA_MODULES = _names(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
    attn_q_norm="self_attn.q_norm",
    attn_k_norm="self_attn.k_norm",
    ffn_norm="post_attention_layernorm",
    ffn_gate="mlp.gate_proj",
    ffn_up="mlp.up_proj",
    ffn_down="mlp.down_proj",
)
_ATTENTION_BIAS = "model.layers.0.self_attn.q_proj.bias"


def _llama(architecture: str, model_type: str, modules: Mapping[str, str] = _names(), **more: Any) -> Layout:
    """Llama's names, but for `modules`."""
    flags = {"attention_bias": _ATTENTION_BIAS, "mlp_bias": "model.layers.0.mlp.up_proj.bias", **more.pop("flags", {})}
    return Layout(architecture, model_type, _LLAMA_OUTSIDE, "model.layers.{}", _names(_LLAMA_MODULES, modules), flags=flags, **more)


_EXPERTS = _names(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{}.gate_proj",
    ffn_up_exps="mlp.experts.{}.up_proj",
    ffn_down_exps="mlp.experts.{}.down_proj",
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
_EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_DEEPSEEK_EXPERTS = _names(
    _EXPERTS,
    exp_probs_b="mlp.gate.e_score_correction_bias",
    ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
)
_DEEPSEEK_EXPERT_KEYS = {
    **_EXPERT_KEYS,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_SANDWICH = _names(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
_GEMMA_2 = _names(_SANDWICH, ffn_norm="pre_feedforward_layernorm")
_GPT_2 = _names(
    attn_norm="ln_1",
    attn_qkv="attn.c_attn",
    attn_output="attn.c_proj",
    ffn_norm="ln_2",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
)
_GPT_2_OUTSIDE = _names(
    token_embd="transformer.wte", position_embd="transformer.wpe", output_norm="transformer.ln_f", output="lm_head"
)
_PARALLEL = _names(
    attn_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    attn_output="self_attention.dense",
    attn_qkv="self_attention.query_key_value",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
)
_GELU = {"hidden_act": "gelu"}

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "llama": _llama("LlamaForCausalLM", "llama", pairs=True),
        "deci": _llama("DeciLMForCausalLM", "deci", pairs=True),
        "xverse": _llama("XverseForCausalLM", "xverse", pairs=True),
        "olmo": _llama("OlmoForCausalLM", "olmo", pairs=True, eps="layer_norm_eps", keys={"clip_qkv": "attention.clamp_kqv"}),
        "baichuan": _llama("BaichuanForCausalLM", "baichuan", pairs=True),
        "qwen2": _llama("Qwen2ForCausalLM", "qwen2"),
        "qwen2moe": _llama("Qwen2MoeForCausalLM", "qwen2_moe", _EXPERTS, config={"norm_topk_prob": False}, keys=_EXPERT_KEYS),
        "qwen3moe": _llama("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS, config={"norm_topk_prob": True}, keys=_EXPERT_KEYS),
        "olmoe": _llama("OlmoeForCausalLM", "olmoe", _EXPERTS, config={"norm_topk_prob": False}, keys=_EXPERT_KEYS),
        "glm4moe": _llama(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            _names(_DEEPSEEK_EXPERTS, post_attention_norm="post_attention_layernorm"),
            flags={"use_qk_norm": "model.layers.0.self_attn.q_norm.weight"},
            keys=_DEEPSEEK_EXPERT_KEYS,
        ),
        "deepseek2": _llama(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            _names(
                _DEEPSEEK_EXPERTS,
                attn_q_a="self_attn.q_a_proj",
                attn_q_a_norm="self_attn.q_a_layernorm",
                attn_q_b="self_attn.q_b_proj",
                attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
                attn_kv_a_norm="self_attn.kv_a_layernorm",
                attn_kv_b="self_attn.kv_b_proj",
                attn_k_b="self_attn.k_b_proj",  # kv_b_proj's rows of each head, (heads, latent, nope)
                attn_v_b="self_attn.v_b_proj",  # (heads, v_dim, latent)
            ),
            keys={
                **_DEEPSEEK_EXPERT_KEYS,
                "q_lora_rank": "attention.q_lora_rank",
                "kv_lora_rank": "attention.kv_lora_rank",
                "qk_rope_head_dim": "rope.dimension_count",
            },
        ),
        "gpt-oss": _llama(
            "GptOssForCausalLM",
            "gpt_oss",
            _names(
                attn_sinks="self_attn.sinks",
                post_attention_norm="post_attention_layernorm",
                ffn_gate_inp="mlp.router",
                ffn_gate_exps="mlp.experts.{}.gate_proj",
                ffn_up_exps="mlp.experts.{}.up_proj",
                ffn_down_exps="mlp.experts.{}.down_proj",
            ),
            keys={**_EXPERT_KEYS, "intermediate_size": "expert_feed_forward_length"},
        ),
        "qwen3": _llama("Qwen3ForCausalLM", "qwen3"),
        "gemma": _llama("GemmaForCausalLM", "gemma", norm_offset=1.0, config={"hidden_act": "gelu_pytorch_tanh"}),
        "gemma2": _llama(
            "Gemma2ForCausalLM",
            "gemma2",
            _GEMMA_2,
            norm_offset=1.0,
            config={"hidden_act": "gelu_pytorch_tanh"},
            keys={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        ),
        "gemma3": _llama(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _GEMMA_2,
            norm_offset=1.0,
            config={"hidden_act": "gelu_pytorch_tanh"},
            keys={"rope_local_base_freq": "rope.freq_base_swa", "final_logit_softcapping": "final_logit_softcapping"},
        ),
        "olmo2": _llama("Olmo2ForCausalLM", "olmo2", _SANDWICH),
        "nemotron": _llama("NemotronForCausalLM", "nemotron", norm_offset=1.0, eps="norm_eps", config={"hidden_act": "relu2"}),
        "stablelm": _llama(
            "StableLmForCausalLM",
            "stablelm",
            _names(attn_q_norm="self_attn.q_layernorm.norms", attn_k_norm="self_attn.k_layernorm.norms"),
            eps="layer_norm_eps",
            flags={"use_qkv_bias": _ATTENTION_BIAS, "qk_layernorm": "model.layers.0.self_attn.q_layernorm.norms.0.weight"},
        ),
        "command-r": _llama(
            "CohereForCausalLM",
            "cohere",
            eps="layer_norm_eps",
            flags={"use_qk_norm": "model.layers.0.self_attn.q_norm.weight"},
            keys={"logit_scale": "logit_scale"},
        ),
        "cohere2": _llama("Cohere2ForCausalLM", "cohere2", eps="layer_norm_eps", keys={"logit_scale": "logit_scale"}),
        "phi3": _llama("Phi3ForCausalLM", "phi3", _names(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")),
        "glm4": _llama(
            "Glm4ForCausalLM",
            "glm4",
            _names(post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm", ffn_up="mlp.gate_up_proj"),
        ),
        "starcoder2": _llama(
            "Starcoder2ForCausalLM",
            "starcoder2",
            _names(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
            eps="norm_epsilon",
            config={"hidden_act": "gelu_pytorch_tanh"},
            flags={"use_bias": _ATTENTION_BIAS},
        ),
        "phi2": Layout(
            "PhiForCausalLM",
            "phi",
            _names(token_embd="model.embed_tokens", output_norm="model.final_layernorm", output="lm_head"),
            "model.layers.{}",
            _names(
                _LLAMA_MODULES,
                attn_qkv="self_attn.{}_proj",
                attn_output="self_attn.dense",
                ffn_up="mlp.fc1",
                ffn_down="mlp.fc2",
            ),
            qkv="apart",
            eps="layer_norm_eps",
            config={"hidden_act": "gelu_new"},
        ),
        "internlm2": Layout(
            "InternLM2ForCausalLM",
            "internlm2",
            _names(token_embd="model.tok_embeddings", output_norm="model.norm", output="output"),
            "model.layers.{}",
            _names(
                attn_norm="attention_norm",
                attn_q="attention.wq",
                attn_k="attention.wk",
                attn_v="attention.wv",
                attn_output="attention.wo",
                ffn_norm="ffn_norm",
                ffn_gate="feed_forward.w1",
                ffn_up="feed_forward.w3",
                ffn_down="feed_forward.w2",
            ),
            pairs=True,
            flags={"attention_bias": "model.layers.0.attention.wq.bias"},
        ),
        "qwen": Layout(
            "QWenLMHeadModel",
            "qwen",
            _names(token_embd="transformer.wte", output_norm="transformer.ln_f", output="lm_head"),
            "transformer.h.{}",
            _names(_GPT_2, ffn_gate="mlp.w2", ffn_up="mlp.w1"),
            eps="layer_norm_epsilon",
            keys={"seq_length": "context_length"},
        ),
        "gpt2": Layout(
            "GPT2LMHeadModel",
            "gpt2",
            _GPT_2_OUTSIDE,
            "transformer.h.{}",
            _GPT_2,
            eps="layer_norm_epsilon",
            config={"hidden_act": "gelu_new", "transposed_linears": False},
        ),
        "starcoder": Layout(
            "GPTBigCodeForCausalLM",
            "gpt_bigcode",
            _GPT_2_OUTSIDE,
            "transformer.h.{}",
            _GPT_2,
            eps="layer_norm_epsilon",
            config={"hidden_act": "gelu_pytorch_tanh", "multi_query": True},
        ),
        "gptneox": Layout(
            "GPTNeoXForCausalLM",
            "gpt_neox",
            _names(token_embd="gpt_neox.embed_in", output_norm="gpt_neox.final_layer_norm", output="embed_out"),
            "gpt_neox.layers.{}",
            _names(_PARALLEL, attn_output="attention.dense", attn_qkv="attention.query_key_value"),
            qkv="head",
            eps="layer_norm_eps",
            config=_GELU,
            flags={"attention_bias": "gpt_neox.layers.0.attention.query_key_value.bias"},
            keys={"use_parallel_residual": "use_parallel_residual"},
        ),
        "bloom": Layout(
            "BloomForCausalLM",
            "bloom",
            _names(
                token_embd="transformer.word_embeddings",
                token_embd_norm="transformer.word_embeddings_layernorm",
                output_norm="transformer.ln_f",
                output="lm_head",
            ),
            "transformer.h.{}",
            _PARALLEL,
            qkv="head",
            eps="layer_norm_epsilon",
        ),
        "falcon": Layout(
            "FalconForCausalLM",
            "falcon",
            _names(token_embd="transformer.word_embeddings", output_norm="transformer.ln_f", output="lm_head"),
            "transformer.h.{}",
            _PARALLEL,
            qkv="group",
            eps="layer_norm_epsilon",
            config=_GELU,
        ),
        "mpt": Layout(
            "MPTForCausalLM",
            "mpt",
            _names(
                token_embd="transformer.wte", position_embd="transformer.wpe", output_norm="transformer.norm_f", output="lm_head"
            ),
            "transformer.blocks.{}",
            _names(
                attn_norm="norm_1",
                attn_qkv="attn.Wqkv",
                attn_q_norm="attn.q_ln",
                attn_k_norm="attn.k_ln",
                attn_output="attn.out_proj",
                ffn_norm="norm_2",
                ffn_up="ffn.up_proj",
                ffn_down="ffn.down_proj",
            ),
            eps="layer_norm_epsilon",
            config=_GELU,
        ),
        "bert": Layout(
            "BertModel",
            "bert",
            _names(
                token_embd="bert.embeddings.word_embeddings",
                token_embd_norm="bert.embeddings.LayerNorm",
                token_types="bert.embeddings.token_type_embeddings",
                position_embd="bert.embeddings.position_embeddings",
                cls="bert.pooler.dense",
                **{"cls.output": "classifier"},
            ),
            "bert.encoder.layer.{}",
            _names(
                attn_q="attention.self.query",
                attn_k="attention.self.key",
                attn_v="attention.self.value",
                attn_output="attention.output.dense",
                attn_output_norm="attention.output.LayerNorm",
                ffn_up="intermediate.dense",
                ffn_down="output.dense",
                layer_output_norm="output.LayerNorm",
            ),
            eps="layer_norm_eps",
            config=_GELU,
            keys={"is_decoder": "attention.causal"},
        ),
        "nomic-bert": Layout(
            "NomicBertModel",
            "nomic_bert",
            _names(
                token_embd="embeddings.word_embeddings", token_embd_norm="emb_ln", token_types="embeddings.token_type_embeddings"
            ),
            "encoder.layers.{}",
            _names(
                attn_qkv="attn.Wqkv",
                attn_output="attn.out_proj",
                attn_output_norm="norm1",
                ffn_up="mlp.fc11",
                ffn_gate="mlp.fc12",
                ffn_down="mlp.fc2",
                layer_output_norm="norm2",
            ),
            eps="layer_norm_eps",
            keys={"is_decoder": "attention.causal"},
        ),
        "chatglm": Layout(
            "ChatGLMModel",
            "chatglm",
            _names(
                token_embd="transformer.embedding.word_embeddings",
                output_norm="transformer.encoder.final_layernorm",
                output="transformer.output_layer",
            ),
            "transformer.encoder.layers.{}",
            _names(_PARALLEL, attn_qkv="self_attention.query_key_value"),
            eps="layernorm_epsilon",
            config={"multi_query_attention": True},
            flags={"add_qkv_bias": "transformer.encoder.layers.0.self_attention.query_key_value.bias"},
        ),
    }
)
# GLM-4 as transformers stores it becomes the same architecture, with q, k and v apart.
GLM = _llama("GlmForCausalLM", "glm", _names(ffn_up="mlp.gate_up_proj"))


MIXTRAL = _llama(
    "MixtralForCausalLM",
    "mixtral",
    _names(
        ffn_gate_inp="block_sparse_moe.gate",
        ffn_gate_exps="block_sparse_moe.experts.{}.w1",
        ffn_up_exps="block_sparse_moe.experts.{}.w3",
        ffn_down_exps="block_sparse_moe.experts.{}.w2",
    ),
    pairs=True,
    keys=_EXPERT_KEYS,
)


def layout_of(architecture: str, stored: set[str]) -> Layout | None:
    """None: an architecture that is not known."""
    if architecture == "chatglm" and "blk.0.attn_q.weight" in stored:
        return GLM
    if architecture == "llama" and "blk.0.ffn_gate_inp.weight" in stored:
        return MIXTRAL
    if architecture == "bert" and "cls.output.weight" not in stored:  # BERT's own classifier, whose pooler the converter drops
        bert = LAYOUTS[architecture]
        return replace(bert, outside=_names(bert.outside, cls="classifier"))
    if architecture == "falcon" and "blk.0.attn_norm_2.weight" in stored:  # 40B: of attention and of the MLP
        falcon = LAYOUTS[architecture]
        return replace(falcon, modules=_names(falcon.modules, attn_norm="ln_mlp", attn_norm_2="ln_attn"))
    return LAYOUTS.get(architecture)
