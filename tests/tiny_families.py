"""Tiny random models of the families beside Llama, Mistral and Qwen2/3, and the logits that they must give: transformers' own; for
those that it does not have, a model of the same arithmetic under other names, or a definition written here."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from folders import TINY, edit_config, tiny_model, write_folder
from safetensors.torch import load_file, save_file

LENGTH = 60
IDS = np.random.default_rng(1).integers(0, 96, LENGTH).tolist()

Tensors = dict[str, torch.Tensor]

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
GLM_MOE = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
GEMMA2 = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
MLA = {
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": None,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MLA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
NATIVE = {
    "phi3": ("phi3", {"pad_token_id": 0}),
    "phi3-window": ("phi3", {"pad_token_id": 0, "sliding_window": 9, "num_key_value_heads": 4}),
    "phi3-partial": ("phi3", {"pad_token_id": 0, "head_dim": 16, "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "phi3-longrope-beyond": ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE}),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 1.0}),
    "gemma2-no-caps": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-cap": ("gemma3", {"head_dim": 16, "final_logit_softcapping": 1.0}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 96, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "activation_function": "relu", "hidden_size": 40}),
    "gpt-bigcode": ("gpt_bigcode", {}),
    "gpt-bigcode-all-heads": ("gpt_bigcode", {"multi_query": False, "n_inner": 80}),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt-350m": ("opt", {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-bare": ("opt", {"ffn_dim": 80, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "olmo": ("olmo", {}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.6, "attention_bias": True, "num_key_value_heads": 4}),
    "nemotron": ("nemotron", {}),
    "nemotron-bias": ("nemotron", {"mlp_bias": True, "attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.25}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "hidden_size": 64}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True, "hidden_size": 64}),
    "stablelm-qk-norm-one-key": ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "mpt-clip": ("mpt", {"attn_config": {"clip_qkv": 0.5}}),
    "gemma": ("gemma", {"head_dim": 20}),
    "gemma-legacy-gelu": ("gemma", {"head_dim": 16, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    "glm-no-bias": ("glm", {"head_dim": 24, "pad_token_id": 0, "attention_bias": False, "partial_rotary_factor": 0.25}),
    "gemma3": ("gemma3", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2, "rope_parameters": GEMMA3_ROPE}),
    "gemma3-scalar": ("gemma3", {"head_dim": 20, "query_pre_attn_scalar": 31, "attention_bias": True}),
    "cohere": ("cohere", {"logit_scale": 0.8333}),
    "cohere-untied": ("cohere", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.0}),
    "cohere2": ("cohere2", {"head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 2.0}),
    "gpt-neox": ("gpt_neox", {"hidden_size": 64, "rotary_pct": 0.25}),
    "gpt-neox-sequential": ("gpt_neox", {"rotary_pct": 0.5, "use_parallel_residual": False, "attention_bias": False}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi-qk-norm": ("phi", {"hidden_size": 80, "partial_rotary_factor": 0.4, "qk_layernorm": True, "num_key_value_heads": 4}),
    "stablelm": ("stablelm", {"hidden_size": 64}),
    "stablelm-parallel": ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-window": ("starcoder2", {"use_bias": False, "sliding_window": 8, "tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "olmo2-bias": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96}),
    "bloom": ("bloom", {}),
    "bloom-normed-residual": ("bloom", {"num_attention_heads": 6, "apply_residual_connection_post_layernorm": True}),
    "mpt": ("mpt", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen2-moe": ("qwen2_moe", MOE),
    "qwen2-moe-some-dense": ("qwen2_moe", {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}),
    "qwen3-moe": ("qwen3_moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("qwen3_moe", {**MOE, "head_dim": 20, "mlp_only_layers": [0]}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "glm4-moe": ("glm4_moe", GLM_MOE),
    "glm4-moe-qk-norm": ("glm4_moe", {**GLM_MOE, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 8, "sliding_window": 8, "swiglu_limit": 1.5}),
    "deepseek-v2": ("deepseek_v2", {**MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek-v2-lite": ("deepseek_v2", {**MLA, "q_lora_rank": None, "v_head_dim": 16, "rope_parameters": MLA_YARN}),
    "deepseek-v3": ("deepseek_v3", {**MLA, "n_group": 4, "topk_group": 2, "rope_parameters": MLA_YARN}),
    "deepseek-v3-halves": ("deepseek_v3", {**MLA, "n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True}),
    "mpt-odd-heads": ("mpt", {"num_attention_heads": 6, "attn_config": {"softmax_scale": 0.2}}),
}


def logits_of(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def relay(folder: Path, change: Callable[[Tensors], Tensors], **config: object) -> None:
    """Rewrites a saved model under another family's names."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)
    edit_config(folder, **config)


def renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    def name_of(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return {name_of(name): tensor for name, tensor in tensors.items()}


def yi(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder)
    names = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
    relay(folder, lambda tensors: renamed(tensors, names), architectures=["YiForCausalLM"], model_type="Yi")
    return logits_of(model)


def aquila(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    edit_config(folder, architectures=["AquilaForCausalLM"], model_type="aquila")
    return logits_of(model)


def xverse(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, num_key_value_heads=4)
    edit_config(folder, architectures=["XverseForCausalLM"], model_type="xverse", num_key_value_heads=None)
    return logits_of(model)


def internlm(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, num_key_value_heads=4, attention_bias=True)
    edit_config(folder, architectures=["InternLMForCausalLM"], model_type="internlm", attention_bias=None, bias=True)
    return logits_of(model)


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def internlm2(folder: Path, bias: bool = False) -> np.ndarray:
    model = tiny_model("llama", folder, attention_bias=bias)

    def change(tensors: Tensors) -> Tensors:
        for i in range(3):
            for kind in ("weight", "bias") if bias else ("weight",):
                q, k, v = (tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.{kind}") for name in "qkv")
                groups = [part.reshape(2, -1, *part.shape[1:]) for part in (q, k, v)]  # 2 KV heads
                tensors[f"model.layers.{i}.self_attn.wqkv.{kind}"] = torch.cat(groups, 1).flatten(0, 1)
        return renamed(tensors, INTERNLM2_NAMES)

    relay(folder, change, architectures=["InternLM2ForCausalLM"], model_type="internlm2", attention_bias=None, bias=bias)
    return logits_of(model)


def packed(tensors: Tensors) -> Tensors:
    for i in range(3):
        parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"model.layers.{i}.self_attn.W_pack.weight"] = torch.cat(parts)
    return tensors


def baichuan(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, num_key_value_heads=4)
    relay(folder, packed, architectures=["BaiChuanForCausalLM"], model_type="baichuan", num_key_value_heads=None)
    return logits_of(model)


def baichuan2(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, num_key_value_heads=4)
    config = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "num_key_value_heads": None}
    relay(folder, packed, **config, z_loss_weight=0)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))
    return logits_of(model)


QWEN_NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}


def qwen(folder: Path) -> np.ndarray:
    model = tiny_model("qwen2", folder, num_key_value_heads=4)

    def change(tensors: Tensors) -> Tensors:
        for i in range(3):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.{kind}") for name in "qkv"]
                tensors[f"model.layers.{i}.attn.c_attn.{kind}"] = torch.cat(parts)
        return renamed(tensors, QWEN_NAMES)

    theta = {"rope_parameters": None, "rotary_emb_base": model.config.rope_parameters["rope_theta"], "rotary_pct": 1.0}
    sizes = {"intermediate_size": 2 * TINY["intermediate_size"], "kv_channels": 12, "seq_length": 64, "num_key_value_heads": None}
    eps = {"rms_norm_eps": None, "layer_norm_epsilon": TINY["rms_norm_eps"]}
    flags = {"no_bias": True, "use_dynamic_ntk": True, "use_logn_attn": True}
    relay(folder, change, architectures=["QWenLMHeadModel"], model_type="qwen", **theta, **sizes, **eps, **flags)
    return logits_of(model)


