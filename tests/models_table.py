"""docs/models.md: which models run, under which names, from which layouts, and by which cases that is tested.

`python tests/models_table.py` writes it anew; tests/models/test_families.py and test_models_table.py fail where it is not true."""

import re
from collections import defaultdict
from pathlib import Path

from maga_transformer.checkpoint.gguf_layouts import LAYOUTS
from maga_transformer.models import families

FILE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

`MODEL_TYPE` is read from the checkpoint; set it where a file does not say enough. Each case is a tiny random model whose logits
are those of transformers, or of a model of transformers re-laid under the family's names (tests/tiny_families.py): as a whole
prompt, in chunks, decoded, and beside other sequences, in double precision and on the CPU's kernels. Embedding and scoring models
are in tests/tiny_embedders.py.

| MODEL_TYPE | also | architectures | GGUF | cases |
|---|---|---|---|---|
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


def table(cases: dict[str, list[str]]) -> str:
    """`cases` by MODEL_TYPE."""
    gguf = defaultdict(list)
    for name, layout in LAYOUTS.items():
        gguf[families()[layout.architecture].model_type].append(name)
    lines = []
    for family in sorted(set(families().values()), key=lambda family: family.model_type):
        kind = family.model_type
        cells = [[kind], family.aliases, family.architectures, gguf[kind], [*ELSEWHERE.get(kind, ()), *cases.get(kind, [])]]
        lines.append("| " + " | ".join(", ".join(cell) for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def stated_cases() -> dict[str, list[str]]:
    """Those of tests/tiny_families.py that the file states, by MODEL_TYPE."""
    found = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| ([\w.-]+) \|.*\| ([^|]*) \|", line)
        if row and row[1] != "MODEL_TYPE":
            elsewhere = ELSEWHERE.get(row[1], ())
            found[row[1]] = [case for case in row[2].split(", ") if case and case not in elsewhere]
    return found


def main() -> None:
    import tempfile

    from maga_transformer.checkpoint import open_checkpoint
    from maga_transformer.models import build_program
    from tiny_families import NATIVE, RELAID, native

    cases = defaultdict(list)
    for case in (*NATIVE, *RELAID):
        with tempfile.TemporaryDirectory() as folder:
            _ = native(case, Path(folder)) if case in NATIVE else RELAID[case](Path(folder))
            cases[build_program(open_checkpoint(folder))[1].model_type].append(case)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(table(cases), encoding="utf-8")


if __name__ == "__main__":
    main()
