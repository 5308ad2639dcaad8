"""The library, and text through the whole engine on models that follow a script."""

import collections
import threading

import pytest
from maga_transformer import LLM
from maga_transformer.config import ConfigError
from maga_transformer.request import Fault, RequestError
from tokenizers import AddedToken, Tokenizer

from .chain_model import END, write_chain, write_odds
from .conftest import demo_model


@pytest.fixture(scope="module")
def llm():
    with LLM(demo_model(), max_seq_len=512, kv_cache_mem_mb=128) as model:
        yield model


def test_generate(llm):
    result = llm.generate("1 2 3 4 5 6", max_new_tokens=6, temperature=0)
    assert result.text.startswith(" 7 8") and result.finish_reason == "length" and len(result.token_ids) == 6
    assert result.usage.output_tokens == 6 and result.usage.prompt_tokens == len(llm.tokenizer.encode("1 2 3 4 5 6"))
    assert result.text == llm.tokenizer.decode(result.token_ids) and result.logprobs is None
    several = llm.generate(["1 2 3 4 5 6", "Hello"], max_new_tokens=6, temperature=0)
    assert several[0].text == result.text and len(several) == 2
    ids = llm.tokenizer.encode("1 2 3 4 5 6")
    assert llm.generate(ids, max_new_tokens=6, temperature=0).text == result.text
    assert [each.text for each in llm.generate([ids, ids], max_new_tokens=6, temperature=0)] == [result.text] * 2
    assert llm.generate([]) == []


def test_logprobs(llm):
    result = llm.generate("1 2 3 4 5 6", max_new_tokens=4, temperature=0, logprobs=2)
    for entry, token in zip(result.logprobs, result.token_ids, strict=True):
        assert entry.token_id == token == entry.top[0][0] and entry.logprob == entry.top[0][1] and len(entry.top) == 2


def test_several_sequences(llm):
    result = llm.generate("Once", max_new_tokens=5, temperature=1.5, random_seed=1, num_return_sequences=4)
    assert len(result.others) == 3 and len({result.text, *(other.text for other in result.others)}) > 1


def test_stream(llm):
    pieces = list(llm.stream("1 2 3 4 5 6", max_new_tokens=6, temperature=0))
    assert len(pieces) > 1 and "".join(pieces) == llm.generate("1 2 3 4 5 6", max_new_tokens=6, temperature=0).text


def test_leaving_a_stream_cancels_it(llm):
    for _ in llm.stream("Once upon a time", max_new_tokens=450, ignore_eos=True):
        break
    llm.generate("a", max_new_tokens=1)
    for _ in range(200):
        stats = llm._runtime.engine.stats()
        if stats["running"] == 0:
            break
        threading.Event().wait(0.02)
    assert stats["running"] == stats["pages_live"] == 0 and stats["cancelled"] >= 1


def test_chat(llm):
    assert llm.chat([{"role": "user", "content": "Say hello."}], max_new_tokens=8, temperature=0).text


def test_from_several_threads(llm):
    expected = llm.generate("1 2 3 4 5 6", max_new_tokens=6, temperature=0).text
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate("1 2 3 4 5 6", max_new_tokens=6, temperature=0).text))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 8


def test_mistakes_are_named(llm):
    with pytest.raises(RequestError, match="temperature=-1"):
        llm.generate("a", temperature=-1)
    with pytest.raises(RequestError, match="tempratur"):
        llm.generate("a", tempratur=1)
    with pytest.raises(RequestError, match="512 tokens"):
        llm.generate("word " * 600)
    with pytest.raises(RequestError, match="yield_generator"):
        llm.generate("a", yield_generator=True)
    with pytest.raises(ConfigError, match="max_seq_len"):
        LLM(demo_model(), max_seq_length=5)
    with pytest.raises(FileNotFoundError):
        LLM("/nowhere")


def test_after_close_calls_are_refused():
    model = LLM(demo_model(), max_seq_len=128, kv_cache_mem_mb=16)
    model.close()
    model.close()
    with pytest.raises(RequestError):
        model.generate("a")


def test_the_operators_stop_words_and_defaults(tmp_path):
    """Beside the request's own; with force_stop_words they replace the end-of-text token."""
    chain = write_chain(tmp_path / "model", ("Q", "abcdef", END, "gh", "<|im_end|>"))
    small = {"max_seq_len": 64, "kv_cache_mem_mb": 16}

    def text(sampling=None, **settings):
        with LLM(chain, **small, **settings) as model:
            return model.generate("Q", **{"temperature": 0, "max_new_tokens": 20, **(sampling or {})}).text

    assert text() == "abcdef"
    assert text(stop_words_str=["de"]) == text({"stop_words_str": ["de"]}) == "abc"
    assert text(stop_words_list=[[3 + ord("c"), 3 + ord("d")]]) == "ab"
    assert text({"max_new_tokens": 8}, force_stop_words_str=["h"]) == "abcdefg"
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 3, "transformers_version": "x"}')
    with LLM(chain, generation_config_path=str(tmp_path), **small) as model:
        assert model.generate("Q").text == "abc" and model.generate("Q", max_new_tokens=2).text == "ab"


