"""Tuned prompts give what PEFT defines: the embeddings of virtual tokens before those of the prompt (transformers' inputs_embeds),
for every family; and folders that do not fit are refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from folders import tiny_model
from maga_transformer import _core
from maga_transformer.adapters.ptuning import open_ptuning
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.formats import read_weight
from maga_transformer.models import build_program
from peft_folders import write_prompt
from runner import Part, Runner
from tiny_families import IDS, NATIVE, RELAID

VIRTUAL = 11
BACKENDS = {"reference": _core.reference_backend, "cpu": lambda: _core.cpu_backend(threads=1, quantize_activations=False)}


def check(expected: np.ndarray, folder: Path, ptuning: Path, ids: list[int], *, alone: bool = True) -> None:
    """`expected`: logits at all places, of which the first VIRTUAL are virtual tokens. `alone`: the lengths of others, and of what
    follows, do not matter."""
    assert np.abs(expected).max() > 0.5
    for make in BACKENDS.values():
        length = VIRTUAL + len(ids)
        runner = Runner(make(), open_checkpoint(str(folder)), length=length, tokens=2 * length, sequences=2, ptuning=str(ptuning))
        vocab = runner.program.vocab
        assert runner.program.logits_width == vocab and runner.program.virtual_tokens == VIRTUAL
        whole = [*range(vocab, vocab + VIRTUAL), *ids]
        found = runner.logits(whole)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        if not alone:
            continue
        chunks = [7, 1, 16, 14, *[1] * (length - 38)]  # cut inside the virtual tokens, then decoded
        np.testing.assert_allclose(runner.logits(whole, chunks), found, rtol=0, atol=1e-5)
        plain = runner.logits(ids)  # a neighbour without virtual tokens
        assert np.abs(plain - found[VIRTUAL:]).max() > 0.05
        cuts = ((whole, found, 0, 20), (ids, plain, 0, 7)), ((whole, found, 20, 21), (ids, plain, 7, 40))
        for parts in cuts:
            step = [Part(i, of[a:b], a, len(of), range(b - a)) for i, (of, _, a, b) in enumerate(parts)]
            rows = np.concatenate([logits[a:b] for _, logits, a, b in parts])
            np.testing.assert_allclose(runner.step(step), rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", NATIVE)
def test_logits(case: str, tmp_path: Path) -> None:
    kind, settings = NATIVE[case]
    model = tiny_model(kind, tmp_path, **settings)
    embedded = model.get_input_embeddings()(torch.tensor([IDS]))
    prompt = torch.randn(VIRTUAL, embedded.shape[-1], generator=torch.Generator().manual_seed(1)) * embedded.std()
    ptuning = write_prompt(tmp_path / "ptuning", prompt, num_layers=model.config.num_hidden_layers)
    with torch.no_grad():
        expected = model(inputs_embeds=torch.cat([prompt[None], embedded], dim=1)).logits[0].float().numpy()
    check(expected, tmp_path, ptuning, IDS, alone="longrope" not in case)


@pytest.mark.parametrize("case", RELAID)
def test_rows_of_the_vocabulary(case: str, tmp_path: Path) -> None:
    """Virtual tokens that are copies of real ones, for families that transformers does not have."""
    expected = RELAID[case](tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    program, family = build_program(checkpoint)
    table = torch.from_numpy(read_weight(checkpoint, [family.embedding]).dequantize())
    scale = next(op["scale"] for op in program.ops if op["op"] == "embed")
    ptuning = write_prompt(tmp_path / "ptuning", table[IDS[:VIRTUAL]] * scale, peft_type="P_TUNING", safetensors=False)
    check(expected, tmp_path, ptuning, IDS[VIRTUAL:], alone="beyond" not in case)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    program, family = build_program(open_checkpoint(str(tmp_path)))
    prompt = torch.zeros(3, 48)
    for settings, message in (
        ({"peft_type": "LORA"}, r"adapter_config\.json: key peft_type is 'LORA', expected one of .*PROMPT_TUNING"),
        ({"peft_type": None}, "key peft_type is None"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "key task_type is 'SEQ_2_SEQ_LM', expected CAUSAL_LM"),
        ({"num_transformer_submodules": 2}, "key num_transformer_submodules is 2, expected 1"),
        ({"num_virtual_tokens": 4}, r"prompt_embeddings has shape \(3, 48\), expected \(4, any\)"),
        ({"num_virtual_tokens": 0}, "key num_virtual_tokens is 0, expected an integer from 1"),
        ({"num_virtual_tokens": "x"}, "key num_virtual_tokens is 'x'"),
        ({"num_layers": 5}, r"has 5 layers, the model 3: it belongs to another model \(tuned for some/base\)"),
    ):
        folder = write_prompt(tmp_path / "a", prompt, **settings)
        with pytest.raises(ValueError, match=message) as error:
            open_ptuning(str(folder)).check(program, family)
        assert str(folder) in str(error.value)
    with pytest.raises(ValueError, match="has embeddings of width 40, the model 48"):
        open_ptuning(str(write_prompt(tmp_path / "a", prompt[:, :40]))).check(program, family)
    with pytest.raises(ValueError, match="has the type int64"):
        open_ptuning(str(write_prompt(tmp_path / "a", prompt.long())))
    with pytest.raises(ValueError, match=r"neither PEFT's adapter_config\.json nor"):
        open_ptuning(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_ptuning(str(tmp_path / "b"))
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        open_ptuning(str(tmp_path / "a"))
