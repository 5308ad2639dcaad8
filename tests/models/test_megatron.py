"""Megatron-LM checkpoints, cut in every way: the model that transformers has gives its logits again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import Checkpoint, open_checkpoint
from maga_transformer.models import build_program
from megatron import CORE, LEGACY, OLD, PAI, Tensors, llama_layers, moe_layers, nest_legacy, write_megatron
from runner import Runner

IDS = np.random.default_rng(1).integers(0, 96, 40).tolist()
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def expected(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits).max() > 0.5
    return logits


def check(folder: Path, logits: np.ndarray, model_type: str | None = None) -> Checkpoint:
    checkpoint = open_checkpoint(str(folder))
    runner = Runner(_core.reference_backend(), checkpoint, length=len(IDS), tokens=len(IDS), model_type=model_type)
    np.testing.assert_allclose(runner.logits(IDS), logits, rtol=0, atol=1e-4)
    return checkpoint


def outside(model: torch.nn.Module) -> Tensors:
    found = {"embedding": model.model.embed_tokens.weight.detach(), "final_norm.weight": model.model.norm.weight.detach()}
    if not model.config.tie_word_embeddings:
        found["head"] = model.lm_head.weight.detach()
    return found


def args_of(model: torch.nn.Module, **more: Any) -> dict[str, Any]:
    """As Megatron's own arguments say it."""
    config = model.config
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": config.num_key_value_heads != config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": 128,
        "max_position_embeddings": config.max_position_embeddings,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "num_experts": None,
        **more,
    }


def write(model: torch.nn.Module, folder: Path, names: dict[str, str], *, own_args: bool = True, **more: Any) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"head_dim": head_dim, "kv_heads": config.num_key_value_heads, "args": args_of(model) if own_args else None}
    write_megatron(folder, llama_layers(model), outside(model), names, **{**sizes, **more})


@pytest.mark.parametrize(("ranks", "stages"), CUTS)
@pytest.mark.parametrize("names", [LEGACY, CORE], ids=["legacy", "core"])
def test_llama(names: dict[str, str], ranks: int, stages: int, tmp_path: Path) -> None:
    """Two KV heads: at four tensor ranks, two hold copies."""
    model = tiny_model("llama", tmp_path / "hf", num_hidden_layers=4)
    write(model, tmp_path / "m" / "iter_0000007", names, ranks=ranks, stages=stages)
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("7\n")
    checkpoint = check(tmp_path / "m", expected(model))
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.shape("model.embed_tokens.weight") == (96, 48)  # without the padding
    assert checkpoint.nbytes("lm_head.weight") == 96 * 48 * 4


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_orders_of_qkv(version: float, ranks: int, tmp_path: Path) -> None:
    model = tiny_model("qwen2", tmp_path / "hf", num_key_value_heads=4)
    write(model, tmp_path / "m", OLD, ranks=ranks, version=version)
    assert check(tmp_path / "m", expected(model)).config["architectures"] == ["Qwen2ForCausalLM"]


def test_the_oldest_files_have_no_version(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf", num_key_value_heads=4)
    write(model, tmp_path / "m", OLD, version=0)
    file = tmp_path / "m" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["checkpoint_version"]
    torch.save(content, file)
    check(tmp_path / "m", expected(model))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_qwen3_core(ranks: int, stages: int, tmp_path: Path) -> None:
    model = tiny_model("qwen3", tmp_path / "hf", head_dim=16, num_hidden_layers=4, tie_word_embeddings=True)
    write(model, tmp_path / "m" / "release", CORE, ranks=ranks, stages=stages)
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("release")
    assert check(tmp_path / "m", expected(model)).config["tie_word_embeddings"] is True


MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MOE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 3},
        {"moe_router_topk": 3, "moe_ffn_hidden_size": 80},
    ),
    "qwen2_moe": (
        {**MOE, "shared_expert_intermediate_size": 56, "norm_topk_prob": False},
        {
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "moe_router_pre_softmax": True,
        },
    ),
    "qwen3_moe": (
        {**MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
        {"moe_router_topk": 3, "moe_ffn_hidden_size": 40},
    ),
}


