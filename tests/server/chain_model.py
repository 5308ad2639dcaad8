"""Tiny Llama checkpoints that say what a test wants: one layer that adds nothing, so the next token depends on the last one only.

The tokenizer is byte-level without merges: ids 0 to 2 are <|endoftext|>, <|im_start|>, <|im_end|>, then one id a byte."""

import itertools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WIDTH = 320  # hidden size and vocabulary
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL[0]


def write_chain(folder: pathlib.Path, *chains: Sequence[str | int]) -> pathlib.Path:
    """Greedy decoding follows each chain: texts (a special token, or a text byte by byte) and single bytes as integers."""
    odds: dict[int, dict[int, float]] = {}
    for chain in chains:
        ids = [token for part in chain for token in _ids(part)]
        for current, following in itertools.pairwise(ids):
            assert current not in odds, "a token can be followed by one token only"
            odds[current] = {following: 1.0}
    return _write(folder, odds)


def write_odds(folder: pathlib.Path, current: str, odds: Mapping[str, float]) -> pathlib.Path:
    """After `current` come the texts of `odds` with these probabilities."""
    return _write(folder, {_ids(current)[0]: {_ids(text)[0]: value for text, value in odds.items()}})


def write_random(folder: pathlib.Path, context: int = 256) -> pathlib.Path:
    """Two layers of 64 for LOAD_FORMAT=dummy: what they say depends on all that was said before."""
    write_chain(folder, ["a", "b"])
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _ids(part: str | int) -> list[int]:
    if isinstance(part, int):
        return [3 + part]
    return [SPECIAL.index(part)] if part in SPECIAL else [3 + byte for byte in part.encode()]


def _write(folder: pathlib.Path, odds: Mapping[int, Mapping[int, float]]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    gain = math.sqrt(WIDTH)  # what the final norm makes of a one-hot row
    head = np.zeros((WIDTH, WIDTH), np.float32)
    for current, following in odds.items():
        for token, probability in following.items():
            head[token, current] = (math.log(probability) + 20) / gain
    square, ones = np.zeros((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": np.eye(WIDTH, dtype=np.float32),
        "lm_head.weight": head,
        "model.norm.weight": ones,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
    }
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ):
        tensors[f"{layer}{name}.weight"] = square
    save_file({name: np.array(value) for name, value in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": WIDTH,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    letters = _byte_letters()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={
                **{text: index for index, text in enumerate(SPECIAL)},
                **{letter: 3 + byte for byte, letter in enumerate(letters)},
            },
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
