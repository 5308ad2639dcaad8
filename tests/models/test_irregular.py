"""Pruned models of many families: heads, KV heads and MLP units taken out of single layers, whole sublayers too. What they must
give is what the unpruned model of transformers gives when all that is taken out has no way to the residual (zero columns)."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_families
import torch
from checkpoints import write_gguf
from folders import edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.config import Config, ConfigError
from maga_transformer.models import build_program
from maga_transformer.startup import load_runtime
from runner import Part, Runner
from safetensors.torch import load_file, save_file
from tiny_families import NATIVE

LAYERS, LENGTH = 5, 40
IDS = np.random.default_rng(1).integers(0, 96, LENGTH).tolist()
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Modules:
    """Names inside a layer. `order` of a fused qkv: "cat" q|k|v, "head" or "group" by group."""

    layer: str
    output: str
    down: str
    ups: tuple[str, ...]
    q: str = "self_attn.{}_proj"
    fused: str = ""
    order: str = "cat"
    gate_up: str = ""
    transposed: bool = False


LLAMA = Modules("model.layers.{}.", "self_attn.o_proj", "mlp.down_proj", ("mlp.gate_proj", "mlp.up_proj"))
BLOOM = Modules(
    "transformer.h.{}.",
    "self_attention.dense",
    "mlp.dense_4h_to_h",
    ("mlp.dense_h_to_4h",),
    fused="self_attention.query_key_value",
    order="group",
)
NEOX = Modules(
    "gpt_neox.layers.{}.",
    "attention.dense",
    "mlp.dense_4h_to_h",
    ("mlp.dense_h_to_4h",),
    fused="attention.query_key_value",
    order="group",
)
PHI3 = Modules("model.layers.{}.", "self_attn.o_proj", "mlp.down_proj", (), fused="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
CASES: dict[str, tuple[Modules, dict[str, Any]]] = {
    "llama": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (LLAMA, {"sliding_window": 9}),
    "qwen2": (LLAMA, {}),
    "qwen3": (LLAMA, {"head_dim": 16}),
    "gemma2": (LLAMA, {"head_dim": 16, "sliding_window": 8}),
    "stablelm": (LLAMA, {"hidden_size": 64, "qk_layernorm": True}),
    "cohere": (LLAMA, {}),
    "phi3": (PHI3, {"pad_token_id": 0}),
    "phi": (Modules("model.layers.{}.", "self_attn.dense", "mlp.fc2", ("mlp.fc1",)), {}),
    "starcoder2": (Modules("model.layers.{}.", "self_attn.o_proj", "mlp.c_proj", ("mlp.c_fc",)), {}),
    "opt": (Modules("model.decoder.layers.{}.", "self_attn.out_proj", "fc2", ("fc1",)), {"ffn_dim": 80}),
    "gpt_neox": (NEOX, {"hidden_size": 64}),
    "gpt2": (Modules("transformer.h.{}.", "attn.c_proj", "mlp.c_proj", ("mlp.c_fc",), fused="attn.c_attn", transposed=True), {}),
    "bloom": (BLOOM, {}),
    "mpt": (Modules("transformer.blocks.{}.", "attn.out_proj", "ffn.down_proj", ("ffn.up_proj",), fused="attn.Wqkv"), {}),
    "gemma": (LLAMA, {"head_dim": 16}),
    "gemma3": (LLAMA, {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}),
    "cohere2": (LLAMA, {"head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 2}),
    "olmo": (LLAMA, {}),
    "nemotron": (Modules("model.layers.{}.", "self_attn.o_proj", "mlp.down_proj", ("mlp.up_proj",)), {}),
    "glm": (replace(PHI3, fused=""), {"head_dim": 16, "pad_token_id": 0}),
    "glm4": (replace(PHI3, fused=""), {"head_dim": 16, "pad_token_id": 0}),
    "gpt_bigcode": (
        Modules("transformer.h.{}.", "attn.c_proj", "mlp.c_proj", ("mlp.c_fc",), fused="attn.c_attn"),
        {"num_key_value_heads": 1, "n_inner": 80},
    ),
    "falcon": (BLOOM, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
}


def plan(heads: int, kv_heads: int) -> list[tuple[list[int], list[int], float]]:
    """Of each layer: the heads and KV heads that stay, and the share of the MLP's units."""
    both, last = list(range(kv_heads)), [kv_heads - 1]
    every_second = [1, 3]  # whose ALiBi slopes are those of a model with two heads
    one_group = list(range(heads - heads // kv_heads, heads))
    second = (one_group, last, 0.5) if kv_heads < heads else (every_second, every_second, 0.5)
    third = (every_second, both, 1.0) if kv_heads < heads else (every_second, every_second, 0.25)
    return [(list(range(heads)), both, 1.0), second, third, ([], [], 0.75), (list(range(heads)), both, 0.0)]


def rows_of(heads: list[int], d: int) -> list[int]:
    return [head * d + row for head in heads for row in range(d)]


def qkv_rows(modules: Modules, heads: int, kv_heads: int, d: int, q: list[int], kv: list[int]) -> list[int]:
    """Of the fused tensor, those that stay."""
    if modules.order == "cat":
        starts = (0, heads * d, (heads + kv_heads) * d)
        return [start + row for start, own in zip(starts, (q, kv, kv), strict=True) for row in rows_of(own, d)]
    ratio = heads // kv_heads
    places = {("q", head): head // ratio * (ratio + 2) + head % ratio for head in range(heads)}
    places |= {(kind, head): head * (ratio + 2) + ratio + i for i, kind in enumerate("kv") for head in range(kv_heads)}
    kept = []
    for group in kv:
        kept += [places["q", head] for head in q if head // ratio == group] + [places["k", group], places["v", group]]
    return rows_of(kept, d)


def prune(case: str, folder: Path, *, keep_norms: bool = True) -> np.ndarray:
    """Writes the pruned model; returns what it must give."""
    modules, settings = CASES[case]
    model = tiny_model(case, folder, num_hidden_layers=LAYERS, **settings)
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    own, pruned = dict(model.named_parameters()), load_file(folder / "model.safetensors")

    def take(name: str, axis: int, kept: list[int], *, zero: bool = False) -> None:
        """Keeps rows (axis 0) or columns (1) of a linear; in the model, columns that do not stay become zero."""
        for kind in ("weight", "bias")[: 2 - axis]:
            if f"{name}.{kind}" in own:
                along = 1 - axis if modules.transposed and kind == "weight" else axis
                if zero:
                    mask = torch.zeros(own[f"{name}.{kind}"].shape[along])
                    mask[kept] = 1
                    own[f"{name}.{kind}"].mul_(mask if along else mask[:, None])
                pruned[f"{name}.{kind}"] = pruned[f"{name}.{kind}"].index_select(along, torch.tensor(kept)).contiguous()

    with torch.no_grad():
        for i, (q, kv, share) in enumerate(plan(heads, kv_heads)):
            layer = modules.layer.format(i)
            down = own[f"{layer}{modules.down}.weight"]
            width = down.shape[0 if modules.transposed else 1]
            units = sorted(np.random.default_rng(i).permutation(width)[: int(width * share)].tolist())
            gone = [modules.output, *((modules.fused,) if modules.fused else [modules.q.format(x) for x in "qkv"])] if not q else []
            gone += [modules.down, *modules.ups, *((modules.gate_up,) if modules.gate_up else ())] if not units else []
            if q:
                take(f"{layer}{modules.output}", 1, rows_of(q, d), zero=True)
                if modules.fused:
                    take(f"{layer}{modules.fused}", 0, qkv_rows(modules, heads, kv_heads, d, q, kv))
                else:
                    for name, kept in (("q", q), ("k", kv), ("v", kv)):
                        take(f"{layer}{modules.q.format(name)}", 0, rows_of(kept, d))
                for name in [name for name in pruned if re.match(re.escape(layer) + r".*layernorm\.norms\.", name)]:
                    del pruned[name]
                    kept = q if "q_layernorm" in name else kv
                    base, _, _ = name.rpartition(".norms.")
                    for new, old in enumerate(kept):
                        pruned[f"{base}.norms.{new}.weight"] = own[f"{base}.norms.{old}.weight"].detach().clone()
            if units:
                take(f"{layer}{modules.down}", 1, units, zero=True)
                for up in modules.ups:
                    take(f"{layer}{up}", 0, units)
                if modules.gate_up:
                    take(f"{layer}{modules.gate_up}", 0, units + [width + unit for unit in units])
            for name in gone:
                for kind in ("weight", "bias"):
                    if f"{layer}{name}.{kind}" in own:
                        if name in (modules.output, modules.down):
                            own[f"{layer}{name}.{kind}"].zero_()
                        del pruned[f"{layer}{name}.{kind}"]
            for name in [name for name in pruned if name.startswith(layer) and "norm" in name]:
                attends = any(part in name for part in ("input_layernorm", "self_attn."))
                if (not q and "self_attn." in name) or (not keep_norms and ((not q and attends) or (not units and not attends))):
                    del pruned[name]
    save_file(pruned, folder / "model.safetensors")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float().numpy()
    assert np.abs(expected).max() > 0.3
    return expected


def check(folder: Path, expected: np.ndarray, backend: _core.Backend | None = None) -> Runner:
    runner = Runner(backend or _core.reference_backend(), open_checkpoint(str(folder)), length=LENGTH, tokens=LENGTH, sequences=2)
    whole = runner.logits(IDS)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(runner.logits(IDS, [13, 1, *[1] * 6, 20]), whole, rtol=0, atol=1e-5)
    parts = [Part(0, IDS[:9], 0, 9, [8]), Part(1, IDS[:20], 0, 20, [19])]
    np.testing.assert_allclose(runner.step(parts), whole[[8, 19]], rtol=0, atol=1e-5)
    return runner


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    """No key says how the layers differ."""
    expected = prune(case, tmp_path)
    program = check(tmp_path, expected).program
    check(tmp_path, expected, _core.cpu_backend(threads=1, quantize_activations=False))
    assert len(program.cache_layers) == LAYERS - 1  # one has no attention
    counts = {kv_heads for kv_heads, _, _ in program.cache_layers}
    assert len(counts) == min(2, max(counts))


def fuse(name: str, *, by_group: int = 0) -> Callable[[Tensors], Tensors]:
    """q, k and v of each layer that has them in one tensor; `by_group`: the head size, where it is a run of each for a KV head."""

    def change(tensors: Tensors) -> Tensors:
        for i in range(LAYERS):
            for kind in ("weight", "bias"):
                module = f"model.layers.{i}.self_attn"
                if f"{module}.q_proj.{kind}" in tensors:
                    parts = [tensors.pop(f"{module}.{part}_proj.{kind}") for part in "qkv"]
                    if by_group:
                        groups = len(parts[1]) // by_group
                        parts = [torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)]
                    tensors[f"{module}.{name}.{kind}"] = torch.cat(parts)
        return tensors

    return change


LL_NAMES = {"model_type": None, "num_key_value_heads": None}
RELAID: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors], dict[str, str], dict[str, Any]]] = {
    "baichuan": ("llama", {"num_key_value_heads": 4}, fuse("W_pack"), {}, {"architectures": ["BaiChuanForCausalLM"], **LL_NAMES}),
    "internlm2": (
        "llama",
        {},
        fuse("wqkv", by_group=12),
        tiny_families.INTERNLM2_NAMES,
        {"architectures": ["InternLM2ForCausalLM"], "model_type": None, "bias": False},
    ),
    "qwen": (
        "qwen2",
        {"num_key_value_heads": 4},
        fuse("c_attn"),
        {**tiny_families.QWEN_NAMES, "self_attn": "attn"},
        {"architectures": ["QWenLMHeadModel"], **LL_NAMES, "intermediate_size": 160, "kv_channels": 12, "seq_length": 64},
    ),
    "chatglm": (
        "glm",
        {"head_dim": 16, "pad_token_id": 0},
        fuse("query_key_value"),
        tiny_families.CHATGLM_NAMES,
        {
            "architectures": ["ChatGLMModel"],
            "model_type": None,
            **tiny_families.CHATGLM,
            "num_layers": LAYERS,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
    ),
}


@pytest.mark.parametrize("case", RELAID)
def test_families_that_transformers_lacks(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, settings, change, names, config = RELAID[case]
    monkeypatch.setitem(CASES, kind, (CASES[kind][0], settings))
    expected = prune(kind, tmp_path)
    theta = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    if case == "qwen":
        config = {**config, "rotary_emb_base": theta, "layer_norm_epsilon": 1e-5, "rope_parameters": None}
    tiny_families.relay(tmp_path, lambda tensors: tiny_families.renamed(change(tensors), names), **config)
    assert len(check(tmp_path, expected).program.cache_layers) == LAYERS - 1


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_sublayers_that_are_gone_with_their_norms(case: str, tmp_path: Path) -> None:
    check(tmp_path, prune(case, tmp_path, keep_norms=False))


def prune_latent(case: str, folder: Path) -> np.ndarray:
    """DeepSeek: all heads, two of them, none; a dense MLP of half its units, two mixtures. As `prune`."""
    kind, settings = NATIVE[case]
    model = tiny_model(kind, folder, **settings)
    own, pruned, c = dict(model.named_parameters()), load_file(folder / "model.safetensors"), model.config
    query = "q_proj" if c.q_lora_rank is None else "q_b_proj"
    with torch.no_grad():
        for i, kept in enumerate(LATENT_HEADS):
            module = f"model.layers.{i}.self_attn"
            mask = torch.zeros(c.num_attention_heads, c.v_head_dim)
            mask[kept] = 1
            own[f"{module}.o_proj.weight"].mul_(mask.reshape(-1))
            if not kept:
                pruned = {name: tensor for name, tensor in pruned.items() if not name.startswith(module)}
                continue
            keys, values = c.qk_nope_head_dim, c.v_head_dim
            for name, d in ((query, keys + c.qk_rope_head_dim), ("kv_b_proj", keys + values)):
                pruned[f"{module}.{name}.weight"] = pruned[f"{module}.{name}.weight"][rows_of(kept, d)].contiguous()
            pruned[f"{module}.o_proj.weight"] = pruned[f"{module}.o_proj.weight"][:, rows_of(kept, values)].contiguous()
        units = list(range(0, c.intermediate_size, 2))
        down = own["model.layers.0.mlp.down_proj.weight"]
        down[:, [unit for unit in range(c.intermediate_size) if unit not in units]] = 0
        for name in ("gate_proj", "up_proj"):
            pruned[f"model.layers.0.mlp.{name}.weight"] = pruned[f"model.layers.0.mlp.{name}.weight"][units].contiguous()
        pruned["model.layers.0.mlp.down_proj.weight"] = down[:, units].contiguous()
    save_file(pruned, folder / "model.safetensors")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].float().numpy()
    assert np.abs(expected).max() > 0.3
    return expected


LATENT_HEADS = [[0, 1, 2, 3], [1, 3], []]


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"])
def test_latent_attention(case: str, tmp_path: Path) -> None:
    expected = prune_latent(case, tmp_path)
    program = check(tmp_path, expected).program
    check(tmp_path, expected, _core.cpu_backend(threads=1, quantize_activations=False))
    assert program.cache_layers == [(1, 28, 20)] * 2
    edit_config(tmp_path, layer_head_num=[4, 2, 0], num_key_value_heads_per_layer=[4, 2, 0])
    check(tmp_path, expected)
    edit_config(tmp_path, layer_head_num=[4, 3, 0])
    with pytest.raises(ValueError, match="config key layer_head_num says 3 for layer 1, whose tensors have 2"):
        build_program(open_checkpoint(str(tmp_path)))


def test_latent_heads_that_do_not_fit(tmp_path: Path) -> None:
    prune_latent("deepseek-v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    tensors[name] = tensors[name][:22].contiguous()  # of one head; the output's columns are of two
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.kv_b_proj\.weight has shape \(22, 20\), expected \(44, 20\)"):
        build_program(open_checkpoint(str(tmp_path)))


HEADS, WIDTHS = [4, 2, 2, 0, 4], [80, 40, 80, 60, 0]


@pytest.mark.parametrize("keys", [("layer_head_num", "layer_inter_size"), ("head_num", "inter_size")])
def test_rtp_llms_keys(keys: tuple[str, str], tmp_path: Path) -> None:
    expected = prune("llama", tmp_path)
    edit_config(tmp_path, **{keys[0]: HEADS, keys[1]: WIDTHS}, num_hidden_layers=None, layer_num=LAYERS)
    check(tmp_path, expected)
    edit_config(tmp_path, **{keys[0]: [4, 2, 3, 0, 4]})
    with pytest.raises(ValueError, match=rf"config key {keys[0]} says 3 for layer 2, whose tensors have 2"):
        build_program(open_checkpoint(str(tmp_path)))
    edit_config(tmp_path, **{keys[0]: HEADS, keys[1]: [80, 40, 80, 61, 0]})
    with pytest.raises(ValueError, match=rf"config key {keys[1]} says 61 for layer 3, whose tensors have 60"):
        build_program(open_checkpoint(str(tmp_path)))
    for value in (HEADS[:4], [4, 2, -2, 0, 4], [4, 2, "2", 0, 4]):
        edit_config(tmp_path, **{keys[0]: value, keys[1]: WIDTHS})
        with pytest.raises(ValueError, match=rf"config key {keys[0]} is .*, expected a list of 5 integers from 0"):
            build_program(open_checkpoint(str(tmp_path)))


def test_dummy_weights_of_a_pruned_model(tmp_path: Path) -> None:
    prune("llama", tmp_path)
    program, _ = build_program(open_checkpoint(str(tmp_path)))
    edit_config(tmp_path, layer_head_num=HEADS, layer_inter_size=WIDTHS, num_key_value_heads_per_layer=[2, 1, 2, 0, 2])
    dummy, _ = build_program(open_checkpoint(str(tmp_path), "dummy"))
    assert sorted(shape for _, _, shape in dummy.weights) == sorted(shape for _, _, shape in program.weights)
    assert dummy.cache_layers == program.cache_layers == [(2, 12, 12), (1, 12, 12), (2, 12, 12), (2, 12, 12)]


def test_a_regular_model_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    """Sizes that no layer has are a mistake, and not pruning."""
    tiny_model("llama", tmp_path)
    edit_config(tmp_path, intermediate_size=88)
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight has shape \(80, 48\), expected \(88, 48\)"):
        build_program(open_checkpoint(str(tmp_path)))
    edit_config(tmp_path, intermediate_size=80, num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(24, 48\), expected \(12, 48\)"):
        build_program(open_checkpoint(str(tmp_path)))


def test_kv_heads_that_do_not_divide(tmp_path: Path) -> None:
    prune("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.self_attn"
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            tensors[f"{module}.{name}.{kind}"] = torch.cat([tensors[f"{module}.{name}.{kind}"]] * 2)[:36].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layer 0 has 4 heads and 3 KV heads"):
        build_program(open_checkpoint(str(tmp_path)))


def test_gguf(tmp_path: Path) -> None:
    """Lists of sizes, as Nemotron's files have them: 0 for what is not there."""
    rows = {"hidden_size": 64, "intermediate_size": 128, "mlp_bias": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "llama", (LLAMA, rows))
        expected = prune("llama", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DECI, LAYERS)
    kept = plan(4, 2)
    stored = {}
    for name, tensor in load_file(tmp_path / "folder" / "model.safetensors").items():
        data = tensor.numpy()
        layer = re.match(r"model\.layers\.(\d+)\.self_attn\.([qk])_proj", name)
        if layer:
            heads = len(kept[int(layer[1])]["qk".index(layer[2])])
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        kind = gguf.GGMLQuantizationType.F32
        stored[names.get_name(name, try_suffixes=(".weight",))] = (np.ascontiguousarray(data), kind)
    keys = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": LAYERS,
        "feed_forward_length": [128, 64, 128, 96, 0],
        "attention.head_count": [len(q) for q, _, _ in kept],
        "attention.head_count_kv": [len(kv) for _, kv, _ in kept],
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    path = write_gguf(tmp_path / "m.gguf", {f"deci.{key}": value for key, value in keys.items()}, stored, architecture="deci")
    check(path, expected)


def test_sparse_config_file(tmp_path: Path) -> None:
    """SPARSE_CONFIG_FILE names a file that says how the layers differ, beside a config.json that does not."""
    folder = tmp_path / "m"
    prune("llama", folder)
    file = tmp_path / "sparse.json"
    file.write_text(json.dumps({"layer_num": LAYERS, "layer_head_num": HEADS, "layer_inter_size": [80, 40, 80, 61, 0]}))
    settings = {"checkpoint_path": str(folder), "sparse_config_file": str(file), "device": "cpu"}
    with pytest.raises(ValueError, match="layer_inter_size says 61 for layer 3"):
        load_runtime(Config(**settings))
    file.write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ConfigError, match=r"SPARSE_CONFIG_FILE=.*none of the lists layer_head_num and layer_inter_size is here"):
        load_runtime(Config(**settings))