def qwen_beyond(folder: Path) -> np.ndarray:
    """Beyond seq_length: by the published formulas, a prompt of 60 tokens on a seq_length of 24 has its base times 7^(d / (d - 2)),
    and query p is multiplied by log(p + 1) to the base of 24."""
    qwen(folder)
    edit_config(folder, seq_length=24)
    theta = json.loads((folder / "config.json").read_text())["rotary_emb_base"] * 7 ** (12 / 10)
    model = tiny_model(
        "qwen2", folder / "twin", num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    factors = torch.arange(1, LENGTH + 1).log().div(np.log(24)).clamp(min=1)[:, None]
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, inputs, output: output * factors)
    return logits_of(model)


CHATGLM_NAMES = {
    "lm_head": "transformer.output_layer",
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "model.layers": "transformer.encoder.layers",
    "self_attn.o_proj": "self_attention.dense",
    "self_attn": "self_attention",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
CHATGLM = {
    "num_layers": TINY["num_hidden_layers"],
    "num_hidden_layers": None,
    "padded_vocab_size": TINY["vocab_size"],
    "vocab_size": None,
    "ffn_hidden_size": TINY["intermediate_size"],
    "intermediate_size": None,
    "kv_channels": 16,
    "head_dim": None,
    "num_key_value_heads": None,
    "seq_length": 256,
    "max_position_embeddings": None,
    "layernorm_epsilon": TINY["rms_norm_eps"],
    "rms_norm_eps": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "attention_bias": None,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
}


def chatglm(folder: Path, *, kv_heads: int = 2, rope: dict[str, object] | None = None, **config: object) -> np.ndarray:
    """`rope`: the rope_parameters of transformers that are to give the same."""
    settings = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 1e4, **(rope or {})}}
    model = tiny_model("glm", folder, head_dim=16, num_key_value_heads=kv_heads, pad_token_id=0, **settings)

    def change(tensors: Tensors) -> Tensors:
        for i in range(3):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"model.layers.{i}.self_attn.{name}_proj.{kind}") for name in "qkv"]
                if kv_heads == 4:  # as many as heads: stored head by head
                    parts = [torch.cat([part.reshape(4, 16, *part.shape[1:]) for part in parts], 1).flatten(0, 1)]
                tensors[f"model.layers.{i}.self_attn.query_key_value.{kind}"] = torch.cat(parts)
        return renamed(tensors, CHATGLM_NAMES)

    groups = {"multi_query_attention": True, "multi_query_group_num": kv_heads} if kv_heads < 4 else {}
    relay(folder, change, architectures=["ChatGLMModel"], model_type="chatglm", **{**CHATGLM, **groups, **config})
    return logits_of(model)


