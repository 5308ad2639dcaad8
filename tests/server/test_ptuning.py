"""Tuned prompts through the library and the server: the text that PEFT's definition gives, and nothing of the virtual tokens in
what a client sees."""

import shutil
from pathlib import Path

import pytest
import torch
from folders import tiny_model
from maga_transformer import LLM
from maga_transformer.config import Config, ConfigError
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
