"""Writes models of transformers as Megatron-LM does: its names, its order of rows, cut over tensor and pipeline ranks."""

import argparse
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

LEGACY = {
    "norm_1": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "norm_2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
OLD = {**LEGACY, "qkv": "attention.query_key_value", "out": "attention.dense"}
PAI = {**LEGACY, "norm_1": "input_norm", "norm_2": "post_attention_norm"}
CORE = {
    "norm_1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "q_norm": "self_attention.q_layernorm",
    "k_norm": "self_attention.k_layernorm",
    "out": "self_attention.linear_proj",
    "norm_2": "pre_mlp_layernorm",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}
LLAMA_MODULES = {
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


def llama_layers(model: torch.nn.Module) -> list[Tensors]:
    """By role and kind: q.weight, ..."""
    state, layers = model.state_dict(), []
    for i in range(model.config.num_hidden_layers):
        found = {}
        for role, module in LLAMA_MODULES.items():
            for kind in ("weight", "bias"):
                if f"model.layers.{i}.{module}.{kind}" in state:
                    found[f"{role}.{kind}"] = state[f"model.layers.{i}.{module}.{kind}"]
        layers.append(found)
    return layers


def moe_layers(folder: Path, model: torch.nn.Module) -> list[Tensors]:
    """As llama_layers, with router, experts.E.<role> and shared.<role>, by the names that the folder's file has."""
    state, layers = load_file(folder / "model.safetensors"), llama_layers(model)
    roles = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    for name, tensor in state.items():
        if expert := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name):
            layers[int(expert[1])][f"experts.{expert[2]}.{roles[expert[3]]}.weight"] = tensor
        elif router := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.gate\.weight", name):
            layers[int(router[1])]["router.weight"] = tensor
        elif shared := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.shared_expert\.(\w+)\.weight", name):
            layers[int(shared[1])][f"shared.{roles[shared[2]]}.weight"] = tensor
        elif score := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.shared_expert_gate\.weight", name):
            layers[int(score[1])]["shared_router.weight"] = tensor
    return layers


def rank_experts(layer: Tensors, rank: int, ranks: int, expert_rank: int, expert_ranks: int, grouped: bool) -> Tensors:
    """What a layer has beside `rank_layer`, under Megatron-Core's names: the experts of a rank are numbered from 0."""
    found = {"mlp.router.weight": layer["router.weight"]} if "router.weight" in layer else {}
    if "shared_router.weight" in layer:
        found["mlp.shared_experts.gate_weight"] = layer["shared_router.weight"]
    numbers = sorted({int(name.split(".")[1]) for name in layer if name.startswith("experts.")})
    local = len(numbers) // expert_ranks
    names = {f"experts.{number}": number % local for number in numbers if number // local == expert_rank} if numbers else {}
    for own, index in {**names, **({"shared": -1} if "shared.up.weight" in layer else {})}.items():
        gate, up, down = (layer[f"{own}.{role}.weight"] for role in ("gate", "up", "down"))
        for module, tensor in (
            ("linear_fc1", torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])),
            ("linear_fc2", down.chunk(ranks, 1)[rank]),
        ):
            if index < 0:
                found[f"mlp.shared_experts.{module}.weight"] = tensor
            elif grouped:
                found[f"mlp.experts.{module}.weight{index}"] = tensor
            else:
                found[f"mlp.experts.local_experts.{index}.{module}.weight"] = tensor
    return found


def qkv_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head_dim: int, version: float) -> torch.Tensor:
    """Of one rank, row by row as the version orders them."""
    heads, kv_heads = len(q) // head_dim, len(k) // head_dim
    rows = []
    if version < 1:
        rows = [*q, *k, *v]
    elif version < 2:
        for i in range(len(q)):
            rows += [q[i], k[i], v[i]]
    else:
        ratio = heads // kv_heads
        for group in range(kv_heads):
            rows += [*q[group * ratio * head_dim : (group + 1) * ratio * head_dim]]
            rows += [*k[group * head_dim : (group + 1) * head_dim], *v[group * head_dim : (group + 1) * head_dim]]
    return torch.stack(rows)


