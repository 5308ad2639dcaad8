"""A model whose tokens bring their own blank, as SentencePiece's do: its streams are what transformers decodes, words apart."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import tiny_model
from maga_transformer import LLM
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

PROMPTS = ["the engine reads", " a model", "One day", "x\n y", "naïve café"]
NEW_TOKENS = 40


def write(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, max_token_length=8
    )
    text = [word for line in Path(__file__).read_text(encoding="utf-8").splitlines() for word in line.split()]
    tokenizer.train_from_iterator(text, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in bytes_]  # bytes are no text
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tiny_model("llama", folder, vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_hidden_layers=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": False}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("sentencepiece-like")
    write(folder)
    with LLM(folder, max_seq_len=128, kv_cache_mem_mb=16, act_type="fp32") as llm:
        yield llm, PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_streams(prompt: str, skip: bool, model: tuple[LLM, Any]) -> None:
    """transformers #28776, #22710: the blank of the very first token is left out, no other."""
    llm, expected = model
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 5.0, "random_seed": 3, "ignore_eos": True, "skip_special_tokens": skip}
    result = llm.generate(prompt, **options)
    assert len(result.token_ids) == NEW_TOKENS
    wanted = expected.decode(result.token_ids, skip_special_tokens=skip)
    assert "".join(llm.stream(prompt, **options)) == result.text == wanted
    blanks = sum(token.startswith("▁") for token in expected.convert_ids_to_tokens(result.token_ids[1:]))
    assert wanted.count(" ") >= blanks > 0


def test_one_token_at_a_time(model: tuple[LLM, Any]) -> None:
    """Each of them is an output by itself, of the tokens so far as its prompt."""
    llm, expected = model
    assert "".join(llm.tokenizer.decode([token]) for token in llm.tokenizer.encode("a model reads")) != "a model reads"
    ids = llm.tokenizer.encode(PROMPTS[0])
    whole = llm.generate(ids, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    for token in whole.token_ids:
        result = llm.generate(ids, max_new_tokens=1, temperature=0, ignore_eos=True)
        assert (result.token_ids, result.text) == ([token], expected.decode([token], skip_special_tokens=True))
        ids.append(token)
