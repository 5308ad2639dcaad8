"""Tuned prompts through the library and the server: the text that PEFT's definition gives, and nothing of the virtual tokens in
what a client sees."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from folders import tiny_model
from maga_transformer import LLM, _core
from maga_transformer.adapters.ptuning import open_ptuning
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.config import Config, ConfigError
from maga_transformer.loader import load_weights
from maga_transformer.models import build_program
from maga_transformer.request import RequestError
from maga_transformer.startup import load_runtime
from peft_folders import write_prompt

from .chain_model import WIDTH, write_chain
from .conftest import running_server

VIRTUAL = 21
PROMPTS = ([5, 9, 200, 31, 7], list(range(40, 79)), [3])
NEW = 12


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, torch.Tensor]:
    folder = tmp_path_factory.mktemp("tuned")
    model = tiny_model("llama", folder, vocab_size=WIDTH, tie_word_embeddings=True, eos_token_id=0)
    chain = write_chain(folder.parent / "chain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(chain / name, folder)
    prompt = torch.randn(VIRTUAL, 48, generator=torch.Generator().manual_seed(2)) * 0.3
    write_prompt(folder / "ptuning", prompt)
    return folder, model, prompt


def greedy(model: torch.nn.Module, prompt: torch.Tensor | None, ids: list[int], penalty: float = 1.0) -> list[int]:
    """PEFT's definition; a penalty sees the ids only."""
    found = list(ids)
    for _ in range(NEW):
        with torch.no_grad():
            embedded = model.get_input_embeddings()(torch.tensor([found]))
            before = embedded[:, :0] if prompt is None else prompt[None]
            logits = model(inputs_embeds=torch.cat([before, embedded], dim=1)).logits[0, -1]
        seen = torch.tensor(sorted(set(found)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        found.append(int(logits.argmax()))
    return found[len(ids) :]


SETTINGS = {"act_type": "fp32", "kv_cache_mem_mb": 16, "threads": 1}
GREEDY = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("more", [{}, {"reuse_cache": False}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}])
def test_library(tuned, more):
    folder, model, prompt = tuned
    wanted = [greedy(model, prompt, ids) for ids in PROMPTS]
    assert wanted != [greedy(model, None, ids) for ids in PROMPTS]
    with LLM(folder, **SETTINGS, **more) as llm:
        for _ in range(2):
            results = llm.generate([list(ids) for ids in PROMPTS], **GREEDY)
            assert [result.token_ids for result in results] == wanted
            assert [result.usage.prompt_tokens for result in results] == [5, 39, 1]
        pages = 0 if more.get("reuse_cache") is False else (VIRTUAL + 38) // 16 * 16
        assert [result.usage.cached_tokens for result in results] == [0, max(0, pages - VIRTUAL), 0]
        penalised = llm.generate(list(PROMPTS[1]), **GREEDY, repetition_penalty=1.5, logprobs=3)
        assert penalised.token_ids == greedy(model, prompt, PROMPTS[1], 1.5)
        assert len(penalised.logprobs) == NEW and all(0 <= i < WIDTH for entry in penalised.logprobs for i, _ in entry.top)
        several = llm.generate(list(PROMPTS[0]), max_new_tokens=NEW, temperature=1.0, random_seed=3, num_return_sequences=3)
        assert len({tuple(each.token_ids) for each in [several, *several.others]}) == 3
        assert all(0 <= token < WIDTH for each in [several, *several.others] for token in each.token_ids)
        context = 256 - VIRTUAL
        assert llm._runtime.description.context == context
        whole = llm.generate([7] * (context - 2), **GREEDY)
        assert len(whole.token_ids) == 2 and whole.finish_reason == "length"
        with pytest.raises(RequestError, match=f"maximum context length is {context} tokens"):
            llm.generate([7] * context, **GREEDY)
        with pytest.raises(RequestError, match=f"prompt.0.={WIDTH}: outside the vocabulary"):
            llm.generate([WIDTH], **GREEDY)


def greedy_with_past(model: torch.nn.Module, prefix: torch.Tensor, ids: list[int]) -> list[int]:
    """`prefix`: (tokens, layers, 2, K/V heads, head_dim)"""
    found = list(ids)
    for _ in range(NEW):
        cache = transformers.DynamicCache()
        for i in range(prefix.shape[1]):
            cache.update(*(prefix[:, i, half].transpose(0, 1)[None].contiguous() for half in (0, 1)), i)
        with torch.no_grad():
            found.append(int(model(torch.tensor([found]), past_key_values=cache).logits[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("tokens", [16, 21, 5])
@pytest.mark.parametrize("more", [{}, {"reuse_cache": False}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}])
def test_keys_and_values(tuned, more, tokens, tmp_path):
    """Pages of a prefix are shared; what follows is found in the prefix cache."""
    folder, model, _ = tuned
    prefix = torch.randn(tokens, 3, 2, 2, 12, generator=torch.Generator().manual_seed(8))
    ptuning = write_prompt(tmp_path / "prefix", prefix.flatten(1), peft_type="PREFIX_TUNING")
    wanted = [greedy_with_past(model, prefix, ids) for ids in PROMPTS]
    assert wanted != [greedy(model, None, ids) for ids in PROMPTS]
    cached = 0 if more.get("reuse_cache") is False else (tokens + 38) // 16 * 16 - tokens
    with LLM(folder, **SETTINGS, **more, ptuning_path=str(ptuning)) as llm:
        for reuse, found in ((True, 0), (True, cached), (False, 0)):  # the last under a salt of its own
            results = llm.generate([list(ids) for ids in PROMPTS], **GREEDY, reuse_cache=reuse)
            assert [result.token_ids for result in results] == wanted
            assert [result.usage.prompt_tokens for result in results] == [5, 39, 1]
            assert [result.usage.cached_tokens for result in results] == [0, found, 0]
        assert llm._runtime.engine.stats()["pages_live"] == -(-tokens // 16)
        several = llm.generate(list(PROMPTS[0]), **GREEDY, num_return_sequences=3)
        assert [each.token_ids for each in [several, *several.others]] == [wanted[0]] * 3
        assert llm._runtime.description.context == 256 - tokens
        whole = llm.generate([7] * (256 - tokens - 2), **GREEDY)
        assert len(whole.token_ids) == 2 and whole.finish_reason == "length"


def test_keys_and_values_in_few_pages(tuned, tmp_path):
    """Sequences that lose their pages begin with the prefix again."""
    folder, model, _ = tuned
    prefix = torch.randn(21, 3, 2, 2, 12, generator=torch.Generator().manual_seed(8))
    ptuning = write_prompt(tmp_path / "prefix", prefix.flatten(1), peft_type="PREFIX_TUNING")
    prompts = [[10 * i + 1, 5, 9] for i in range(6)]
    checkpoint, backend = open_checkpoint(str(folder)), _core.reference_backend()
    program, _ = build_program(checkpoint)
    limits = {"tokens": 32, "sequences": 6, "logit_rows": 6, "pages": 12, "page_tokens": 4, "kv_dtype": "fp32"}
    executable = backend.load(program, load_weights(backend, program, checkpoint), **limits)
    read = open_ptuning(str(ptuning))
    read.fill(executable, program)
    ids = list(range(program.vocab, program.vocab + 21))
    options = {"max_sequences": 6, "token_budget": 32, "max_queue": 9, "prefix": ids, "prefix_in_pages": True}
    engine = _core.Engine(backend, executable, **options)
    params = _core.SamplingParams(max_new_tokens=9, temperature=0.0)
    texts = [greedy_with_past(model, prefix, ids)[:9] for ids in prompts]
    for _ in range(100):  # until they have come close enough together
        wanted = {engine.submit(np.array(ids, np.int32), params): text for ids, text in zip(prompts, texts, strict=True)}
        found: dict[int, list[int]] = {request: [] for request in wanted}
        running = len(wanted)
        while running:
            for event in engine.poll():
                found[event.request] += event.tokens
                running -= bool(event.finish)
        assert found == wanted and engine.stats()["pages_live"] == 6
        if engine.stats()["preemptions"] > 0:
            break
    assert engine.stats()["preemptions"] > 0
    with pytest.raises(ValueError, match="must have fewer than 23"):
        engine.submit(np.zeros(23, np.int32), params)
    small = backend.load(program, load_weights(backend, program, checkpoint), **{**limits, "pages": 6})
    with pytest.raises(ValueError, match="a prefix of 21 tokens leaves no room"):
        _core.Engine(backend, small, **options)


def test_a_folder_by_name(tuned, tmp_path):
    folder, model, _ = tuned
    other = torch.randn(3, 48, generator=torch.Generator().manual_seed(5)) * 0.3
    with LLM(folder, **SETTINGS, ptuning_path=str(write_prompt(tmp_path / "other", other))) as llm:
        assert llm.generate(list(PROMPTS[0]), **GREEDY).token_ids == greedy(model, other, PROMPTS[0])


def test_what_does_not_fit_names_the_setting(tuned, tmp_path):
    folder = tuned[0]

    def load(prompt: torch.Tensor, **settings: object) -> None:
        path = write_prompt(tmp_path / "p", prompt)
        load_runtime(Config.without_environment(checkpoint_path=str(folder), ptuning_path=str(path), **SETTINGS, **settings))

    with pytest.raises(ConfigError, match=r"PTUNING_PATH=.*width 32, the model 48"):
        load(torch.zeros(3, 32))
    with pytest.raises(ConfigError, match=r"PTUNING_PATH: 256 virtual tokens leave none of the model's 256 positions"):
        load(torch.zeros(256, 48))
    with pytest.raises(ConfigError, match=r"MAX_SEQ_LEN=240: .*256 positions, 20 of them .*PTUNING_PATH.*valid: 1 to 236"):
        load(torch.zeros(20, 48), max_seq_len=240)


def test_server(tuned):
    ids = PROMPTS[1]
    with running_server(tuned[0], ACT_TYPE="fp32", MAX_SEQ_LEN="200", KV_CACHE_MEM_MB="16") as server:
        assert any("21 virtual tokens from" in line for line in server.lines)
        body = {"prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "echo": True}
        for cached in (0, 27):
            answer = server.post("/v1/completions", body).json()
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (39, NEW, 39 + NEW)
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert answer["choices"][0]["text"].startswith(bytes(token - 3 for token in ids).decode())
        raw = server.raw("abc", max_new_tokens=4, top_k=1, return_input_ids=True)
        assert raw["input_ids"] == [[100, 101, 102]] and raw["aux_info"]["input_len"] == 3
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 200
        assert server.gauges()["maga_prompt_tokens_total"] == 39 + 39 + 3