def gemma3_flat(folder: Path) -> np.ndarray:
    """With the config keys of the published files."""
    expected = native("gemma3", folder)
    flat = {"rope_theta": 1e5, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    edit_config(folder, rope_parameters=None, layer_types=None, sliding_window_pattern=2, **flat)
    return expected


def refined_web(folder: Path) -> np.ndarray:
    """Falcon 40B with the config keys of its first release."""
    expected = native("falcon-40b", folder)
    old = {"n_layer": TINY["num_hidden_layers"], "n_head": TINY["num_attention_heads"], "n_head_kv": 2}
    new = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_kv_heads", "new_decoder_architecture"))
    edit_config(folder, architectures=["RWForCausalLM"], model_type="RefinedWeb", **old, **new)
    return expected


def mpt_scaled(folder: Path, logit_scale: object, factor: float) -> np.ndarray:
    """With a key that transformers' class does not read."""
    expected = native("mpt", folder)
    edit_config(folder, logit_scale=logit_scale)
    return expected * factor


def bare(kind: str, prefix: str, folder: Path, **settings: object) -> np.ndarray:
    """As some published files are: without a prefix."""
    model = tiny_model(kind, folder, **settings)
    relay(folder, lambda tensors: renamed(tensors, {prefix: ""}))
    return logits_of(model)


class PlainMpt(torch.nn.Module):
    """Written from the published facts, for what transformers' class does not have: grouped and single keys, norms of q and k,
    biases, and learned positions in place of ALiBi."""

    def __init__(self, tensors: Tensors, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.tensors, self.heads, self.kv_heads = tensors, heads, kv_heads

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        length = ids.shape[1]
        x = self.tensors["transformer.wte.weight"][ids[0]] + self.tensors["transformer.wpe.weight"][:length]
        head_dim = x.shape[1] // self.heads
        for i in range(TINY["num_hidden_layers"]):
            block = f"transformer.blocks.{i}"
            widths = [x.shape[1], self.kv_heads * head_dim, self.kv_heads * head_dim]
            q, k, v = self.linear(self.norm(x, f"{block}.norm_1"), f"{block}.attn.Wqkv").clamp(-1, 1).split(widths, 1)
            if f"{block}.attn.q_ln.weight" in self.tensors:
                q, k = self.norm(q, f"{block}.attn.q_ln"), self.norm(k, f"{block}.attn.k_ln")
            q, k, v = (part.view(length, -1, head_dim).transpose(0, 1) for part in (q, k, v))
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 0) for part in (k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
            x = x + self.linear(attended.transpose(0, 1).reshape(length, -1), f"{block}.attn.out_proj")
            hidden = torch.nn.functional.gelu(self.linear(self.norm(x, f"{block}.norm_2"), f"{block}.ffn.up_proj"))
            x = x + self.linear(hidden, f"{block}.ffn.down_proj")
        return SimpleNamespace(logits=self.linear(self.norm(x, "transformer.norm_f"), "transformer.wte")[None])


def plain_mpt(folder: Path, kv_heads: int, *, qk_norm: bool, bias: bool) -> np.ndarray:
    hidden, heads, random = TINY["hidden_size"], TINY["num_attention_heads"], torch.Generator().manual_seed(0)
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"wte": (TINY["vocab_size"], hidden), "wpe": (64, hidden), "norm_f": (hidden,)}
    for i in range(TINY["num_hidden_layers"]):
        qkv = {"attn.Wqkv": (hidden + 2 * kv, hidden), "attn.out_proj": (hidden, hidden)}
        mlp = {"ffn.up_proj": (4 * hidden, hidden), "ffn.down_proj": (hidden, 4 * hidden)}
        norms = {"norm_1": (hidden,), "norm_2": (hidden,), **({"attn.q_ln": (hidden,), "attn.k_ln": (kv,)} if qk_norm else {})}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in {**qkv, **mlp, **norms}.items()}
    tensors = {
        f"transformer.{name}.weight": torch.randn(shape, generator=random) * shape[-1] ** -0.5 for name, shape in shapes.items()
    }
    if bias:
        for name, shape in shapes.items():
            if name not in ("wte", "wpe"):
                tensors[f"transformer.{name}.bias"] = torch.randn(shape[0], generator=random) * 0.3
    kind = {1: "multiquery_attention", 4: "multihead_attention"}.get(kv_heads, "grouped_query_attention")
    attention = {"alibi": False, "attn_type": kind, "kv_n_heads": kv_heads, "qk_ln": qk_norm, "clip_qkv": 1.0}
    sizes = {"d_model": hidden, "n_layers": TINY["num_hidden_layers"], "n_heads": heads, "vocab_size": TINY["vocab_size"]}
    flags = {"no_bias": not bias, "max_seq_len": 64, "attn_config": attention}
    config = {"architectures": ["MPTForCausalLM"], "model_type": "mpt", **sizes, **flags}
    write_folder(folder, config, {name: tensor.numpy() for name, tensor in tensors.items()})
    return logits_of(PlainMpt(tensors, heads, kv_heads))