@pytest.mark.parametrize(
    ("ranks", "stages", "experts", "grouped"),
    [(1, 1, 1, False), (1, 1, 4, True), (2, 1, 2, False), (1, 2, 2, True), (2, 2, 4, False)],
)
@pytest.mark.parametrize("case", MOE_CASES)
def test_experts(case: str, ranks: int, stages: int, experts: int, grouped: bool, tmp_path: Path) -> None:
    """`experts`: ranks, of which each has some of them; `grouped`: whether one module holds those of a rank."""
    settings, args = MOE_CASES[case]
    model = tiny_model(case, tmp_path / "hf", num_hidden_layers=4, **settings)
    own = {
        **args_of(model, num_experts=8, moe_router_score_function="softmax", **args),
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": stages,
        "expert_model_parallel_size": experts,
    }
    cut = {"ranks": ranks, "stages": stages, "experts": experts, "grouped": grouped}
    sizes = {"head_dim": own["kv_channels"], "kv_heads": model.config.num_key_value_heads, "args": own}
    layers = moe_layers(tmp_path / "hf", model)
    write_megatron(tmp_path / "m", layers, outside(model), CORE, **sizes, **cut)
    checkpoint = check(tmp_path / "m", expected(model))
    assert checkpoint.config["architectures"] == model.config.architectures
    if experts > 1:
        last = sorted((tmp_path / "m").glob("mp_rank_*"))[-1]
        last.rename(tmp_path / "last")
        with pytest.raises(FileNotFoundError, match=r"expert rank \d, of pipeline stage \d is missing|of the 8 experts"):
            open_checkpoint(str(tmp_path / "m"))
    if case == "mixtral":
        write_megatron(tmp_path / "n", layers, outside(model), CORE, **{**sizes, "args": {**own, "moe_router_pre_softmax": True}})
        with pytest.raises(ValueError, match="moe_router_pre_softmax=True is not supported"):
            open_checkpoint(str(tmp_path / "n"))


