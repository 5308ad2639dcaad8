"""lm-eval over HTTP finds what it finds with the same weights in transformers: the tasks of tests/evals, scored by both."""

from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[eval]'")

ROOT = Path(__file__).parents[2]
TASKS = ["maga_choices", "maga_text", "maga_answers"]
CONTEXT = 256  # of the server; lm-eval keeps one token for the answer and one for the prefix of a window


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Data from local files, and nothing written to the user's cache."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.chdir(ROOT)
        yield


def score(kind, tasks, **options):
    chat = options.pop("apply_chat_template", False)
    return lm_eval.simple_evaluate(
        model=kind,
        model_args=options,
        tasks=tasks,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(ROOT / "tests" / "evals"), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )


@pytest.fixture(scope="module")
def by_transformers(demo_folder):
    def run(tasks, **options):
        return score("hf", tasks, pretrained=str(demo_folder), dtype="float32", device="cpu", batch_size=8, **options)

    return run


def scores(result):
    return {
        (task, name): value
        for task, found in result["results"].items()
        for name, value in found.items()
        if name.partition(",")[2] and "stderr" not in name
    }


def responses(result, task):
    return [
        [each[0] for each in sample["resps"]] for sample in sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    ]


def test_completions(server, model, by_transformers):
    """Prompts as token ids, many at once, with the server's own tokenizer, which lm-eval finds by itself."""
    ours = score(
        "local-completions", TASKS, model=model, base_url=server.url + "/v1/completions", max_length=CONTEXT, num_concurrent=8
    )
    theirs = by_transformers(TASKS, max_length=CONTEXT - 2)
    for (task, name), value in scores(theirs).items():
        exact = not name.startswith(("word_", "byte_", "bits_"))
        assert scores(ours)[task, name] == (value if exact else pytest.approx(value, rel=1e-4)), (task, name)
    for mine, reference in zip(responses(ours, "maga_choices"), responses(theirs, "maga_choices"), strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]
        assert [value for value, _ in mine] == pytest.approx([value for value, _ in reference], abs=2e-3)
    assert responses(ours, "maga_answers") == responses(theirs, "maga_answers")
    assert len({value for _, value in scores(theirs).items()}) > 3 and 0 < scores(theirs)["maga_choices", "acc,none"] < 1


def test_chat_completions(server, model, by_transformers):
    """The server's chat template does what transformers' does."""
    ours = score(
        "local-chat-completions",
        ["maga_answers"],
        model=model,
        base_url=server.url + "/v1/chat/completions",
        num_concurrent=8,
        apply_chat_template=True,
    )
    theirs = by_transformers(["maga_answers"], apply_chat_template=True)
    assert responses(ours, "maga_answers") == responses(theirs, "maga_answers") and scores(ours) == scores(theirs)
