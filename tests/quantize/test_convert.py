"""`maga quantize` on tiny models of several families: what it writes is read back, as it was meant, by our loader and by others."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import edit_config
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import open_quantized, read_weight
from maga_transformer.models import build_program
from maga_transformer.quantize import awq, convert
from maga_transformer.quantize.calibrate import StageRunner
from maga_transformer.quantize.plan import make_plan
from runner import Runner
from tiny import calibration, model_folder, recipe

IDS = np.random.default_rng(3).integers(0, 96, 40).tolist()
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "phi3": {"pad_token_id": 0},
    "gemma": {"head_dim": 16},
    "gpt_neox": {},
    "olmo2": {},
    "falcon": {"ffn_hidden_size": 128, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
}
WAYS = {
    "gptq": ("gptq", {}),
    "gptq-2-bits-zeros": ("gptq", {"bits": 2, "symmetric": False, "group_size": 16}),
    "gptq-3-bits": ("gptq", {"bits": 3, "act_order": "none", "checkpoint_format": "gptq_v2"}),
    "gptq-8-bits-rows": ("gptq", {"bits": 8, "group_size": -1}),
    "gptq-desc-act": ("gptq", {"act_order": "dynamic", "symmetric": False}),
    "awq": ("awq", {}),
    "int8": ("int8", {}),
    "fp8": ("fp8", {}),
}
# How much of the weights' size their errors may be, and of the logits' spread.
CLOSE = {"gptq": 0.3, "gptq-2-bits-zeros": 1.0, "gptq-3-bits": 0.6, "gptq-8-bits-rows": 0.03, "gptq-desc-act": 0.3}
CLOSE |= {"awq": 0.25, "int8": 0.01, "fp8": 0.04}


def logits(folder: Path) -> np.ndarray:
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    return Runner(backend, open_checkpoint(str(folder)), length=len(IDS), tokens=len(IDS)).logits(IDS)


def transformers_logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def quantized(kind: str, way: str, tmp_path: Path, **settings: Any) -> tuple[torch.nn.Module, Path]:
    model = model_folder(kind, tmp_path / "in", **{**FAMILIES.get(kind, {}), **settings})
    method, changes = WAYS[way]
    convert(str(tmp_path / "in"), str(tmp_path / "out"), recipe(method, **changes), calibration(tmp_path), threads=1)
    return model, tmp_path / "out"


@pytest.mark.parametrize(
    ("kind", "way"), [*(("llama", way) for way in WAYS), *((kind, way) for kind in FAMILIES for way in ("awq", "gptq"))]
)
def test_the_engine_reads_what_was_written(kind: str, way: str, tmp_path: Path) -> None:
    """Its logits are those of transformers with the same values, and near those of the model it was."""
    model, out = quantized(kind, way, tmp_path)
    before = transformers_logits(model)
    checkpoint = open_quantized(open_checkpoint(str(out)))
    names = set(checkpoint.names())
    linears = [name for name in names if checkpoint.is_quantized(name)]  # type: ignore[attr-defined]
    wanted = {name + ".weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(linears) == {name for name in wanted if "head" not in name and "embed_out" not in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.copy_(torch.from_numpy(read_weight(checkpoint, [name]).dequantize().reshape(parameter.shape)))
    found = logits(out)
    wanted_logits = transformers_logits(model)
    if way == "fp8":  # which a CPU widens to bf16
        assert np.std(found - wanted_logits) < 2e-2 * np.std(wanted_logits)
    else:
        np.testing.assert_allclose(found, wanted_logits, atol=2e-3, rtol=2e-3)
    if kind == "llama":
        assert np.std(found - before) < 4 * CLOSE[way] * np.std(before)
    written = json.loads((out / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] in ("gptq", "awq", "compressed-tensors")
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "in" / "tokenizer.json").read_bytes()
    assert not list(out.glob("*.npy")) and not (out / "quantize.json").exists()


@pytest.mark.parametrize("way", WAYS)
def test_errors_are_no_larger_than_the_codes_are_coarse(way: str, tmp_path: Path) -> None:
    model, out = quantized("llama", way, tmp_path)
    if way == "awq":
        pytest.skip("its weights are other ones: norms take a part of them")
    checkpoint = open_quantized(open_checkpoint(str(out)))
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            error = read_weight(checkpoint, [name]).dequantize() - parameter.detach().numpy()
            assert np.std(error) < CLOSE[way] * parameter.std().item(), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_folded_scales_change_nothing(kind: str, tmp_path: Path) -> None:
    model_folder(kind, tmp_path / "in", **FAMILIES[kind])
    before = logits(tmp_path / "in")
    checkpoint = open_checkpoint(str(tmp_path / "in"))
    program, _ = build_program(checkpoint)
    plan = make_plan(checkpoint, program, recipe("awq"), allow_requantize=False)
    tensors = {name: read_weight(checkpoint, [name]).dequantize() for name in checkpoint.names()}
    count = 0
    for stage in plan.stages:
        for fold in awq.folds(program, stage):
            scale = np.exp(np.random.default_rng(count).normal(0, 0.7, fold.input[2])).astype(np.float32)
            awq.apply(fold, scale, tensors, stage.linears)
            count += 1
    # Two norms, or one; and the rows of up, but for families without a gate. Norms behind the linears take nothing.
    assert count == {"gpt_neox": 4, "olmo2": 2, "falcon": 4}.get(kind, 6)
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, tmp_path / "in" / "model.safetensors")
    np.testing.assert_allclose(logits(tmp_path / "in"), before, atol=2e-4, rtol=2e-4)


def test_stages_together_are_the_model(tmp_path: Path) -> None:
    """What one stage leaves is what the next one of the whole program reads."""
    model = model_folder("llama", tmp_path / "in")
    checkpoint = open_checkpoint(str(tmp_path / "in"))
    program, _ = build_program(checkpoint)
    stages = make_plan(checkpoint, program, recipe("gptq"), allow_requantize=False).stages
    assert [len(stage.linears) for stage in stages] == [4, 3] * 2
    runner = StageRunner(_core.cpu_backend(threads=1, quantize_activations=False), program, np.asarray([IDS], np.int32))
    before = None
    for index, stage in enumerate(stages):
        runner.write(stage, checkpoint, before, str(tmp_path / f"{index}.npy"))
        before = np.load(tmp_path / f"{index}.npy")
    with torch.no_grad():
        hidden = model.model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    norm = model.model.norm(torch.from_numpy(before[0])).detach().numpy()
    np.testing.assert_allclose(norm, hidden[-1][0].numpy(), atol=1e-4, rtol=1e-4)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any stage, or between its two passes, it ends with the same bytes."""
    model_folder("llama", tmp_path / "in")
    texts = calibration(tmp_path)

    def run(out: str, method: str = "gptq") -> None:
        convert(str(tmp_path / "in"), str(tmp_path / out), recipe(method), texts, threads=1)

    run("whole")
    run_stage, replace = StageRunner.inputs, os.replace
    for stop in range(7):
        calls = 0

        def killed(*arguments: Any, stop: int = stop, **named: Any) -> Any:
            nonlocal calls
            if calls == stop:
                raise KeyboardInterrupt
            calls += 1
            return replace(*arguments, **named)

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(f"stopped-{stop}")
        assert not (tmp_path / f"stopped-{stop}").exists()
        monkeypatch.setattr(os, "replace", replace)
        if stop == 3:
            with pytest.raises(ValueError, match=r"stopped-3\.partial: a run with another recipe has begun it"):
                run("stopped-3", "awq")
        computed: list[int] = []
        monkeypatch.setattr(StageRunner, "inputs", lambda *a, c=computed: (c.append(a[1].first), run_stage(*a))[1])
        run(f"stopped-{stop}")
        monkeypatch.setattr(StageRunner, "inputs", run_stage)
        assert len(computed) == 4 - (stop + 1) // 2, "finished stages are not computed again"
        for file in (tmp_path / "whole").iterdir():
            assert (tmp_path / f"stopped-{stop}" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder("llama", tmp_path / "in")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"out\.partial: no space is left on the disk; make some and run the same command"):
            convert(str(tmp_path / "in"), str(tmp_path / "out"), recipe("int8"), calibration(tmp_path), threads=1)
    convert(str(tmp_path / "in"), str(tmp_path / "out"), recipe("int8"), calibration(tmp_path), threads=1)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    import fcntl

    model_folder("llama", tmp_path / "in")
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "quantize.json", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another run is writing it"):
            convert(str(tmp_path / "in"), str(tmp_path / "out"), recipe("int8"), calibration(tmp_path), threads=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "gguf"}, r"--method gguf: not supported \(supported: gptq, awq, int8, fp8\)"),
        ({"method": "awq", "bits": 3}, r"--bits, with --method awq, 3: not supported \(supported: 4\)"),
        ({"method": "gptq", "bits": 5}, r"supported: 2, 3, 4, 8"),
        ({"method": "gptq", "group_size": 0}, "--group-size 0: a number of columns"),
        ({"method": "gptq", "act_order": "yes"}, r"--act-order yes: not supported \(supported: none, static, dynamic\)"),
        ({"method": "gptq", "damp": 0.0}, "--damp 0: it must lie between 0 and 1"),
        ({"method": "gptq", "checkpoint_format": "marlin"}, "--checkpoint-format marlin"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


def test_what_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    def attempt(folder: str, out: str = "out", method: str = "awq", **changes: Any) -> None:
        convert(str(tmp_path / folder), str(tmp_path / out), recipe(method, **changes), calibration(tmp_path), threads=1)

    model_folder("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match=r"q_proj.weight has 64 columns: --group-size 128 does not divide them; 64, 32 would"):
        attempt("llama", group_size=128)
    with pytest.raises(ValueError, match="llama: it exists already; name a new folder"):
        attempt("llama", "llama")
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        attempt("nowhere")
    with pytest.raises(ValueError, match="--sample-length 1000: the model takes 256 tokens"):
        convert(
            str(tmp_path / "llama"),
            str(tmp_path / "out"),
            recipe("gptq"),
            dataclasses.replace(calibration(tmp_path), length=1000),
        )
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(ValueError, match="the calibration text has 11 tokens, too few"):
        convert(
            str(tmp_path / "llama"),
            str(tmp_path / "out"),
            recipe("gptq"),
            dataclasses.replace(calibration(tmp_path), file=str(tmp_path / "short.txt")),
        )
    attempt("llama", "int8", "int8")
    with pytest.raises(ValueError, match=r"it is quantised already \(quant_method compressed-tensors\)"):
        attempt("int8")
    model_folder("mixtral", tmp_path / "mixtral")
    with pytest.raises(ValueError, match=r"it is a mixture of experts \(mixtral\)"):
        attempt("mixtral", method="int8")
    model_folder("gpt2", tmp_path / "gpt2", n_inner=128)
    with pytest.raises(ValueError, match=r"c_attn.weight is stored as \(columns, rows\)"):
        attempt("gpt2")
    model_folder("llama", tmp_path / "odd", intermediate_size=100, hidden_size=64)
    with pytest.raises(ValueError, match=r"gate_proj.weight has 100 rows: awq of 4 bits stores multiples of 8"):
        attempt("odd", group_size=-1)
    edit_config(tmp_path / "llama", architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(ValueError):
        attempt("llama")