def test_norms_fused_into_the_linears(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    names = {**CORE, "norm_1": "self_attention.linear_qkv.layer_norm_", "norm_2": "mlp.linear_fc1.layer_norm_"}
    nest = lambda flat: {f"decoder.{name}".replace("_.weight", "_weight"): tensor for name, tensor in flat.items()}  # noqa: E731
    write(model, tmp_path / "m", names, nest=nest)
    check(tmp_path / "m", expected(model))


def test_virtual_pipeline_stages(tmp_path: Path) -> None:
    """Layers 0, 2 in stage 0; 1, 3 in stage 1."""
    model = tiny_model("llama", tmp_path / "hf", num_hidden_layers=4)
    write(model, tmp_path / "m", LEGACY, stages=2, virtual=2)
    check(tmp_path / "m", expected(model))


def test_pai_megatron_with_config_json(tmp_path: Path) -> None:
    """Weights alone, the head beside the language model, sizes from Hugging Face's config.json."""
    model = tiny_model("qwen2", tmp_path / "hf")

    def nest(flat: Tensors) -> dict[str, Any]:
        head = flat.pop("output_layer.weight", None)
        return {**nest_legacy(flat), **({} if head is None else {"lm_head": {"weight": head}})}

    write(model, tmp_path / "m" / "release", PAI, own_args=False, version=None, nest=nest, ranks=2)
    (tmp_path / "m" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    check(tmp_path / "m", expected(model))
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json, and .*model_optim_rng\.pt does not hold the args"):
        open_checkpoint(str(tmp_path / "m"))


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_first_qwen_with_rtp_llms_names(ranks: int, stages: int, tmp_path: Path) -> None:
    model = tiny_model("qwen2", tmp_path / "hf", num_key_value_heads=4, num_hidden_layers=4)
    names = {**LEGACY, "up": "mlp.w1", "gate": "mlp.w2"}
    layers = llama_layers(model)

    def nest(flat: Tensors) -> dict[str, Any]:
        for name in [name for name in flat if "mlp.w1" in name]:
            flat[name.replace("w1", "w2")], flat[name] = (part.clone() for part in flat[name].chunk(2))
        return nest_legacy(flat)

    place = (lambda rank, stage: tmp_path / "m" / f"mp_rank_{rank:02d}" / "model_rng.pt") if stages == 1 else None
    sizes = {"head_dim": 12, "kv_heads": 4, "version": None, "ranks": ranks, "stages": stages, "nest": nest, "place": place}
    write_megatron(tmp_path / "m", layers, outside(model), names, **sizes)
    config = {
        "n_layer": 4,
        "n_head": 4,
        "hidden_size": 48,
        "inter_size": 160,
        "layernorm_eps": 1e-5,
        "max_seq_len": 256,
        "vocab_size": 96,
        "rotary_emb_base": model.config.rope_parameters["rope_theta"],
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    check(tmp_path / "m", expected(model))
    check(tmp_path / "m", expected(model), "qwen")


def test_deepspeed(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    folder = tmp_path / "m" / "global_step100"
    place = lambda rank, stage: folder / f"mp_rank_{rank:02d}_model_states.pt"  # noqa: E731
    write(model, folder, LEGACY, ranks=2, place=place)
    for rank in range(2):
        content = torch.load(place(rank, 0), weights_only=False)
        content["module"] = content.pop("model")
        torch.save(content, place(rank, 0))
    check(tmp_path / "m", expected(model))
    (tmp_path / "m" / "latest").write_text("global_step100")
    check(tmp_path / "m", expected(model))


NEOX = {
    "norm_1": "input_layernorm",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "norm_2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
GPT2 = {"norm_1": "ln_1", "qkv": "attn.c_attn", "out": "attn.c_proj", "norm_2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def gpt_layers(model: torch.nn.Module, prefix: str, modules: dict[str, str], by_head: bool) -> list[Tensors]:
    """`by_head`: qkv rows are those of the first head, of the second, ...; else q | k | v, in [in, out] matrices."""
    state, layers = model.state_dict(), []
    for i in range(model.config.num_hidden_layers):
        found: Tensors = {}
        for role, module in modules.items():
            for kind in ("weight", "bias"):
                tensor = state[f"{prefix}.{i}.{module}.{kind}"]
                if not by_head and tensor.ndim == 2:
                    tensor = tensor.T
                if role == "qkv":
                    shape = (4, 3, -1) if by_head else (3, 4, -1)
                    grouped = tensor.reshape(*shape, *tensor.shape[1:])
                    for index, part in enumerate("qkv"):
                        rows = grouped[:, index] if by_head else grouped[index]
                        found[f"{part}.{kind}"] = rows.reshape(-1, *tensor.shape[1:])
                else:
                    found[f"{role}.{kind}"] = tensor
        layers.append(found)
    return layers


def gpt_args(**more: Any) -> dict[str, Any]:
    sizes = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 192, "padded_vocab_size": 128}
    return {**sizes, "max_position_embeddings": 256, "layernorm_epsilon": 1e-5, "vocab_size": 96, **more}


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_gpt_with_rotary_positions(version: float, ranks: int, stages: int, tmp_path: Path) -> None:
    model = tiny_model("gpt_neox", tmp_path / "hf", rotary_pct=0.5, use_parallel_residual=False, intermediate_size=192)
    base, norm = model.gpt_neox, model.gpt_neox.final_layer_norm
    tables = {"embedding": base.embed_in.weight, "head": model.get_output_embeddings().weight}
    tables.update({"final_norm.weight": norm.weight, "final_norm.bias": norm.bias})
    args = gpt_args(position_embedding_type="rope", rotary_percent=0.5, bias_gelu_fusion=False, normalization="LayerNorm")
    tables = {name: tensor.detach() for name, tensor in tables.items()}
    layers = gpt_layers(model, "gpt_neox.layers", NEOX, by_head=True)
    sizes = {"head_dim": 12, "kv_heads": 4, "ranks": ranks, "stages": stages, "version": version, "args": args}
    write_megatron(tmp_path / "m", layers, tables, OLD, **sizes)
    check(tmp_path / "m", expected(model))


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("version", [0, 3.0])
def test_gpt(version: float, ranks: int, stages: int, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=48, n_layer=3, n_head=4, n_positions=256)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.25 if parameter.ndim == 2 else 0.5)
            if "ln_" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
    model.tie_weights()
    base = model.transformer
    tables = {"embedding": base.wte.weight, "positions": base.wpe.weight}
    tables.update({"final_norm.weight": base.ln_f.weight, "final_norm.bias": base.ln_f.bias})
    tables = {name: tensor.detach() for name, tensor in tables.items()}
    args = gpt_args(position_embedding_type="learned_absolute")
    layers = gpt_layers(model, "transformer.h", GPT2, by_head=False)
    sizes = {"head_dim": 12, "kv_heads": 4, "ranks": ranks, "stages": stages, "version": version, "args": args}
    write_megatron(tmp_path / "m", layers, tables, OLD, **sizes)
    checkpoint = check(tmp_path / "m", expected(model))
    assert checkpoint.config["architectures"] == ["GPT2LMHeadModel"]
    assert set(checkpoint.names()) == {name for name, _ in model.named_parameters()}
    sizes = {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 96, "n_positions": 256, "layer_norm_epsilon": 1e-5}
    config = {"architectures": ["GPTBigCodeForCausalLM"], "activation_function": "gelu_pytorch_tanh", **sizes}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    check(tmp_path / "m", expected(model), "gpt_bigcode")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf", num_hidden_layers=4)
    root = tmp_path / "m"
    for step in (7, 8):
        write(model, root / f"iter_000000{step}", LEGACY, ranks=2, stages=2)
    with pytest.raises(
        ValueError, match=r"several iterations and no latest_checkpointed_iteration\.txt.*iter_0000007, iter_0000008"
    ):
        open_checkpoint(str(root))
    (root / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(FileNotFoundError, match=r"names '9', but .*iter_0000009 is not a folder"):
        open_checkpoint(str(root))
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(FileNotFoundError, match="is not a folder here"):
        open_checkpoint(str(root))
    (root / "latest_checkpointed_iteration.txt").write_text("8")
    file = root / "iter_0000008" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    del content["model"]["language_model"]["encoder"]["layers.1.mlp.dense_4h_to_h.weight"]
    torch.save(content, file)
    with pytest.raises(
        ValueError, match=r"mp_rank_01_001.*other tensors than the first rank: layers\.1\.mlp\.dense_4h_to_h\.weight"
    ):
        open_checkpoint(str(root))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"mp_rank_01_001: none of model_optim_rng\.pt, model_rng\.pt"):
        open_checkpoint(str(root))
    file.parent.rmdir()
    with pytest.raises(FileNotFoundError, match=r"tensor rank 1 of pipeline stage 1 is missing .there are 3 ranks"):
        open_checkpoint(str(root))
    (root / "iter_0000010").mkdir()
    (root / "iter_0000010" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(ValueError, match=r"a distributed checkpoint in the zarr format is not supported"):
        open_checkpoint(str(root))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_experts": 8}, r"args: num_experts=8 is not supported without Megatron-Core's mlp\.router"),
        ({"normalization": "DyT"}, r"args: normalization='DyT' is not supported"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p=True is not supported"),
        ({"num_layers": None}, "config has no key num_hidden_layers"),
        ({"num_attention_heads": None}, "num_attention_heads is None, expected an integer from 1"),
        ({"ffn_hidden_size": 90}, r"tensor model\.layers\.0\.mlp\.\w+_proj\.weight has shape \(80, 48\), expected \(90, 48\)"),
        (
            {"num_query_groups": 4, "group_query_attention": True},
            r"qkv\.weight has shape \(96, 48\), expected rows in multiples of 36",
        ),
    ],
)
def test_args_that_are_refused(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "hf")
    write(model, tmp_path / "m", LEGACY, args=args_of(model, **args))
    with pytest.raises(ValueError, match=message):
        build_program(open_checkpoint(str(tmp_path / "m")))
