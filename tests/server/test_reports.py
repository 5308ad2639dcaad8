"""What users of other servers have reported, tried over HTTP on models that play a script. Each test names the report."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, Tokenizer

from .chain_model import END, write_chain, write_odds, write_random
from .conftest import running_server

THINK, THOUGHT = 256, 257  # bytes that there are not: the ids behind the vocabulary's
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def with_added_tokens(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    chains = (["Qab😀cd한", END], ["Rx", "<|im_end|>", "yz"], ["Sw<|im_e", 0], ["T", THINK, "ok", THOUGHT, "1", END])
    folder = with_added_tokens(write_chain(tmp_path_factory.mktemp("reports") / "script", *chains))
    with running_server(folder, CHAT_TEMPLATE=TEMPLATE, MAX_NUM_SEQS="8") as server:
        yield server


@pytest.fixture(scope="module")
def odds(tmp_path_factory):
    folder = write_odds(tmp_path_factory.mktemp("reports") / "odds", "Q", {"a": 0.7, "b": 0.2, "c": 0.1})
    with running_server(folder, MAX_NUM_SEQS="200", CHAT_TEMPLATE="{{ messages[0].content }}") as server:
        yield server


def strict(text):
    """JSON has no NaN and no infinities."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def complete(server, prompt, **fields):
    answer = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    return strict(answer.text)["choices"][0]


def streamed(server, prompt, **fields):
    """The pieces of text, and the last choice."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "stream": True, **fields}
    with server.stream("/v1/completions", body) as answer:
        events = [strict(event[6:]) for event in answer.read().decode().split("\n\n") if event.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    return [choice["text"] for choice in choices if choice["text"]], choices[-1]


def test_a_character_of_several_tokens_is_never_split(script):
    """llama.cpp #4036."""
    for fields, text in (({}, "ab😀cd한"), ({"max_tokens": 4}, "ab\ufffd"), ({"stop": ["😀"]}, "ab")):
        whole = complete(script, "Q", **fields)
        pieces, last = streamed(script, "Q", **fields)
        assert "".join(pieces) == whole["text"] == text and last["finish_reason"] == whole["finish_reason"]
        assert fields.get("max_tokens") or not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text(tmp_path):
    """unslothai/llama.cpp PR #202; sglang #32290: values of pieces of characters keep keys of their own."""
    folder = write_chain(tmp_path / "bytes", ["Q", 0xF0, 0x9F, "a", 0x80, "b", 0xED, 0xA0, "c", 0xFF, "d", END])
    with running_server(folder, CHAT_TEMPLATE="{{ messages[0].content }}") as server:
        text = "\ufffda\ufffdb\ufffd\ufffdc\ufffdd"
        whole = complete(server, "Q", logprobs=2)
        assert whole["text"] == text == "".join(streamed(server, "Q", logprobs=2)[0])
        scores = whole["logprobs"]
        assert scores["tokens"][:3] == ["bytes:\\xf0", "bytes:\\x9f", "a"]
        for token, value, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
            assert len(top) >= 2 and top[token] == value == max(top.values())
        body = {"messages": [{"role": "user", "content": "Q"}], "temperature": 0, "logprobs": True, "top_logprobs": 1}
        chat = strict(server.post("/v1/chat/completions", body).text)["choices"][0]
        assert chat["message"]["content"] == text
        assert [entry["bytes"] for entry in chat["logprobs"]["content"]][:4] == [[0xF0], [0x9F], [97], [0x80]]


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_a_stop_string(script, skip):
    """lmdeploy #1047, vllm #792."""
    asked = {"ignore_eos": True, "skip_special_tokens": skip, "max_tokens": 8}
    for prompt, stop, text in (("R", "<|im_end|>", "x"), ("S", "<|im", "w")):
        assert complete(script, prompt, stop=[stop], **asked)["text"] == text
        pieces, last = streamed(script, prompt, stop=[stop], **asked)
        assert "".join(pieces) == text and last["finish_reason"] == "stop" and last["stop_reason"] == stop
    kept = complete(script, "R", stop=["<|im_end|>"], include_stop_str_in_output=True, **asked)
    assert kept["text"] == "x<|im_end|>"


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}, {"spaces_between_special_tokens": False}])
def test_added_tokens_get_no_blanks_around_them(script, fields):
    """vllm #33457."""
    assert complete(script, "T", **fields)["text"] == "<think>ok</think>1"
    assert "".join(streamed(script, "T", **fields)[0]) == "<think>ok</think>1"


