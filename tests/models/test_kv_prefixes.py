"""Keys and values that were tuned: PEFT's prefix tuning gives what transformers gives with them as past_key_values, for every
family that it has; ChatGLM's P-Tuning v2 what its definition gives, whose prompts have positions from 0 on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_families
import torch
import transformers
from folders import TINY, tiny_model
from maga_transformer import _core
from maga_transformer.adapters.ptuning import open_ptuning
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from peft_folders import write_prompt
from runner import Part, Runner
from tiny_families import IDS, NATIVE, chatglm, chatglm1

TOKENS = 21  # more than a page
BACKENDS = {"reference": _core.reference_backend, "cpu": lambda: _core.cpu_backend(threads=1, quantize_activations=False)}
WIDE = ("falcon-40b", "falcon-11b")  # transformers keeps their keys once a query head


def random_prefix(folder: Path) -> torch.Tensor:
    """(tokens, layers, 2, K/V heads, head_dim)"""
    program, _ = build_program(open_checkpoint(str(folder)))
    op = next(op for op in program.ops if op["op"] == "attention")
    layers = sum(op["op"] == "attention" for op in program.ops)
    return torch.randn(TOKENS, layers, 2, op["kv_heads"], op["head_dim"], generator=torch.Generator().manual_seed(4))


def with_past(
    model: torch.nn.Module, prefix: torch.Tensor, positions: torch.Tensor | None = None, ids: Sequence[int] = IDS
) -> np.ndarray:
    cache = transformers.DynamicCache()
    for i in range(prefix.shape[1]):
        cache.update(*(prefix[:, i, half].transpose(0, 1)[None].contiguous() for half in (0, 1)), i)
    with torch.no_grad():
        answer = model(
            torch.tensor([ids]),
            past_key_values=cache,
            attention_mask=torch.ones(1, TOKENS + len(ids), dtype=torch.long),
            **({} if positions is None else {"position_ids": positions}),
        )
    return answer.logits[0].float().numpy()


def check(expected: np.ndarray, folder: Path, ptuning: Path, *, alone: bool = True) -> None:
    assert np.abs(expected).max() > 0.5
    length = len(IDS)
    plain = Runner(_core.cpu_backend(threads=1), open_checkpoint(str(folder)), length=length, tokens=length).logits(IDS)
    assert np.abs(plain - expected).max() > 0.05
    for make in BACKENDS.values():
        runner = Runner(make(), open_checkpoint(str(folder)), length=length, tokens=length, sequences=2, ptuning=str(ptuning))
        whole = runner.logits(IDS)
        np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
        if not alone:
            continue
        np.testing.assert_allclose(runner.logits(IDS, [13, 1, 9, *[1] * (length - 23)]), whole, rtol=0, atol=1e-5)
        for cuts in (((0, 20), (0, 7)), ((20, 21), (7, 40)), ((21, 22), (40, 41))):
            parts = [Part(i, IDS[begin:end], begin, length, range(end - begin)) for i, (begin, end) in enumerate(cuts)]
            rows = np.concatenate([whole[begin:end] for begin, end in cuts])
            np.testing.assert_allclose(runner.step(parts), rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in NATIVE if not case.startswith("deepseek")])  # latent states cannot be given
def test_prefix_tuning(case: str, tmp_path: Path) -> None:
    kind, settings = NATIVE[case]
    model = tiny_model(kind, tmp_path, **settings)
    prefix = random_prefix(tmp_path)
    ptuning = write_prompt(tmp_path / "ptuning", prefix.flatten(1), peft_type="PREFIX_TUNING")
    if case in WIDE:
        prefix = prefix.repeat_interleave(model.config.num_attention_heads // prefix.shape[3], dim=3)
    check(with_past(model, prefix), tmp_path, ptuning, alone="longrope" not in case)


@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_latent_states_cannot_be_given(case: str, tmp_path: Path) -> None:
    """PEFT writes keys and values of one width, hidden_size / num_attention_heads; these models have none of that."""
    kind, settings = NATIVE[case]
    model = tiny_model(kind, tmp_path, **settings)
    c = model.config
    prefix = torch.randn(TOKENS, c.num_hidden_layers, 2, c.num_attention_heads, c.hidden_size // c.num_attention_heads)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):  # transformers neither
        with_past(model, prefix)
    ptuning = write_prompt(tmp_path / "ptuning", prefix.flatten(1), peft_type="PREFIX_TUNING")
    program, family = build_program(open_checkpoint(str(tmp_path)))
    with pytest.raises(ValueError, match=f"cannot be given to a model of type '{family.model_type}', which keeps latent states"):
        open_ptuning(str(ptuning)).check(program, family)


def check_engine(folder: Path, prompts: list[list[int]], logits: Callable[[list[int]], np.ndarray]) -> None:
    """Greedy text of prompts that run together, twice; `logits` of all tokens of a text."""
    new = 6
    checkpoint, backend = open_checkpoint(str(folder)), _core.cpu_backend(threads=1, quantize_activations=False)
    program, family = build_program(checkpoint)
    limits = {"tokens": 48, "sequences": 4, "logit_rows": 4, "pages": 20, "page_tokens": 16, "kv_dtype": "fp32"}
    model = backend.load(program, load_weights(backend, program, checkpoint), **limits)
    tuned = open_ptuning(str(folder / "ptuning"))
    tuned.check(program, family)
    tuned.fill(model, program)
    engine = _core.Engine(
        backend,
        model,
        max_sequences=4,
        token_budget=48,
        max_queue=9,
        prefix=list(range(program.vocab, program.vocab + tuned.tokens)),
        prefix_in_pages=tuned.in_pages,
        prefix_has_positions=tuned.has_positions,
    )
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            ids.append(int(logits(ids)[-1].argmax()))
        texts.append(ids[len(prompt) :])
    params = _core.SamplingParams(max_new_tokens=new, temperature=0.0)
    for _ in range(2):
        wanted = {engine.submit(np.array(ids, np.int32), params): text for ids, text in zip(prompts, texts, strict=True)}
        found: dict[int, list[int]] = {request: [] for request in wanted}
        running = len(wanted)
        while running:
            for event in engine.poll():
                found[event.request] += event.tokens
                running -= bool(event.finish)
        assert found == wanted


def write_encoder(folder: Path, prefix: torch.Tensor, *, projection: bool) -> torch.Tensor:
    """ChatGLM's layout; returns the prefix that it means."""
    folder.mkdir()
    name, width = "transformer.prefix_encoder.", prefix[0].numel()
    flat = prefix.flatten(1)
    tensors = {f"{name}embedding.weight": flat}
    if projection:
        random = torch.Generator().manual_seed(6)
        for layer, shape in (("trans.0", (40, width)), ("trans.2", (width, 40))):
            tensors[f"{name}{layer}.weight"] = torch.randn(shape, generator=random) * shape[1] ** -0.5
            tensors[f"{name}{layer}.bias"] = torch.randn(shape[0], generator=random)
        first, second = (torch.nn.Linear(width, 40), torch.nn.Linear(40, width))
        for linear, layer in ((first, "trans.0"), (second, "trans.2")):
            linear.load_state_dict({kind: tensors[f"{name}{layer}.{kind}"] for kind in ("weight", "bias")})
        with torch.no_grad():
            flat = torch.nn.Sequential(first, torch.nn.Tanh(), second)(flat)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"pre_seq_len": TOKENS, "prefix_projection": projection}))
    return flat.view(prefix.shape)


