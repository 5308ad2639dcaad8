"""The raw route's shapes, against a real server."""

import itertools
import json
import time

import pytest

PROMPT = "The alphabet: a b c d e"
AUX_KEYS = {"cost_time", "iter_count", "prefix_len", "input_len", "reuse_len", "output_len", "cum_log_probs", "beam_responses"}


def events(server, **body):
    """The JSON events of a stream, and whether the end marker came."""
    with server.stream("/", {"yield_generator": True, **body}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        content = answer.read()
    parts = content.split(b"\r\n\r\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data:") for part in parts)
    ended = parts[-1] == b"data:[done]"
    return [json.loads(part[5:]) for part in (parts[:-1] if ended else parts)], ended


def test_single(server):
    answer = server.raw(
        PROMPT, generate_config={"max_new_tokens": 8, "top_k": 1, "return_input_ids": True, "return_output_ids": True}
    )
    assert set(answer) == {"response", "finished", "aux_info", "input_ids", "output_ids"}
    assert isinstance(answer["response"], str) and answer["response"] and answer["finished"] is True
    aux = answer["aux_info"]
    assert set(aux) >= AUX_KEYS
    assert aux["input_len"] == len(answer["input_ids"][0]) and aux["output_len"] == len(answer["output_ids"][0]) == 8
    assert aux["cost_time"] > 0 and aux["cum_log_probs"][0] <= 0 and aux["beam_responses"] == []


def test_cum_log_probs_is_the_sum_over_the_output(server):
    asked = {"prompt": PROMPT, "temperature": 1.5, "seed": 3}
    scores = server.post("/v1/completions", {**asked, "max_tokens": 6, "logprobs": 0, "top_p": 0.95}).json()["choices"][0]
    for aux in (server.raw(**asked, max_new_tokens=6)["aux_info"], events(server, **asked, max_new_tokens=6)[0][-1]["aux_info"]):
        assert aux["cum_log_probs"] == [pytest.approx(sum(scores["logprobs"]["token_logprobs"]))]