def rank_layer(layer: Tensors, rank: int, ranks: int, head_dim: int, version: float, kv_heads: int) -> Tensors:
    """A layer's tensors in one tensor rank, by role."""

    def rows(name: str) -> torch.Tensor:
        copies = max(1, ranks // kv_heads) if name[0] in "kv" else 1
        return layer[name].chunk(ranks // copies)[rank // copies]

    found = {}
    for kind in ("weight", "bias"):
        if f"q.{kind}" in layer:
            found[f"qkv.{kind}"] = qkv_rows(*(rows(f"{part}.{kind}") for part in "qkv"), head_dim, version)
        if f"up.{kind}" in layer:
            parts = [rows(f"{part}.{kind}") for part in ("gate", "up") if f"{part}.{kind}" in layer]
            found[f"up.{kind}"] = torch.cat(parts)
    for role in ("norm_1", "norm_2", "q_norm", "k_norm", "out", "down"):
        for kind in ("weight", "bias"):
            if f"{role}.{kind}" in layer:
                tensor = layer[f"{role}.{kind}"]
                found[f"{role}.{kind}"] = tensor.chunk(ranks, 1)[rank] if role in ("out", "down") and kind == "weight" else tensor
    return found


def padded(table: torch.Tensor, ranks: int) -> torch.Tensor:
    """To a multiple of 16 rows a rank, with rows that no logit may show."""
    rows = -len(table) % (16 * ranks)
    return torch.cat([table, torch.full((rows, table.shape[1]), 99.0)]) if rows else table


def write_megatron(
    folder: Path,
    layers: list[Tensors],
    outside: Tensors,
    names: dict[str, str],
    *,
    head_dim: int,
    kv_heads: int,
    ranks: int = 1,
    stages: int = 1,
    virtual: int = 1,
    experts: int = 1,
    grouped: bool = False,
    version: float | None = 3.0,
    args: dict[str, Any] | None = None,
    nest: Callable[[Tensors], dict[str, Any]] | None = None,
    place: Callable[[int, int], Path] | None = None,
) -> None:
    """`outside`: embedding, positions, final_norm.<kind>, head. `nest` puts a stage's flat names into dictionaries."""
    core = "linear_qkv" in names["qkv"]
    chunks = stages * virtual
    per_chunk = -(-len(layers) // chunks)
    for stage in range(stages):
        for rank, expert in itertools.product(range(ranks), range(experts)):
            models = []
            for part in range(virtual):
                chunk = part * stages + stage
                flat: Tensors = {}
                for local, layer in enumerate(layers[chunk * per_chunk : (chunk + 1) * per_chunk]):
                    for role, tensor in rank_layer(
                        layer, rank, ranks, head_dim, 2.0 if version is None else version, kv_heads
                    ).items():
                        base, _, kind = role.rpartition(".")
                        flat[f"layers.{local}.{names[base]}.{kind}"] = tensor
                    for name, tensor in rank_experts(layer, rank, ranks, expert, experts, grouped).items():
                        flat[f"layers.{local}.{name}"] = tensor
                if chunk == 0:
                    flat["embedding.word_embeddings.weight"] = padded(outside["embedding"], ranks).chunk(ranks)[rank]
                    if "positions" in outside:
                        flat["embedding.position_embeddings.weight"] = outside["positions"]
                if chunk == chunks - 1:
                    for kind in ("weight", "bias"):
                        if f"final_norm.{kind}" in outside:
                            flat[f"final_layernorm.{kind}"] = outside[f"final_norm.{kind}"]
                    if "head" in outside:
                        flat["output_layer.weight"] = padded(outside["head"], ranks).chunk(ranks)[rank]
                    elif chunk:
                        flat["word_embeddings_for_head.weight"] = padded(outside["embedding"], ranks).chunk(ranks)[rank]
                flat = {name: tensor.clone() for name, tensor in flat.items()}
                models.append((nest or (nest_core if core else nest_legacy))(flat))
            content: dict[str, Any] = {"iteration": 7, "model" if virtual == 1 else "model0": models[0]}
            content.update({f"model{i}": model for i, model in enumerate(models) if i})
            if version is not None:
                content["checkpoint_version"] = version
            if args is not None:
                content["args"] = argparse.Namespace(**args)
            content["rng_state"] = [{"python": torch.Generator, "when": Path("x")}]  # classes that no reader needs
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "") + (f"_{expert:03d}" if experts > 1 else "")
            where = folder / name
            file = where / "model_optim_rng.pt" if place is None else place(rank, stage)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, file)


def nest_legacy(flat: Tensors) -> dict[str, Any]:
    encoder = {name: tensor for name, tensor in flat.items() if name.startswith(("layers.", "final_"))}
    model: dict[str, Any] = {"encoder": encoder}
    if "embedding.word_embeddings.weight" in flat:
        model["embedding"] = {"word_embeddings": {"weight": flat["embedding.word_embeddings.weight"]}}
    if "embedding.position_embeddings.weight" in flat:
        model["embedding"]["position_embeddings"] = {"weight": flat["embedding.position_embeddings.weight"]}
    if "output_layer.weight" in flat:
        model["output_layer"] = {"weight": flat["output_layer.weight"]}
    found: dict[str, Any] = {"language_model": model}
    if "word_embeddings_for_head.weight" in flat:
        found["word_embeddings_for_head"] = {"weight": flat["word_embeddings_for_head.weight"]}
    return found


def nest_core(flat: Tensors) -> dict[str, Any]:
    named = {f"decoder.{name}" if name.startswith(("layers.", "final_")) else name: tensor for name, tensor in flat.items()}
    return {**named, "decoder.final_layernorm._extra_state": None}