def qwen3_moe_stacked(folder: Path) -> np.ndarray:
    """With the experts of a layer in two tensors."""
    expected = native("qwen3-moe", folder)

    def change(tensors: Tensors) -> Tensors:
        for i in range(3):
            module, experts = f"model.layers.{i}.mlp.experts", range(8)
            parts = {name: [tensors.pop(f"{module}.{e}.{name}_proj.weight") for e in experts] for name in ("gate", "up", "down")}
            both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            tensors |= {f"{module}.gate_up_proj": torch.stack(both), f"{module}.down_proj": torch.stack(parts["down"])}
        return tensors

    relay(folder, change)
    return expected


class Baichuan13B(torch.nn.Module):
    """Written from the published facts: Llama's block, no rotation, slope * position of the key added to the scaled scores."""

    def __init__(self, llama: torch.nn.Module, slopes: list[float]) -> None:
        super().__init__()
        self.llama, self.slopes = llama, torch.tensor(slopes)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        model = self.llama.model
        x = model.embed_tokens(ids[0])
        length, heads = len(x), len(self.slopes)
        later = torch.full((length, length), -torch.inf).triu(1)
        bias = self.slopes[:, None, None] * torch.arange(length) + later
        for layer in model.layers:
            h, attention = layer.input_layernorm(x), layer.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (projection(h).view(length, heads, -1).transpose(0, 1) for projection in projections)
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
            x = x + attention.o_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return SimpleNamespace(logits=self.llama.lm_head(model.norm(x))[None])


def baichuan_13b(folder: Path) -> np.ndarray:
    model = tiny_model("llama", folder, num_key_value_heads=6, num_attention_heads=6)
    config = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "num_key_value_heads": None}
    relay(folder, packed, **config, rope_parameters=None, max_position_embeddings=None, model_max_length=128)
    return logits_of(Baichuan13B(model, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))


