"""Fields and routes that vLLM's clients know beside OpenAI's."""

import json

import openai
import pytest
from maga_transformer.request import RequestError
from maga_transformer.server.schemas import ChatRequest, parse

COUNT = "1 2 3 4 5 6"
MESSAGES = [{"role": "user", "content": "Say hello."}]


def test_long_prompts_are_cut_only_when_asked(server):
    word = server.post("/tokenize", {"prompt": " word"}).json()["tokens"]
    body = {"prompt": word * 300, "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 400
    answer = server.post("/v1/completions", {**body, "truncate_prompt_tokens": 10})
    assert answer.json()["usage"]["prompt_tokens"] == 10 and answer.headers["x-maga-truncated"] == "290 prompt tokens"
    answer = server.post("/v1/completions", {**body, "truncate_prompt_tokens": -1})
    assert answer.json()["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 252,
        "completion_tokens": 4,
        "total_tokens": 256,
        "prompt_tokens_details": 0,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert server.post("/v1/completions", {**body, "truncate_prompt_tokens": -2}).status_code == 400


def test_ids_of_prompt_and_answer(server):
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()
    assert whole["prompt_token_ids"] == server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    with server.stream("/v1/chat/completions", {**body, "stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.read().decode().split("\n\n") if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == ids


def test_tokens_named_by_their_ids(server):
    body = {"prompt": COUNT, "max_tokens": 3, "temperature": 0, "logprobs": 2, "return_tokens_as_token_ids": True}
    scores = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in scores["tokens"]) and all(len(top) == 2 for top in scores["top_logprobs"])


def test_tokenizer_routes(server):
    about = server.get("/tokenizer_info").json()
    assert about["eos_token"] == "<|im_end|>" and "messages" in about["chat_template"] and about["vocab_size"] == 49152
    told = server.post("/tokenize", {"prompt": COUNT, "return_token_strs": True}).json()
    assert len(told["token_strs"]) == told["count"] == len(told["tokens"])
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": COUNT}


def test_one_model(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_strict():
    fields = {"messages": MESSAGES, "odd_field": 1}
    assert parse(ChatRequest, fields)[1] == ["odd_field"]
    with pytest.raises(RequestError, match="odd_field"):
        parse(ChatRequest, fields, strict=True)


def test_labels_change_nothing(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=2, user="me", metadata={"a": "b"}, service_tier="auto", store=False
    )
    assert answer.choices