def test_the_readme_command(server):
    """As curl sends it: a JSON body under a form's content type."""
    body = '{"prompt": "hello, what is your name", "generate_config": {"max_new_tokens": 5}}'
    answer = server.post("/", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 200 and answer.json()["finished"]


def test_prompt_aliases_and_lists(server):
    greedy = {"max_new_tokens": 4, "top_k": 1}
    expected = server.raw(PROMPT, **greedy)["response"]
    for body in ({"text": PROMPT}, {"prompt": [PROMPT]}, {"prompt": PROMPT, "text": PROMPT}):
        assert server.post("/", {**body, **greedy}).json()["response"] == expected
    batch = server.post("/", {"prompt_batch": [PROMPT], **greedy}).json()
    assert [entry["response"] for entry in batch["response_batch"]] == [expected]
    several = server.post("/", {"prompt": [PROMPT, "1 2 3"], **greedy}).json()
    assert [entry["response"] for entry in several["response_batch"]] == [expected, server.raw("1 2 3", **greedy)["response"]]


def test_top_level_wins_over_nested_and_aliases_work(server):
    answer = server.raw(PROMPT, generate_config={"max_new_tokens": 9, "top_k": 1}, max_new_tokens=3)
    assert answer["aux_info"]["output_len"] == 3
    assert server.raw(PROMPT, generation_config={"gen_length": 2})["aux_info"]["output_len"] == 2
    assert server.raw(PROMPT, generate_config={"max_new_tokens": 2}, max_new_tokens=None)["aux_info"]["output_len"] == 2


def test_several_sequences(server):
    answer = server.raw(PROMPT, max_new_tokens=6, num_return_sequences=3, random_seed=5, temperature=1.5, top_p=1.0)
    assert len(answer["response"]) == len(answer["aux_info"]) == 3 and len(set(answer["response"])) > 1
    assert answer["finished"] is True
    assert server.raw(PROMPT, max_new_tokens=6, num_return_sequences=1)["response"] is not None
    assert isinstance(server.raw(PROMPT, max_new_tokens=6, num_return_sequences=1)["response"], list)
    both = server.post("/", {"prompt_batch": ["a", "b"], "max_new_tokens": 2, "num_return_sequences": 2}).json()
    assert [len(entry["response"]) for entry in both["response_batch"]] == [2, 2]


@pytest.mark.parametrize("incremental", [False, True])
def test_streams(server, incremental):
    whole = server.raw(PROMPT, max_new_tokens=12, top_k=1)["response"]
    found, ended = events(server, prompt=PROMPT, max_new_tokens=12, top_k=1, return_incremental=incremental)
    assert ended and [event["finished"] for event in found] == [False] * (len(found) - 1) + [True]
    texts = [event["response"] for event in found]
    assert ("".join(texts) if incremental else texts[-1]) == whole
    if not incremental:
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_streams_of_several_sequences_end(server):
    """RTP-LLM's PR 191: they never did. Those that have ended repeat, and all are finished in the last event."""
    fields = {"num_return_sequences": 3, "random_seed": 4, "temperature": 1.5, "top_p": 1.0}
    fields |= {"prompt_batch": ["Hello,", PROMPT], "max_new_tokens": 5}
    whole = server.post("/", fields).json()["response_batch"]
    found, ended = events(server, **fields)
    assert ended and [entry["response"] for entry in found[-1]["response_batch"]] == [entry["response"] for entry in whole]
    assert [[entry["finished"] for entry in event["response_batch"]] for event in found][-1] == [True, True]
    assert all(len(entry["aux_info"]) == 3 for event in found for entry in event["response_batch"])


def test_a_streamed_batch_carries_all_entries(server):
    found, ended = events(server, prompt_batch=[PROMPT, "1 2 3"], max_new_tokens=5, top_k=1, return_incremental=True)
    assert ended and all(len(event["response_batch"]) == 2 for event in found)
    joined = ["".join(event["response_batch"][index]["response"] for event in found) for index in range(2)]
    assert joined == [server.raw(prompt, max_new_tokens=5, top_k=1)["response"] for prompt in (PROMPT, "1 2 3")]
    assert all(entry["finished"] for entry in found[-1]["response_batch"])


def test_stop_words(server):
    whole = server.raw("1 2 3 4 5 6", max_new_tokens=16, top_k=1)["response"]
    assert "9" in whole
    before = whole[: whole.index("9")]
    cut = server.raw("1 2 3 4 5 6", max_new_tokens=16, top_k=1, stop_words_str=["9"])
    assert cut["response"] == before and cut["finished"]
    kept = server.raw("1 2 3 4 5 6", max_new_tokens=16, top_k=1, stop_words_str=["9"], print_stop_words=True)
    assert kept["response"] == before + "9"
    nine = server.post("/tokenizer/encode", {"prompt": "9"}).json()["token_ids"]
    by_ids = server.raw("1 2 3 4 5 6", max_new_tokens=16, top_k=1, stop_words_list=[nine], return_output_ids=True)
    assert by_ids["response"] == before and by_ids["output_ids"][0][-len(nine) :] == nine


def test_chat_on_the_raw_route(server):
    messages = [{"role": "user", "content": "Say hello."}]
    greedy = {"max_new_tokens": 8, "top_k": 1}
    expected = server.post("/", {"messages": messages, **greedy}).json()["response"]
    assert expected == server.post("/", {"prompt": messages, **greedy}).json()["response"]
    other = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0}).json()
    assert other["choices"][0]["message"]["content"] == expected


def test_the_prefix_cache_shows(server):
    prompt = "word " * 100
    server.raw(prompt, max_new_tokens=1, top_k=1)
    again = server.raw(prompt, max_new_tokens=1, top_k=1)["aux_info"]
    assert 0 < again["reuse_len"] < again["input_len"]
    assert server.raw(prompt, max_new_tokens=1, top_k=1, reuse_cache=False)["aux_info"]["reuse_len"] == 0


def test_a_seed_repeats_alone_and_in_company(server):
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed):
        return server.raw("Once upon a time", max_new_tokens=12, temperature=0.9, random_seed=seed, top_p=1.0)["response"]

    alone = ask(42)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, [42, None, 7, 42, None, 8, 9, 42, 10, None, 11, 42]))
    assert {together[index] for index in (0, 3, 7, 11)} == {alone}
    assert ask(43) != alone


@pytest.mark.parametrize(
    "field, value",
    [
        ("return_prompt_logits", True),
        ("variable_num_beams", [2, 3]),
        ("task_id", 3),
        ("adapter_name", "a"),
        ("using_hf_sampling", True),
        ("images", ["x.png"]),
        ("urls", ["x.png"]),
        ("functions", [{}]),
    ],
)
def test_known_fields_that_cannot_be_honoured_are_refused_by_name(server, field, value):
    for body in ({field: value}, {"generate_config": {field: value}}):
        if field in ("images", "urls", "functions") and "generate_config" in body:
            continue
        answer = server.post("/", {"prompt": "a", "max_new_tokens": 1, **body})
        assert answer.status_code == 400 and answer.json()["error_code"] == 515 and field in answer.json()["message"]