def test_a_template_that_refuses_is_quoted(script):
    """sglang #892."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Q"}]
    answer = script.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400 and "System role not supported" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert script.post("/v1/messages", {"messages": messages[1:], "system": "a", "max_tokens": 1}).status_code == 400
    assert script.post("/v1/chat/completions", {"messages": messages[1:], "max_tokens": 1}).status_code == 200


def test_ids_outside_the_vocabulary_harm_nobody(odds):
    """vllm #54195."""
    fields = {"max_tokens": 32, "temperature": 1, "seed": 1, "logprobs": 3, "min_tokens": 8, "ignore_eos": True}
    alone = complete(odds, "Q", **fields)
    bad = [{"stop_token_ids": [151645]}, {"allowed_token_ids": [-1]}, {"logit_bias": {"400": 1}}]
    raw = [{"bad_words_list": [[151645]]}, {"stop_words_list": [[151645]]}]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(complete, odds, "Q", **fields) for _ in range(3)]
        refused = [(pool.submit(odds.post, "/v1/completions", {"prompt": "Q", **fields, **each}), each) for each in bad]
        refused += [(pool.submit(odds.post, "/", {"prompt": "Q", "min_new_tokens": 8, **each}), each) for each in raw]
        for answer, each in refused:
            assert answer.result().status_code == 400 and next(iter(each)) in answer.result().text
        assert all(choice.result() == alone for choice in running)


