"""Families beside Llama, Mistral and Qwen2/3 give the logits of transformers, or of its models re-laid (tiny_families.py), and
name what they cannot run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from folders import class_names, edit_config, tiny_model
from maga_transformer import _core
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from models_table import check_features, read_table, run_case
from runner import Part, Runner
from safetensors.torch import load_file, save_file
from tiny_families import IDS, LENGTH, LONGROPE, NATIVE, RELAID, baichuan2, chatglm, chatglm1, internlm, logits_of, native, qwen

CHATGLM_RATIOS = {
    "chatglm2": {"rope_type": "linear", "factor": 2.0},
    "chatglm3": {"rope_theta": 2e4},
}


@pytest.mark.parametrize("model_type", CHATGLM_RATIOS)
def test_chatglm_rope_ratio(model_type: str, tmp_path: Path) -> None:
    expected = chatglm(tmp_path, rope=CHATGLM_RATIOS[model_type], rope_ratio=2)
    with pytest.raises(ValueError, match=r"rope_ratio is 2\.0, .*set MODEL_TYPE to chatglm2 or chatglm3"):
        build_program(open_checkpoint(str(tmp_path)))
    check(expected, tmp_path, _core.reference_backend(), model_type)


def test_second_baichuan_by_name(tmp_path: Path) -> None:
    expected = baichuan2(tmp_path)
    edit_config(tmp_path, z_loss_weight=None)
    check(expected, tmp_path, _core.reference_backend(), "baichuan2")
    tiny_model("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match=r"'baichuan2' does not fit .*type 'llama'"):
        build_program(open_checkpoint(str(tmp_path / "llama")), "baichuan2")


def context_prompt(count: int, more: int, seed: int) -> list[int]:
    """`count` tokens, [gMASK], the end of the context, and what follows it."""
    random = np.random.default_rng(seed)
    return [*random.integers(0, 90, count).tolist(), 91, 94, *random.integers(0, 90, more).tolist()]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_first_chatglm(backend: str, tmp_path: Path) -> None:
    model = chatglm1(tmp_path)
    backends = {"reference": _core.reference_backend(), "cpu": _core.cpu_backend(threads=1, quantize_activations=False)}
    runner = Runner(backends[backend], open_checkpoint(str(tmp_path)), length=64, tokens=96, sequences=2)
    first, second = (context_prompt(*sizes) for sizes in ((20, 30, 0), (3, 35, 1)))
    with torch.no_grad():
        one, two = (model(torch.tensor([ids])).logits[0].numpy() for ids in (first, second))
    assert np.abs(one).max() > 0.5
    for name in (None, "chatglm", "chatglm1"):
        assert build_program(open_checkpoint(str(tmp_path)), name)[1].model_type == "chatglm1"

    def step(*spans: tuple[int, list[int], int, int]) -> np.ndarray:
        return runner.step([Part(s, ids[begin:end], begin, len(ids), range(end - begin), ids) for s, ids, begin, end in spans])

    close = {"rtol": 0, "atol": 1e-4}
    np.testing.assert_allclose(step((0, first, 0, len(first))), one, **close)
    np.testing.assert_allclose(step((0, first, 0, 23), (1, second, 0, 5)), np.concatenate([one[:23], two[:5]]), **close)
    for at in range(23, 30):  # decoded beside a prompt
        rows = step((0, first, at, at + 1), (1, second, 0, len(second)))
        np.testing.assert_allclose(rows, np.concatenate([one[at : at + 1], two]), **close)
    np.testing.assert_allclose(step((0, first, 30, len(first))), one[30:], **close)


def test_first_chatglm_in_the_engine(tmp_path: Path) -> None:
    """Prompts are read whole whatever else runs, are never found in the prefix cache, and must have their end."""
    model = chatglm1(tmp_path)
    prompts = [context_prompt(count, 0, seed) for seed, count in enumerate((12, 3, 20, 12, 12))]

    def greedy(prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(9):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    checkpoint, backend = open_checkpoint(str(tmp_path)), _core.cpu_backend(threads=1, quantize_activations=False)
    program, _ = build_program(checkpoint)
    limits = {"tokens": 26, "sequences": 4, "logit_rows": 4, "pages": 20, "page_tokens": 16, "kv_dtype": "fp32"}
    executable = backend.load(program, load_weights(backend, program, checkpoint), **limits)
    engine = _core.Engine(backend, executable, max_sequences=4, token_budget=26, max_queue=9)
    params = _core.SamplingParams(max_new_tokens=9, temperature=0.0)
    wanted = {engine.submit(np.array(prompt, np.int32), params): greedy(prompt) for prompt in [*prompts, prompts[0]]}
    found: dict[int, list[int]] = {request: [] for request in wanted}
    finished = 0
    while finished < len(wanted):
        for event in engine.poll():
            found[event.request] += event.tokens
            finished += bool(event.finish and event.finish != "none")
    assert found == wanted
    with pytest.raises(ValueError, match="the prompt has no token 94"):
        engine.submit(np.array([1, 2, 3], np.int32), params)
    with pytest.raises(ValueError, match=r"the prompt has 24 tokens before its answer, .*: at most 22 fit"):
        engine.submit(np.array(context_prompt(23, 0, 0), np.int32), params)


def check(
    expected: np.ndarray, folder: Path, backend: _core.Backend, model_type: str | None = None, *, decoded: bool = True
) -> None:
    """`decoded`: whether chunks and decoded tokens give the logits of the whole prompt."""
    assert np.abs(expected).max() > 0.5  # random weights of visible size: equality means something
    runner = Runner(backend, open_checkpoint(str(folder)), length=LENGTH, tokens=LENGTH, sequences=2, model_type=model_type)
    whole = runner.logits(IDS)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    if not decoded:
        return
    for chunks in ([13, 1, 30, 16], [20, *[1] * 40]):  # chunked prefill; prefill, then decode
        np.testing.assert_allclose(runner.logits(IDS, chunks), whole, rtol=0, atol=1e-5)
    for cuts in (((0, 20), (0, 7)), ((20, 21), (7, 40)), ((21, 22), (40, 41))):  # two sequences in a step, of their own lengths
        parts = [Part(i, IDS[begin:end], begin, LENGTH, range(end - begin)) for i, (begin, end) in enumerate(cuts)]
        rows = np.concatenate([whole[begin:end] for begin, end in cuts])
        np.testing.assert_allclose(runner.step(parts), rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [*NATIVE, *RELAID])
def test_logits(case: str, tmp_path: Path) -> None:
    expected, oracle = run_case(case, tmp_path)
    program, family = build_program(open_checkpoint(str(tmp_path)))
    stated = read_table()[family.model_type]
    assert case in stated.cases and oracle in stated.oracles, "docs/models.md states otherwise: run tests/models_table.py"
    check_features(program, family)
    for backend in (_core.reference_backend(), _core.cpu_backend(threads=1, quantize_activations=False)):
        check(expected, tmp_path, backend)


UNSUPPORTED = {
    "mpt": [
        ({"attn_config": {"clip_qkv": -8.0}}, "config key clip_qkv is -8.0, expected a finite number above 0"),
        ({"attn_config": {"prefix_lm": True}}, "config key prefix_lm is True, which is not supported"),
        ({"attn_config": {"attn_type": "grouped_query"}}, "config key attn_type is 'grouped_query'"),
        ({"attn_config": 7}, "config key attn_config is 7, expected an object"),
        ({"logit_scale": "large"}, "config key logit_scale is 'large', expected a finite number above 0"),
        ({"no_bias": False}, r"tensor transformer\.blocks\.0\.norm_1\.bias is missing"),
        ({"n_layers": 0}, "config key n_layers is 0, expected an integer from 1"),
    ],
    "stablelm": [({"qk_layernorm": True}, r"q_layernorm\.norms\.0\.weight is missing .expected shape .16.")],
    "cohere": [({"use_qk_norm": True}, r"q_norm\.weight is missing .expected shape .4, 16.")],
    "gpt2": [({"n_positions": 300}, r"wpe\.weight has shape .256, 64., expected .300, 64.")],
    "opt": [({"max_position_embeddings": 300}, r"embed_positions\.weight has shape")],
    "gemma2": [({"final_logit_softcapping": -1.0}, "config key final_logit_softcapping is -1.0")],
    "falcon": [({"new_decoder_architecture": True, "parallel_attn": False}, "config key parallel_attn is False")],
    "gemma": [({"use_bidirectional_attention": True}, "config key use_bidirectional_attention is True")],
    "phi3": [({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported")],
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_values_are_named(kind: str, tmp_path: Path) -> None:
    tiny_model(kind, tmp_path, hidden_size=64, **({"pad_token_id": 0} if kind == "phi3" else {}))
    original = (tmp_path / "config.json").read_text()
    for changes, message in UNSUPPORTED[kind]:
        (tmp_path / "config.json").write_text(original)
        edit_config(tmp_path, **changes)
        with pytest.raises(ValueError, match=message) as error:
            build_program(open_checkpoint(str(tmp_path)))
        assert str(tmp_path) in str(error.value)


def test_internlm_with_a_rotary_key(tmp_path: Path) -> None:
    expected = internlm(tmp_path)
    edit_config(tmp_path, rope_parameters=None, rotary={"base": 10000, "type": "dynamic"})
    check(expected, tmp_path, _core.reference_backend())
    edit_config(tmp_path, rotary={"base": 10000, "type": "spiral"})
    with pytest.raises(ValueError, match=r"config key rotary is .*'spiral'.*, expected an object with type origin or dynamic"):
        build_program(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize(("ntk", "positions"), [(True, 256), (False, 64)])
def test_qwens_context(ntk: bool, positions: int, tmp_path: Path) -> None:
    qwen(tmp_path)
    edit_config(tmp_path, use_dynamic_ntk=ntk)
    program, family = build_program(open_checkpoint(str(tmp_path)))
    assert (family.model_type, program.max_positions) == ("qwen", positions)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_by_its_old_names(kind: str, tmp_path: Path) -> None:
    expected = native("phi3-longrope-beyond", tmp_path)
    edit_config(tmp_path, rope_parameters=None, rope_scaling={**LONGROPE, "rope_type": None, "type": kind})
    check(expected, tmp_path, _core.reference_backend())
    for key in ("short_factor", "long_factor"):
        edit_config(tmp_path, rope_scaling={**LONGROPE, key: [1.0, 2.0]})
        with pytest.raises(ValueError, match=rf"rope_scaling\.{key} is \[1\.0, 2\.0\], expected a list of 6 numbers"):
            build_program(open_checkpoint(str(tmp_path)))


ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
ROPED = (
    "cohere",
    "falcon-7b",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "gpt-neox",
    "nemotron",
    "olmo",
    "olmo2",
    "phi",
    "stablelm",
    "starcoder2",
)


@pytest.mark.parametrize("scaling", ROPE_SCALINGS)
@pytest.mark.parametrize("case", ROPED)
def test_rope_scaling(case: str, scaling: str, tmp_path: Path) -> None:
    """Every family takes the scalings that transformers has for all."""
    kind, settings = NATIVE[case]
    default = getattr(transformers, class_names(kind)[0])().rope_parameters
    share = {key: settings[key] for key in ("partial_rotary_factor",) if key in settings}
    short = {"max_position_embeddings": 24} if scaling == "dynamic" else {}
    model = tiny_model(kind, tmp_path, **{**settings, **short, "rope_parameters": {**default, **share, **ROPE_SCALINGS[scaling]}})
    check(logits_of(model), tmp_path, _core.cpu_backend(threads=1, quantize_activations=False), decoded=scaling != "dynamic")


@pytest.mark.parametrize("case", NATIVE)
def test_dummy_weights(case: str, tmp_path: Path) -> None:
    """config.json alone makes the program that the checkpoint makes."""
    native(case, tmp_path)
    program, _ = build_program(open_checkpoint(str(tmp_path)))
    dummy, _ = build_program(open_checkpoint(str(tmp_path), "dummy"))
    assert dummy.ops == program.ops
    assert [shape for _, _, shape in dummy.weights] == [shape for _, _, shape in program.weights]


def test_buffers_beside_the_weights_are_ignored(tmp_path: Path) -> None:
    native("gpt-neox", tmp_path)
    file = tmp_path / "model.safetensors"
    attention = "gpt_neox.layers.1.attention"
    buffers = {f"{attention}.{name}": torch.zeros(1) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    save_file({**load_file(file), **buffers}, file)
    build_program(open_checkpoint(str(tmp_path)))
    save_file({**load_file(file), f"{attention}.more": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"no place for these tensors: gpt_neox\.layers\.1\.attention\.more"):
        build_program(open_checkpoint(str(tmp_path)))


ODD_VALUES = (None, -1, 0, 3, True, "x", 1e300, float("nan"), [], [1], {}, {"rope_type": 3}, 2**39)


@pytest.mark.parametrize("case", [*{kind: case for case, (kind, _) in NATIVE.items()}.values(), "qwen", "chatglm", "internlm2"])
def test_odd_configs_build_or_are_refused(case: str, tmp_path: Path) -> None:
    native(case, tmp_path) if case in NATIVE else RELAID[case](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in config:
        for value in ODD_VALUES:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                build_program(open_checkpoint(str(tmp_path)))
            except ValueError as error:
                assert str(tmp_path) in str(error), (key, value)
