"""KoboldAI's routes as SillyTavern and Kobold Lite call them."""

import concurrent.futures
import json
import time

import pytest

# What SillyTavern's KoboldCpp mode sends by default.
SILLY_TAVERN = {
    "gui_settings": False,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "max_context_length": 256,
    "max_length": 8,
    "rep_pen": 1.1,
    "rep_pen_range": 600,
    "rep_pen_slope": 0,
    "temperature": 0,
    "tfs": 1,
    "top_a": 0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical": 1,
    "use_world_info": False,
    "singleline": False,
    "stop_sequence": ["\nYou:"],
    "streaming": False,
    "can_abort": True,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "use_default_badwordsids": True,
    "grammar": "",
    "sampler_seed": -1,
    "api_server": "http://localhost/api",
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
}


def test_what_the_page_asks_first(server, model):
    assert server.get("/api/v1/model").json() == {"result": f"maga/{model}"}
    assert server.get("/api/v1/info/version").json()["result"] >= "1.2.5"
    assert server.get("/api/extra/version").json()["version"] >= "1.60"
    assert server.get("/api/extra/true_max_context_length").json() == {"value": 256}
    assert server.get("/api/v1/config/max_context_length").json() == {"value": 256}
    assert server.get("/api/v1/config/soft_prompts_list").json() == {"values": []}
    assert server.get("/api/latest/model").status_code == server.get("/api/extra/perf").status_code == 200


def test_generate(server):
    answer = server.post("/api/v1/generate", {**SILLY_TAVERN, "prompt": "1 2 3 4 5 6", "rep_pen": 1})
    assert answer.status_code == 200, answer.text
    (result,) = answer.json()["results"]
    assert result["text"].startswith(" 7 8") and result["finish_reason"] == "length" and result["completion_tokens"] == 8
    assert "rep_pen_range" in answer.headers["x-maga-ignored"]


def test_an_end_can_be_banned(server):
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    body = {"prompt": prompt, "max_length": 60, "temperature": 0, "use_default_badwordsids": False}
    (free,) = server.post("/api/v1/generate", body).json()["results"]
    (endless,) = server.post("/api/v1/generate", {**body, "use_default_badwordsids": True}).json()["results"]
    assert free["finish_reason"] == "stop" and free["completion_tokens"] < 60
    assert endless["finish_reason"] == "length" and endless["completion_tokens"] == 60
    assert endless["text"].startswith(free["text"]) and len(endless["text"]) > len(free["text"])


def test_stream(server):
    body = {**SILLY_TAVERN, "prompt": "1 2 3 4 5 6", "rep_pen": 1}
    whole = server.post("/api/v1/generate", body).json()["results"][0]["text"]
    with server.stream("/api/extra/generate/stream", body) as answer:
        events = answer.read().decode().split("\n\n")[:-1]
    assert all(event.startswith("event: message\ndata: ") for event in events)
    pieces = [json.loads(event.split("data: ")[1]) for event in events]
    assert "".join(piece["token"] for piece in pieces) == whole and pieces[-1]["finish_reason"] == "length"


def test_a_long_prompt_loses_its_beginning(server):
    answer = server.post("/api/v1/generate", {"prompt": "word " * 2000 + "1 2 3 4", "max_length": 4, "max_context_length": 100})
    assert answer.status_code == 200 and answer.json()["results"][0]["prompt_tokens"] == 96


def test_abort_and_check(server):
    """An aborted request answers with what it has."""
    body = {"prompt": "Once upon a time", "max_length": 200, "temperature": 1, "genkey": "KCPP1234", "bypass_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/api/v1/generate", body)
        deadline = time.monotonic() + 30
        while not server.post("/api/extra/generate/check", {"genkey": "KCPP1234"}).json()["results"][0]["text"]:
            assert time.monotonic() < deadline and not running.done()
        assert server.post("/api/extra/abort", {"genkey": "KCPP1234"}).json()["success"] is True
        answer = running.result(30)
    assert answer.status_code == 200 and answer.json()["results"][0]["text"]
    assert server.post("/api/extra/abort", {"genkey": "KCPP1234"}).json()["success"] is False
    assert server.get("/api/extra/generate/check").json() == {"results": [{"text": ""}]}


def test_token_count(server):
    answer = server.post("/api/extra/tokencount", {"prompt": "1 2 3 4 5 6"}).json()
    assert answer["value"] == len(answer["ids"]) == server.post("/tokenize", {"prompt": "1 2 3 4 5 6"}).json()["count"]


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"max_length": 0}, "max_length"),
        ({"temperature": "hot"}, "temperature"),
        ({"grammar": "root ::= root"}, "grammar"),
        ({"images": ["x"]}, "images"),
        ({"n": 10**6}, "n="),
    ],
)
def test_bad_fields_are_named(server, fields, word):
    answer = server.post("/api/v1/generate", {"prompt": "a", "max_length": 2, **fields})
    assert answer.status_code == 400 and word in answer.json()["detail"]["msg"], answer.text
