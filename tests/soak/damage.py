"""Reads damaged checkpoints in a process of its own, which may die of one: python damage.py FOLDER SEED COUNT.

A line of JSON tells of every hundredth file, and of the last one before a failure."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]
import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from checkpoints import gguf_from_model  # noqa: E402
from maga_transformer import _core  # noqa: E402
from maga_transformer.checkpoint import open_checkpoint  # noqa: E402
from runner import Runner  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

VOCABULARY, WIDTH, INNER = 64, 32, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
MOST_SECONDS, MOST_MIB = 2.0, 64
EDGES = (b"\0" * 8, b"\1" + b"\0" * 7, b"\xff" * 8, b"\xff" * 7 + b"\x7f")  # little-endian 0, 1, the largest with and without sign
NUMBERS = (b"0", b"1", b"-1", b"9223372036854775807", b"18446744073709551616", b"1e400")


def write_whole(folder: Path) -> dict[str, Path]:
    """One checkpoint of each format, all of the same weights."""
    random_ = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    shapes |= {f"{layer}self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj": (INNER, WIDTH) for name in ("gate", "up")} | {f"{layer}mlp.down_proj": (WIDTH, INNER)}
    tensors = {f"{name}.weight": random_.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()}
    for norm in ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = np.ones(WIDTH, np.float32)
    state = {name: torch.from_numpy(values) for name, values in tensors.items()}
    for kind in ("safetensors", "bin"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "safetensors" / "model.safetensors")
    torch.save(state, folder / "bin" / "pytorch_model.bin")
    config = SimpleNamespace(**CONFIG, rope_parameters={"rope_theta": CONFIG["rope_theta"]})
    model: Any = SimpleNamespace(config=config, state_dict=lambda: state)
    with torch.no_grad():
        gguf_from_model(model, folder / "whole.gguf", lambda _: gguf.GGMLQuantizationType.Q8_0)
    return {
        "gguf": folder / "whole.gguf",
        "safetensors": folder / "safetensors" / "model.safetensors",
        "bin": folder / "bin" / "pytorch_model.bin",
    }


def damage(data: bytes, random_: random.Random) -> bytes:
    """Cut, bits flipped, a field set to an edge, a number of the header replaced, or two parts swapped; mostly near the ends, where
    files keep what leads to the rest."""
    out = bytearray(data)

    def place(size: int = 1) -> int:
        end = random_.choice((1024, 4096, len(out)))
        at = random_.randrange(min(end, len(out)) - size)
        return at if random_.random() < 0.8 else len(out) - size - at

    kind = random_.choice(("cut", "flip", "field", "number", "swap"))
    if kind == "cut":
        return bytes(out[: place()])
    if kind == "flip":
        for _ in range(random_.randrange(1, 5)):
            out[place()] ^= 1 << random_.randrange(8)
    elif kind == "field":
        size = random_.choice((1, 2, 4, 8))
        at = place(size)
        out[at : at + size] = random_.choice(EDGES)[8 - size :] if random_.random() < 0.5 else random_.choice(EDGES)[:size]
    elif kind == "number" and (numbers := list(re.finditer(rb"\d+", out[:4096]))):
        chosen = random_.choice(numbers)
        out[chosen.start() : chosen.end()] = random_.choice(NUMBERS)
    else:
        size = random_.randrange(1, 65)
        a, b = place(size), place(size)
        out[a : a + size], out[b : b + size] = out[b : b + size], out[a : a + size]
    return bytes(out)


def runs(path: Path, backend: Any) -> bool:
    """Whether the checkpoint loads; then a step has run. Any error but one that names the file is the caller's failure."""
    try:
        runner = Runner(backend, open_checkpoint(str(path)), length=8, tokens=4)
    except ValueError as error:
        assert "damaged" in str(error), f"the file is not named: {error}"
        return False
    assert runner.logits([1, 2, 3]).shape == (3, runner.program.vocab)
    return True


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    whole = write_whole(folder / "whole")
    damaged = folder / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text(json.dumps(CONFIG))
    backend = _core.cpu_backend(threads=1)
    results = {"loaded": 0, "refused": 0}
    for path in whole.values():
        assert runs(path.parent if path.suffix != ".gguf" else path, backend), "the whole file does not load"
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(count):
        random_ = random.Random(f"{seed}:{index}")
        kind = random_.choice(list(whole))
        file = damaged / whole[kind].name
        file.unlink(missing_ok=True)  # no shorter file under a map of the last one
        file.write_bytes(damage(whole[kind].read_bytes(), random_))
        started = time.process_time()
        try:
            results["loaded" if runs(file if kind == "gguf" else damaged, backend) else "refused"] += 1
            seconds = time.process_time() - started
            assert seconds <= MOST_SECONDS, f"it took {seconds:.1f} s"
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start) / 1024
            assert grown <= MOST_MIB, f"it took {grown:.0f} MiB"
        except BaseException:
            print(json.dumps({"file": f"{index}: {kind}"}), flush=True)
            raise
        finally:
            if kind != "gguf":
                file.unlink()
        if index % 100 == 0 or index == count - 1:
            print(json.dumps({"file": f"about {index}: {kind}", **results}), flush=True)


if __name__ == "__main__":
    main()