def test_neutral_values_of_such_fields_are_taken(server):
    from maga_transformer.generate_config import NO_EFFECT, UNSUPPORTED

    fields = {name: neutral[0] for name, neutral in UNSUPPORTED.items() if neutral}
    fields.update(dict.fromkeys(NO_EFFECT, "x"), images=[], urls=[], functions=[], master_info={}, private_request=True)
    assert server.post("/", {"prompt": "a", "max_new_tokens": 1, **fields}).status_code == 200
    assert server.post("/", {"prompt": "a", "max_new_tokens": 1, **dict.fromkeys(UNSUPPORTED, None)}).status_code == 200


def test_an_update_of_adapters_is_refused_by_name(server):
    assert server.post("/update", {"peft_info": {"lora_info": {}}}).json() == {"status": "ok"}
    for body, word in (
        ({"peft_info": {"lora_info": {"a": "/x"}}}, "lora_info={'a': '/x'}"),
        ({"odd": 1}, "odd=1"),
        ({"peft_info": 5}, "peft_info=5"),
    ):
        answer = server.post("/update", body)
        assert answer.status_code == 400 and answer.json()["error_code"] == 601 and word in answer.json()["message"]


def test_increments_need_a_stream(server):
    answer = server.post("/", {"prompt": "a", "return_incremental": True})
    assert answer.status_code == 400 and answer.json()["error_code"] == 507 and "yield_generator" in answer.json()["message"]


def test_a_deadline_ends_the_request(server):
    answer = server.post("/", {"prompt": "Once", "max_new_tokens": 400, "ignore_eos": True, "timeout_ms": 50})
    assert answer.status_code == 504 and answer.json()["error_code"] == 603
    found, ended = events(server, prompt="Once", max_new_tokens=400, ignore_eos=True, timeout_ms=100)
    assert not ended and found[-1]["error_code"] == 603


def test_status_routes(server):
    for path in ("/health", "/status", "/GraphService/cm2_status", "/SearchService/cm2_status", "/frontend_health", "/ping"):
        assert server.get(path).json() == server.post(path).json() == "ok"
    assert server.post("/health_check").json() == "ok"
    assert server.get("/").json() == {"status": "home"}
    status = server.get("/worker_status").json()
    assert (
        status["alive"] is True
        and status["available_concurrency"] > 0
        and status["total_kv_cache"] >= status["available_kv_cache"] > 0
        and status["frontend_available_concurrency"] == status["backend_available_concurrency"] == status["available_concurrency"]
        and status["step_latency_ms"] >= 0
        and status["machine_info"].startswith("cpu")
    )


def test_tokenizer_routes(server):
    encoded = server.post("/tokenizer/encode", {"prompt": "hello world"}).json()
    assert "".join(encoded["tokens"]) == "hello world"
    assert "offset_mapping" not in encoded
    placed = server.post("/tokenizer/encode", {"prompt": "hello wörld", "return_offsets_mapping": True}).json()
    assert placed["offset_mapping"][0] == [0, 5] and placed["offset_mapping"][-1][1] == len("hello wörld")
    assert len(placed["offset_mapping"]) == len(placed["token_ids"])
    assert (
        "return_offsets_mapping" in server.post("/tokenizer/encode", {"prompt": "a", "return_offsets_mapping": 1}).json()["message"]
    )
    counted = server.post("/tokenize", {"prompt": "hello world"}).json()
    assert counted["tokens"] == encoded["token_ids"] and counted["count"] == 2 and counted["max_model_len"] == 256
    assert server.post("/detokenize", {"tokens": counted["tokens"]}).json() == {"prompt": "hello world"}
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()["count"] == 31


def test_the_start_message(server):
    text = "\n".join(server.lines)
    assert (
        "chat      by " in text
        and "tokenizer.chat_template; tool calls are read as hermes, described in the system message" in text
    )
    for word in (
        "maga_transformer ",
        "q4_1 69%, q8_0 31%",
        "tokens    49152, of the checkpoint",
        "device ",
        "SmolLM2-135M-Instruct",
        "K/V ",
        "MAX_SEQ_LEN",
        server.url,
        "curl -XPOST",
    ):
        assert word in text


def test_request_ids_are_echoed(server):
    assert server.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert server.post("/", {"prompt": 1}, headers={"X-Request-Id": "bad id"}).headers["x-request-id"] != "bad id"


def test_private_requests_stay_out_of_the_log(server):
    for name, private in (("open-1", False), ("private-1", True)):
        server.post("/", {"prompt": "a", "max_new_tokens": 1, "private_request": private}, headers={"X-Request-Id": name})
    server.get("/health", headers={"X-Request-Id": "last-1"})
    end = time.monotonic() + 10
    while not any("last-1" in line for line in server.lines) and time.monotonic() < end:
        time.sleep(0.01)
    assert any("open-1 POST / 200" in line for line in server.lines)
    assert not any("private-1" in line for line in server.lines)