@pytest.mark.parametrize("fault", ["nan:forward:1", "throw:forward:1", "throw:sample:1"])
def test_a_failed_step_fails_its_request_only(tmp_path, fault):
    chain = write_chain(tmp_path / "model", ("Q", "abc", END))
    with LLM(chain, max_seq_len=64, kv_cache_mem_mb=16, fault=fault) as model:
        with pytest.raises(RequestError) as error:
            model.generate("Q", temperature=0)
        assert error.value.fault is Fault.execution and error.value.message
        assert model.generate("Q", temperature=0).text == "abc"


def test_a_concurrency_limit(tmp_path):
    chain = write_chain(tmp_path / "model", ("Q", "a"))
    # Slow steps: the first job must still run when the second one comes.
    with LLM(chain, max_seq_len=64, kv_cache_mem_mb=16, concurrency_limit=1, fault="slow:forward:1000") as model:
        first = model.stream("Q", max_new_tokens=60, ignore_eos=True, temperature=0)
        next(first)
        with pytest.raises(RequestError, match="CONCURRENCY_LIMIT"):
            model.generate("Q")
        first.close()


def _follow(tmp_path, *chain, **sampling):
    settings = {"max_seq_len": 128, "kv_cache_mem_mb": 16}
    with LLM(write_chain(tmp_path / "model", chain), **settings) as model:
        options = {"max_new_tokens": 40, "temperature": 0, **sampling}
        pieces = list(model.stream(chain[0], **options))
        result = model.generate(chain[0], **options)
        assert "".join(pieces) == result.text
        return result, pieces


def test_characters_of_several_tokens(tmp_path):
    result, pieces = _follow(tmp_path, "Q", "ab😀cd한", END)
    assert result.text == "ab😀cd한" and result.finish_reason == "stop"
    assert not any("\ufffd" in piece for piece in pieces) and "😀" in pieces


def test_a_character_cut_by_the_limit(tmp_path):
    result, _ = _follow(tmp_path, "Q", "ab😀cd", END, max_new_tokens=4)
    assert result.text == "ab\ufffd" and result.finish_reason == "length"


def test_a_stop_string_of_several_tokens_inside_a_character_run(tmp_path):
    result, _ = _follow(tmp_path, "Q", "ab😀cd", END, stop_words_str=["😀"])
    assert result.text == "ab" and result.finish_reason == "stop"


def test_bytes_that_never_become_text(tmp_path):
    result, _ = _follow(tmp_path, "Q", 0xF0, 0x9F, "a", 0x80, "b", 0xED, 0xA0, "c", 0xFF, "d", END)
    assert result.text == "\ufffda\ufffdb\ufffd\ufffdc\ufffdd"


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_a_stop_string(tmp_path, skip):
    result, _ = _follow(
        tmp_path, "Q", "a", "<|im_end|>", "bc", END, stop_words_str=["<|im_end|>"], ignore_eos=True, skip_special_tokens=skip
    )
    assert result.text == "a" and result.finish_reason == "stop"


def test_a_stop_string_made_of_single_bytes(tmp_path):
    result, pieces = _follow(tmp_path, "Q", "a<|im_end", END, stop_words_str=["<|im"])
    assert result.text == "a" and not any("<" in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
def test_added_tokens_that_are_not_special_get_no_blanks(tmp_path, skip):
    folder = write_chain(tmp_path / "model", ["Q", 256, "ok", 257, "1", END])  # ids behind the bytes
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")]) == 2
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(folder, max_seq_len=128, kv_cache_mem_mb=16) as model:
        options = {"max_new_tokens": 20, "temperature": 0, "skip_special_tokens": skip, "stop_words_list": [[0]]}
        assert model.generate("Q", **options).text == "".join(model.stream("Q", **options)) == "<think>ok</think>1"


def test_min_new_tokens_passes_a_stop(tmp_path):
    result, _ = _follow(tmp_path, "Q", "abcdefgh", END, stop_words_str=["bc"], min_new_tokens=5)
    assert result.text == "abcdefgh"


def test_samples_of_one_prompt_are_independent(tmp_path):
    odds = {"a": 0.7, "b": 0.2, "c": 0.1}
    with LLM(write_odds(tmp_path / "model", "Q", odds), max_seq_len=64, kv_cache_mem_mb=64, max_num_seqs=400) as model:

        def draw(**sampling):
            result = model.generate("Q", max_new_tokens=1, top_p=1.0, num_return_sequences=400, **sampling)
            return [result.text, *(other.text for other in result.others)]

        first = draw(random_seed=7)
        assert first == draw(random_seed=7) and first != draw(random_seed=8)
        counts = collections.Counter(first)
        chi_square = sum((counts[text] - 400 * odd) ** 2 / (400 * odd) for text, odd in odds.items())
        assert set(counts) == set(odds) and chi_square < 13.8  # p = 0.001 with two degrees of freedom
