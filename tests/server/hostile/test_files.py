"""Model files, H65 to H76: the list of where they are tested, and what only a server shows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.models import build_program
from safetensors.numpy import load_file, save_file

from ..chain_model import write_chain
from ..conftest import running_server
from ..test_start import start
from . import FILES, LINES
from .test_numbers import REFUSED
from .test_pictures import URLS

ROOT = Path(__file__).parents[3]


def test_every_line_has_a_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    found = {int(line) for line in re.findall(r"def test_h(\d\d)", text)} | set(REFUSED) | set(FILES) | set(URLS)
    assert not set(LINES) - found, "lines without a test"
    for line, place in FILES.items():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), (line, place)


CONFIGS = [  # changes, a word of the message
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"vocab_size": 10**12}, "vocab_size"),
    *[({"hidden_size": size}, "hidden_size") for size in (0, -1, 10**18, 1e18, "x", None)],
    ({"num_attention_heads": 7}, "heads"),
    *[({"rope_scaling": {"rope_type": "linear", "factor": factor}}, "factor") for factor in (0, -1, float("nan"), "x")],
    *[({"rope_theta": base}, "rope_theta") for base in (0, -1, float("nan"))],
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
]


@pytest.mark.parametrize("changes, word", CONFIGS, ids=lambda value: str(value)[:40])
def test_h75_configs_that_cannot_be(changes, word, tmp_path):
    folder = write_chain(tmp_path / "model", ["ab"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=word) as error:
        build_program(open_checkpoint(str(folder)))
    assert str(folder) in str(error.value)


def test_h75_code_of_a_checkpoint_does_not_run(tmp_path):
    folder, mark = write_chain(tmp_path / "model", ["Qab", "<|endoftext|>"]), tmp_path / "mark"
    config = json.loads((folder / "config.json").read_text())
    names = ("modeling_x", "configuration_x", "tokenization_x")
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nclass X: ...\n")
    config["auto_map"] = {
        "AutoConfig": "configuration_x.X",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": ["tokenization_x.X"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with running_server(folder, PYTHONOPTIMIZE="1") as server:
        assert server.raw("Q", max_new_tokens=5, top_k=1)["response"] == "ab"
    assert not mark.exists()


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["NaN", "Inf"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_h76_weights_that_are_no_numbers(name, value, tmp_path):
    """They are named at start, and no answer is made of them: every output that meets one ends with an error that says so, and is
    counted."""
    folder = write_chain(tmp_path / "model", ["Qab"])
    tensors = load_file(folder / "model.safetensors")
    tensors[name].reshape(-1)[5] = value
    save_file(tensors, folder / "model.safetensors")
    refused = start(CHECKPOINT_PATH=str(folder), START_PORT="0", CHECK_WEIGHTS="refuse")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused.stderr
    assert re.search(f"{re.escape(name)}: row [0-9]+ holds a value that is not finite", refused.stderr), refused.stderr
    with running_server(folder) as server:
        assert any(name in line and "not finite" in line for line in server.lines), server.lines
        for path, body in (
            ("/", {"prompt": "\x02Q", "max_new_tokens": 3}),
            ("/v1/completions", {"prompt": "\x02Q", "logprobs": 2}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 500 and "non-finite" in answer.text, answer.text
        assert server.gauges()["maga_corrupted_requests_total"] == 2