@pytest.mark.parametrize("projection", [False, True])
def test_second_chatglm(projection: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    original = tiny_families.logits_of
    monkeypatch.setattr(tiny_families, "logits_of", lambda model: models.append(model) or original(model))
    chatglm(tmp_path)
    prefix = write_encoder(tmp_path / "ptuning", random_prefix(tmp_path), projection=projection)
    expected = with_past(models[0], prefix, torch.arange(len(IDS))[None])
    assert np.abs(expected - with_past(models[0], prefix)).max() > 0.01  # positions matter
    check(expected, tmp_path, tmp_path / "ptuning")
    prompts = [IDS[:9], IDS[:50], IDS[30:]]
    check_engine(tmp_path, prompts, lambda ids: with_past(models[0], prefix, torch.arange(len(ids))[None], ids))


def test_first_chatglm(tmp_path: Path) -> None:
    model = chatglm1(tmp_path)
    prefix = write_encoder(tmp_path / "ptuning", random_prefix(tmp_path), projection=True)
    model.past = prefix.permute(1, 2, 3, 0, 4)
    random = np.random.default_rng(3)
    ids = [*random.integers(0, 90, 12).tolist(), 91, 94, *random.integers(0, 90, 15).tolist()]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for make in BACKENDS.values():
        checkpoint = open_checkpoint(str(tmp_path))
        runner = Runner(make(), checkpoint, length=40, tokens=40, sequences=2, ptuning=str(tmp_path / "ptuning"))
        for begin, end in ((0, len(ids)), (0, 13), (13, 14), (14, len(ids))):
            rows = runner.step([Part(0, ids[begin:end], begin, len(ids), range(end - begin), ids)])
            np.testing.assert_allclose(rows, expected[begin:end], rtol=0, atol=1e-4)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy()

    prompts = [[*random.integers(0, 90, count).tolist(), 91, 94] for count in (3, 20, 34)]
    check_engine(tmp_path, prompts, logits)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    program, family = build_program(open_checkpoint(str(tmp_path)))
    prefix = random_prefix(tmp_path)
    folder = write_prompt(tmp_path / "a", prefix[:, :2].flatten(1), peft_type="PREFIX_TUNING")
    with pytest.raises(ValueError, match=r"keys and values of 96 numbers, the model of 144: .*\(tuned for some/base\)"):
        open_ptuning(str(folder)).check(program, family)
    write_encoder(tmp_path / "b", prefix, projection=False)
    with pytest.raises(ValueError, match=r"transformer\.prefix_encoder is ChatGLM's, the model is of type 'llama'"):
        open_ptuning(str(tmp_path / "b")).check(program, family)
    for config, message in (
        ({"pre_seq_len": 20}, rf"embedding has shape \({TOKENS}, {TINY['num_hidden_layers'] * 48}\), pre_seq_len .* is 20"),
        ({"prefix_projection": True}, r"with prefix_projection=True it must hold .*trans\.0\.bias"),
    ):
        (tmp_path / "b" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            open_ptuning(str(tmp_path / "b"))
