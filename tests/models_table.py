"""docs/models.md: which models run, under which names, from which layouts, with what, and by which cases that is tested.

`python tests/models_table.py` writes it anew; tests/models fail where it is not true."""

import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny_families
import transformers
from maga_transformer._core import Program
from maga_transformer.checkpoint.gguf_layouts import GLM, LAYOUTS, MIXTRAL
from maga_transformer.checkpoint.megatron_config import NAMES
from maga_transformer.models import Family, families

FILE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

`MODEL_TYPE` is read from the checkpoint; set it where a file does not say enough. Every family is read from Hugging Face's folders
(safetensors, `.bin`, `.pt`, `.pth`), the others of its layouts are listed. Each case is a tiny random model whose logits are those
of the oracle: transformers' own model, one of its models re-laid under the family's names, or the family's definition in torch
(tests/tiny_families.py): as a whole prompt, in chunks, decoded, and beside other sequences, in double precision and on the CPU's
kernels. Embedding and scoring models are in tests/tiny_embedders.py. Features are those that the programs of the cases have.

| MODEL_TYPE | also | architectures | other layouts | features | oracle | cases |
|---|---|---|---|---|---|---|
"""
# Families whose cases are tests of their own: in tests/models, test_against_transformers.py, test_embeddings.py, test_families.py.
ELSEWHERE = {
    "llama": ("llama",),
    "mistral": ("mistral",),
    "qwen_2": ("qwen2",),
    "qwen_3": ("qwen3",),
    "chatglm1": ("chatglm-6b",),
    "baichuan2": ("baichuan2-7b by name",),
    "chatglm2": ("chatglm by name",),
    "chatglm3": ("chatglm by name",),
    "bert": ("bert", "bert-relu"),
    "roberta": ("roberta", "xlm-roberta"),
    "nomic_bert": ("nomic-bert", "nomic-bert-dynamic"),
}
# What a GGUF architecture holds beside the family that its layout names.
_ALSO_GGUF = {"mistral": "llama", "roberta": "bert", "deepseek3": "deepseek2"}
_META = ("llama", "mistral")
TRANSFORMERS, RELAID, DEFINITION = "transformers", "re-laid", "definition"


@dataclass
class Stated:
    """Of a family."""

    cases: list[str] = field(default_factory=list)  # of tests/tiny_families.py
    features: set[str] = field(default_factory=set)
    oracles: set[str] = field(default_factory=set)


_FEATURES: dict[str, Callable[[dict], bool]] = {
    "learned positions": lambda op: op["op"] == "add_positions" and op["divisor"] == 1,
    "ALiBi": lambda op: op["op"] == "attention" and op["alibi"] >= 0,
    "shared KV heads": lambda op: op["op"] == "attention" and op["kv_heads"] < op["heads"],
    "latent K/V": lambda op: op["op"] == "attention" and op["v"] is None,
    "windows": lambda op: op["op"] == "attention" and op["window"] > 0,
    "soft caps": lambda op: op["op"] == "attention" and op["soft_cap"] > 0,
    "sinks": lambda op: op["op"] == "attention" and op["sinks"] >= 0,
    "log-scaled queries": lambda op: op["op"] == "log_scale",
    "q/k norm": lambda op: op["op"] == "norm" and (op["out"] == op["in"] or op["group"] < op["in"][2]),
    "LayerNorm": lambda op: op["op"] == "norm" and op["kind"] == "layer",
    "gated MLP": lambda op: op["op"] == "activation" and op["up"] is not None,
    "experts": lambda op: op["op"] == "moe",
}


def features(program: Program, family: Family) -> set[str]:
    found = {name for name, has in _FEATURES.items() if any(has(op) for op in program.ops)}
    ropes = {(op["table"], op["head_dim"] - op["offset"]) for op in program.ops if op["op"] == "rope"}
    if ropes:
        found.add("rope")
    if family.rope is not None and ropes:
        if family.rope.interleaved:
            found.add("interleaved rope")
        if any(family.rope.rotary_dim < width for _, width in ropes):
            found.add("partial rope")
    if program.whole_prompts:
        found.add("sees all tokens")
    return found - {"q/k norm", "shared KV heads"} if family.latent else found  # which its latent states have by themselves


def run_case(case: str, folder: Path) -> tuple[np.ndarray, str]:
    """The logits that it must give, and whose they are."""
    if case in tiny_families.NATIVE:
        return tiny_families.native(case, folder), TRANSFORMERS
    asked = []
    original = tiny_families.logits_of
    tiny_families.logits_of = lambda model: asked.append(model) or original(model)
    try:
        logits = tiny_families.RELAID[case](folder)
    finally:
        tiny_families.logits_of = original
    return logits, RELAID if any(isinstance(model, transformers.PreTrainedModel) for model in asked) else DEFINITION


def _layouts() -> dict[str, list[str]]:
    gguf = defaultdict(list)
    for name, layout in [*LAYOUTS.items(), ("llama", MIXTRAL), ("chatglm", GLM)]:
        gguf[families()[layout.architecture].model_type].append(name)
    for kind, name in _ALSO_GGUF.items():
        gguf[kind].append(name)
    found = defaultdict(list, {kind: [f"GGUF ({', '.join(names)})"] for kind, names in gguf.items()})
    for kind in {families()[architecture].model_type: None for architecture in NAMES}:
        found[kind].append("Megatron-LM")
    for kind in _META:
        found[kind].append("Meta")
    return found


def table(stated: dict[str, Stated]) -> str:
    """`stated` by MODEL_TYPE."""
    layouts = _layouts()
    lines = []
    for family in sorted(set(families().values()), key=lambda family: family.model_type):
        kind = family.model_type
        own = stated.get(kind, Stated())
        cells = [[kind], family.aliases, family.architectures, layouts[kind], sorted(own.features), sorted(own.oracles)]
        cells.append([*ELSEWHERE.get(kind, ()), *own.cases])
        lines.append("| " + " | ".join(", ".join(cell) for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def read_table() -> dict[str, Stated]:
    """What the file states, by MODEL_TYPE."""
    found = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| ([\w.-]+) \|.*\| ([^|]*) \| ([^|]*) \| ([^|]*) \|", line)
        if row and row[1] != "MODEL_TYPE":
            split = [[part for part in cell.split(", ") if part] for cell in row.groups()[1:]]
            cases = [case for case in split[2] if case not in ELSEWHERE.get(row[1], ())]
            found[row[1]] = Stated(cases, set(split[0]), set(split[1]))
    return found


def check_features(program: Program, family: Family) -> None:
    odd = features(program, family) - read_table()[family.model_type].features
    assert not odd, f"docs/models.md does not state {odd} of {family.model_type}: run tests/models_table.py"


def main() -> None:
    import tempfile

    from folders import tiny_model
    from maga_transformer.checkpoint import open_checkpoint
    from maga_transformer.models import build_program
    from tiny_embedders import KINDS, tiny

    sys.path.insert(0, str(Path(__file__).parent / "models"))
    from test_against_transformers import CASES

    stated: dict[str, Stated] = defaultdict(Stated)
    encoders = {case for kind, cases in ELSEWHERE.items() if families()[kind].encoder for case in cases}

    def add(folder: str, oracle: str, case: str = "", model_type: str | None = None) -> None:
        program, family = build_program(open_checkpoint(folder), model_type)
        own = stated[family.model_type]
        own.features |= features(program, family)
        own.oracles.add(oracle)
        own.cases += [case] if case else []

    for case in (*tiny_families.NATIVE, *tiny_families.RELAID):
        with tempfile.TemporaryDirectory() as folder:
            oracle = run_case(case, Path(folder))[1]
            add(folder, oracle, case)
            for model_type in {"chatglm": ("chatglm2", "chatglm3"), "baichuan2-7b": ("baichuan2",)}.get(case, ()):
                add(folder, oracle, model_type=model_type)
    for kind, settings in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(kind, Path(folder), **settings)
            add(folder, TRANSFORMERS)
    for kind in (kind for kind in KINDS if kind in encoders):
        with tempfile.TemporaryDirectory() as folder:
            tiny(kind, "Model", Path(folder))
            add(folder, TRANSFORMERS)
    with tempfile.TemporaryDirectory() as folder:
        tiny_families.chatglm1(Path(folder))
        add(folder, DEFINITION)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(table(stated), encoding="utf-8")


if __name__ == "__main__":
    main()