class PlainChatGlm1(torch.nn.Module):
    """Written from the published facts: tokens before the first of id `end` see each other; those behind them have the position of
    the token before it."""

    def __init__(self, tensors: Tensors, heads: int, end: int) -> None:
        super().__init__()
        self.tensors, self.heads, self.end = tensors, heads, end
        self.past = torch.zeros(TINY["num_hidden_layers"], 2, heads, 0, TINY["hidden_size"] // heads)  # keys and values of a prefix

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: (heads, tokens, half of a head)"""
        width = x.shape[-1]
        frequencies = (1e4 ** -(torch.arange(0, width, 2) / width)).half().float()
        angles = (positions[:, None] * frequencies).repeat(1, 2)
        turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * angles.cos() + turned * angles.sin()

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        row = ids[0].tolist()
        length, context = len(row), row.index(self.end)
        index = torch.arange(length)
        position = torch.where(index < context, index, context - 1)
        block = (index - context + 1).clamp(min=0)
        unseen = (index[None, :] > index[:, None]) & (index[None, :] >= context)
        unseen = torch.cat([torch.zeros(length, self.past.shape[3], dtype=torch.bool), unseen], dim=1)
        x, scale = self.tensors["transformer.word_embeddings.weight"][ids[0]], 56**0.5
        for i in range(TINY["num_hidden_layers"]):
            module = f"transformer.layers.{i}"
            h = self.norm(x, f"{module}.input_layernorm")
            qkv = self.linear(h, f"{module}.attention.query_key_value").view(length, self.heads, -1).transpose(0, 1)
            q, k, v = qkv.chunk(3, -1)
            q, k = (torch.cat([self.rotated(a, position), self.rotated(b, block)], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
            k, v = (torch.cat([past, own], dim=1) for past, own in zip(self.past[i], (k, v), strict=True))
            scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(unseen, -torch.inf)
            attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
            x = scale * h + self.linear(attended, f"{module}.attention.dense")
            h = self.norm(x, f"{module}.post_attention_layernorm")
            hidden = torch.nn.functional.gelu(self.linear(h, f"{module}.mlp.dense_h_to_4h"), approximate="tanh")
            x = scale * h + self.linear(hidden, f"{module}.mlp.dense_4h_to_h")
        x = self.norm(x, "transformer.final_layernorm")
        return SimpleNamespace(logits=(x @ self.tensors["lm_head.weight"].T)[None])


def chatglm1(folder: Path) -> PlainChatGlm1:
    """Ids of the vocabulary of 96: [MASK] 90, [gMASK] 91, the end of the context 94."""
    hidden, layers, random = TINY["hidden_size"], TINY["num_hidden_layers"], torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"final_layernorm": (hidden,)}
    for i in range(layers):
        blocks = {"attention.query_key_value": (3 * hidden, hidden), "attention.dense": (hidden, hidden)}
        mlp = {"mlp.dense_h_to_4h": (80, hidden), "mlp.dense_4h_to_h": (hidden, 80)}
        norms = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in {**blocks, **mlp, **norms}.items()}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"transformer.{name}.weight"] = torch.randn(shape, generator=random) * (
            1 if len(shape) == 1 else 2 * shape[1] ** -0.5
        )
        tensors[f"transformer.{name}.bias"] = torch.randn(shape[0], generator=random) * 0.3
    for name in ("transformer.word_embeddings", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn((TINY["vocab_size"], hidden), generator=random) * 0.3
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_attention_heads": 4, "inner_hidden_size": 80, "vocab_size": 96}
    ids = {"bos_token_id": 94, "gmask_token_id": 91, "mask_token_id": 90}
    config = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "position_encoding_2d": True, "max_sequence_length": 128}
    write_folder(folder, {**config, **sizes, **ids}, {name: tensor.numpy() for name, tensor in tensors.items()})
    return PlainChatGlm1(tensors, 4, 94)


RELAID = {
    "falcon-40b-old-keys": refined_web,
    "mpt-logit-scale": lambda folder: mpt_scaled(folder, 0.75, 0.75),
    "mpt-inverse-root": lambda folder: mpt_scaled(folder, "inv_sqrt_d_model", 48**-0.5),
    "gemma3-flat": gemma3_flat,
    "qwen3-moe-stacked": qwen3_moe_stacked,
    "chatglm": chatglm,
    "chatglm-no-groups": lambda folder: chatglm(folder, kv_heads=4),
    "baichuan-13b": baichuan_13b,
    "qwen": qwen,
    "qwen-beyond": qwen_beyond,
    "bloom-bare": lambda folder: bare("bloom", "transformer.", folder),
    "gpt2-bare": lambda folder: bare("gpt2", "transformer.", folder),
    "opt-bare-names": lambda folder: bare("opt", "model.", folder, ffn_dim=80),
    "mpt-grouped": lambda folder: plain_mpt(folder, 2, qk_norm=True, bias=False),
    "mpt-one-key": lambda folder: plain_mpt(folder, 1, qk_norm=False, bias=True),
    "mpt-all-heads": lambda folder: plain_mpt(folder, 4, qk_norm=True, bias=True),
    "yi": yi,
    "aquila": aquila,
    "xverse": xverse,
    "internlm": internlm,
    "internlm2": internlm2,
    "internlm2-bias": lambda folder: internlm2(folder, bias=True),
    "baichuan-7b": baichuan,
    "baichuan2-7b": baichuan2,
}


def native(case: str, folder: Path) -> np.ndarray:
    kind, settings = NATIVE[case]
    return logits_of(tiny_model(kind, folder, **settings))