def test_many_choices_of_one_prompt(odds):
    """exllamav2 #186: one random number for all rows."""
    body = {"prompt": "Q", "n": 200, "max_tokens": 1, "temperature": 1, "seed": 7}
    answer = odds.post("/v1/completions", body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    counts = {text: texts.count(text) for text in "abc"}
    chi_square = sum((counts[text] - 200 * odd) ** 2 / (200 * odd) for text, odd in {"a": 0.7, "b": 0.2, "c": 0.1}.items())
    assert sum(counts.values()) == 200 and chi_square < 13.8  # p = 0.001 with two degrees of freedom
    assert [choice["index"] for choice in answer["choices"]] == list(range(200)) and answer["usage"]["prompt_tokens"] == 1
    assert [choice["text"] for choice in odds.post("/v1/completions", body).json()["choices"]] == texts
    raw = odds.post("/", {"prompt": "Q", "num_return_sequences": 200, "max_new_tokens": 1, "top_p": 1.0, "random_seed": 7}).json()
    assert raw["response"] == texts
    one = {**body, "n": 1, "seed": None}
    with ThreadPoolExecutor(16) as pool:
        texts = [
            answer.json()["choices"][0]["text"] for answer in pool.map(lambda _: odds.post("/v1/completions", one), range(200))
        ]
    assert set(texts) == set("abc") and 100 < texts.count("a") < 180  # six standard deviations: nothing is seeded here


def test_more_log_probabilities_than_tokens_that_survive(odds):
    """sonar #183, sglang #5984: -inf in the answer. Values are of the model, before temperature and filters."""
    for fields in ({"top_k": 1}, {"top_p": 0.01}, {"allowed_token_ids": [3 + 97, 3 + 98]}, {"guided_regex": "a|b"}):
        choice = complete(odds, "Q", temperature=0.01, max_tokens=1, logprobs=5, **fields)
        (top,) = choice["logprobs"]["top_logprobs"]
        assert len(top) == 5 and choice["text"] == "a"
        assert top["a"] == choice["logprobs"]["token_logprobs"][0] == pytest.approx(-0.3567, abs=1e-3)
        body = {"messages": [{"role": "user", "content": "Q"}], "logprobs": True, "top_logprobs": 20}
        answer = odds.post("/v1/chat/completions", {**body, "temperature": 0.01, "max_tokens": 1, **fields})
        (entry,) = strict(answer.text)["choices"][0]["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 20 and entry["logprob"] == pytest.approx(-0.3567, abs=1e-3)


def test_a_stop_string_of_several_tokens_on_the_raw_route(server):
    """vllm #3574: nothing of it may be seen in a stream. The greedy tokens are DEF, GH, I, J."""
    body = {"prompt": "Here is the English alphabet: ABC", "top_k": 1, "max_new_tokens": 12, "yield_generator": True}

    def stream(**fields):
        with server.stream("/", {**body, **fields}) as answer:
            events = answer.read().decode().split("\r\n\r\n")[:-2]
        return [json.loads(event.removeprefix("data:"))["response"] for event in events]

    assert set(stream(stop_words_str=["DEFGHIJ"])) == {""}
    free = stream()[-1]
    assert stream(stop_words_str=["DEFGHIJX"])[-1] == free and free.startswith("DEFGHIJ")
    assert "".join(stream(stop_words_str=["DEFGHIJX"], return_incremental=True)) == free


def test_banned_words_of_several_tokens(server):
    """vllm #23886: with and without a blank before them, and one that has several tokens bans its last one only."""
    prompt = "Count: one, two, three,"
    asked = {"max_tokens": 24, "temperature": 0}
    free = complete(server, prompt, **asked)["text"]
    assert " four" in free and " seven" in free
    banned = complete(server, prompt, bad_words=["four", "seven"], **asked)["text"]
    assert "four" not in banned and "seven" not in banned
    assert complete(server, prompt, bad_words=["four hundred"], **asked)["text"] == free


def test_limits_of_new_tokens(server):
    """lmdeploy #1589, vllm #33418: a limit beyond the context is cut to what fits; -1 is none."""
    body = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
    for limit in (1, 5, 4096, 8191, 10**9, -1):
        answer = server.post("/v1/chat/completions", {**body, "max_tokens": limit}).json()
        choice, used = answer["choices"][0], answer["usage"]["completion_tokens"]
        assert choice["message"]["content"] and (limit < 0 or used <= limit)
        assert choice["finish_reason"] == ("length" if used == limit else "stop")
    endless = {"prompt": [1] * 200, "ignore_eos": True}
    for limit, total in ((-1, 256), (100, 256), (None, 216)):  # of OpenAI's completions alone the default is 16
        answer = server.post("/v1/completions", {**endless, "max_tokens": limit}).json()
        assert answer["usage"]["total_tokens"] == total and answer["choices"][0]["finish_reason"] == "length"
    unlimited = {"messages": [{"role": "user", "content": "word " * 200}], "ignore_eos": True}
    assert server.post("/v1/chat/completions", unlimited).json()["usage"]["total_tokens"] == 256
    for limit in (0, -2, 1.5, "5", True):
        for name in ("max_tokens", "max_completion_tokens"):
            refused = server.post("/v1/chat/completions", {**body, name: limit})
            assert refused.status_code == 400 and name in refused.json()["error"]["message"], (name, limit)
        refused = server.post("/v1/completions", {**endless, "max_tokens": limit})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens", limit


def test_a_seed_decides_whoever_else_runs(server):
    """vllm #51226: beside outputs without a seed, with another, beside many, and from the prefix cache."""
    prompt = "Once upon a time a child went to the sea, and at the sea it found a boat without an owner. The child"
    seeded = {"prompt": prompt, "max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
    cached = [server.post("/v1/completions", {**seeded, "seed": 42}).json() for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in cached] == [0, 16]

    def texts(*others):
        with ThreadPoolExecutor(len(others) + 1) as pool:
            running = [pool.submit(complete, server, **seeded, **other) for other in others]
            text = pool.submit(complete, server, **seeded, seed=42).result()["text"]
            return text, {each.result()["text"] for each in running}

    alone, _ = texts()
    assert [answer["choices"][0]["text"] for answer in cached] == [alone] * 2
    for others in [({},)] * 4 + [({"seed": 7},), ({},) * 30]:
        text, rest = texts(*others)
        assert text == alone and alone not in rest


def test_the_first_answer_to_a_prompt_is_that_of_later_ones(server):
    """vllm #40896, #5543: prompts of 15 to 33 tokens that share their beginning, four at once, then again from the cache, of
    which a whole prompt's last page is not taken; whoever asks for the prompt's own values has all of it computed."""
    ids = server.post("/tokenize", {"prompt": "one two three four five six seven eight nine ten " * 4}).json()["tokens"]

    def ask(length):
        return complete(server, ids[:length], max_tokens=8, logprobs=1, echo=length in echoed, ignore_eos=True)

    echoed = (15, 32, 33)
    lengths = [length for length in (15, 16, 17, 31, 32, 33) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        first = dict(zip(lengths, pool.map(ask, lengths), strict=True))
        for length, choice in zip(lengths * 2, pool.map(ask, lengths * 2), strict=True):
            assert choice["text"] == first[length]["text"] and choice["logprobs"] == first[length]["logprobs"], length
    for length, expected in ((15, 0), (16, 0), (17, 16), (32, 16), (33, 32)):
        usage = server.post("/v1/completions", {"prompt": ids[:length], "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected, length


def test_values_of_a_prompt_in_chunks(tmp_path):
    """vllm PR #29071: eight prompts of 150 tokens in chunks of 16, in pages that do not suffice for all, beside each alone."""
    folder = write_random(tmp_path / "random", context=512)
    ids = [3 + (i * 37 + 5) % 256 for i in range(150)]
    asked = {"echo": True, "logprobs": 2, "max_tokens": 200, "ignore_eos": True}
    settings = {
        "LOAD_FORMAT": "dummy",
        "CHAT_TEMPLATE": "plain",
        "ACT_TYPE": "fp32",
        "THREADS": "1",
        "MAX_NUM_SEQS": "8",
        "MAX_SEQ_LEN": "512",
    }

    def scores(server, i):
        found = complete(server, ids[i:] + ids[:i], **asked)["logprobs"]
        assert found["token_logprobs"][0] is None and len(found["token_logprobs"]) == len(found["top_logprobs"]) == 350
        return found

    with running_server(folder, **settings) as server:
        alone = [scores(server, i) for i in range(8)]
    with (
        running_server(folder, **settings, MAX_NUM_BATCHED_TOKENS="16", KV_CACHE_MEM_MB="1") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        for found, expected in zip(pool.map(lambda i: scores(server, i), range(8)), alone, strict=True):
            assert found["tokens"] == expected["tokens"]
            assert found["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=1e-4)
        assert server.gauges()["maga_num_preemptions_total"] > 0
