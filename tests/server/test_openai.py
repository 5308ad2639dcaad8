"""The official client against a real server."""

import asyncio
import json
import math
import re

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Say hello."}]
COUNT = "1 2 3 4 5 6"


def test_models(client, model):
    card = client.models.list().data[0]
    assert card.id == model == "SmolLM2-135M-Instruct.Q4_1" and card.max_model_len == 256


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, temperature=0)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == model
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, answer.usage.prompt_tokens + 5)
    assert client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5).id != answer.id


def test_chat_ends_by_itself(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    assert answer.choices[0].finish_reason == "stop" and "<|im_end|>" not in answer.choices[0].message.content


def test_chat_stream(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, last, usage = chunks[0].choices[0], chunks[-2].choices[0], chunks[-1]
    assert first.delta.role == "assistant" and first.delta.content == ""
    assert last.finish_reason == whole.choices[0].finish_reason and last.delta.content is None
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content


def test_the_stream_on_the_wire(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with server.stream("/v1/chat/completions", body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["cache-control"] == "no-cache"
        content = answer.read()
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and b"\r" not in content
    for event in events[:-2]:
        assert event.startswith("data: {") and "\n" not in event
        choice = json.loads(event[6:])["choices"][0]
        assert {"index", "delta", "finish_reason", "logprobs"} <= set(choice)


def test_completion(client, model):
    answer = client.completions.create(model=model, prompt=COUNT, max_tokens=8, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.choices[0].text.startswith(" 7 8")
    chunks = list(client.completions.create(model=model, prompt=COUNT, max_tokens=8, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    default = client.completions.create(model=model, prompt=COUNT, extra_body={"ignore_eos": True})
    assert default.usage.completion_tokens == 16  # OpenAI's


def test_prompt_forms(server, client, model):
    ids = server.post("/tokenize", {"prompt": COUNT}).json()["tokens"]
    other = server.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]

    def ask(prompt):
        return [
            choice.text for choice in client.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0).choices
        ]

    by_text, hello = ask(COUNT)[0], ask("Hello")[0]
    assert ask(ids) == [by_text] and ask([ids, other]) == [by_text, hello] and ask([COUNT, "Hello"]) == [by_text, hello]


def test_echo(server, client, model):
    answer = client.completions.create(model=model, prompt=[COUNT, "Hello"], max_tokens=3, temperature=0, echo=True)
    assert answer.choices[0].text.startswith(COUNT + " 7") and answer.choices[1].text.startswith("Hello")
    chunks = client.completions.create(model=model, prompt=COUNT, max_tokens=3, temperature=0, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_several_choices(client, model):
    answer = client.completions.create(model=model, prompt=[COUNT, "Hello"], n=3, max_tokens=4, temperature=1.5, seed=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 24
    again = client.completions.create(model=model, prompt=[COUNT, "Hello"], n=3, max_tokens=4, temperature=1.5, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]
    assert len({choice.text for choice in answer.choices[3:]}) > 1
    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(
        model=model, prompt=[COUNT, "Hello"], n=3, max_tokens=4, temperature=1.5, seed=3, stream=True
    ):
        assert len(chunk.choices) == 1
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


def test_a_prompt_counts_once(client, model):
    one = client.completions.create(model=model, prompt=COUNT, max_tokens=2)
    many = client.completions.create(model=model, prompt=COUNT, max_tokens=2, n=4)
    assert many.usage.prompt_tokens == one.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, model, stream):
    """vllm #3574: the greedy tokens after this prompt are DEF, GH, I, J."""

    def ask(stop):
        answer = client.completions.create(
            model=model, prompt="Here is the English alphabet: ABC", temperature=0, stop=stop, max_tokens=12, stream=stream
        )
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason, answer.choices[0].stop_reason
        chunks = list(answer)
        return (
            "".join(chunk.choices[0].text for chunk in chunks),
            chunks[-1].choices[0].finish_reason,
            chunks[-1].choices[0].stop_reason,
        )

    free = ask(None)[0]
    assert free.startswith("DEFGHIJ")
    assert ask(["DEFGHIJ"]) == ("", "stop", "DEFGHIJ")
    assert ask("GHI") == ("DEF", "stop", "GHI")
    assert ask(["DEFGHIJX", "nowhere"]) == (free, "length", None)
    assert ask([]) == ask("") == (free, "length", None)


def test_stop_is_kept_on_request(client, model):
    answer = client.completions.create(
        model=model,
        prompt="Here is the English alphabet: ABC",
        temperature=0,
        stop="GH",
        max_tokens=12,
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].text == "DEFGH"


def test_completion_logprobs(client, model):
    answer = client.completions.create(model=model, prompt=COUNT, max_tokens=6, temperature=0, logprobs=3)
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == len(scores.text_offset) == 6
    assert "".join(scores.tokens) == answer.choices[0].text and scores.text_offset[0] == 0
    for token, value, top, offset in zip(
        scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset, strict=True
    ):
        assert len(top) == 3 and top[token] == value == max(top.values()) <= 0
        assert answer.choices[0].text[offset:].startswith(token)
    chunks = client.completions.create(model=model, prompt=COUNT, max_tokens=6, temperature=0, logprobs=3, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for part in streamed for token in part.tokens] == scores.tokens
    assert [offset for part in streamed for offset in part.text_offset] == scores.text_offset


def test_top_tokens_that_are_no_text_keep_keys_of_their_own(client, model):
    """sglang #32290: the first token of an emoji: its likely successors are pieces of characters."""
    answer = client.completions.create(model=model, prompt=[10813], max_tokens=4, temperature=0, logprobs=5)
    for token, value, top in zip(
        *(getattr(answer.choices[0].logprobs, name) for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 5 and top[token] == value


def test_chat_logprobs(client, model):
    """vllm #4795."""

    def ask(**options):
        return (
            client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=3, temperature=0, **options)
            .choices[0]
            .logprobs
        )

    assert ask() is None
    assert [entry.top_logprobs for entry in ask(logprobs=True).content] == [[], [], []]
    assert [entry.top_logprobs for entry in ask(logprobs=True, top_logprobs=0).content] == [[], [], []]
    for entry in ask(logprobs=True, top_logprobs=3).content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] == entry.logprob
        assert bytes(entry.bytes).decode() == entry.token
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        ask(top_logprobs=3)


def test_logprobs_survive_narrow_sampling(client, model):
    """sonar #183: more alternatives than tokens that can still be drawn: values are from before the filters, and finite."""
    answer = client.completions.create(
        model=model, prompt=COUNT, max_tokens=8, temperature=0.01, top_p=0.3, logprobs=5, extra_body={"top_k": 1}
    )
    assert all(
        len(top) >= 5 and all(math.isfinite(value) for value in top.values()) for top in answer.choices[0].logprobs.top_logprobs
    )


def test_bad_words(client, model):
    def ask(words):
        return (
            client.completions.create(
                model=model, prompt="Count: one, two, three,", temperature=0, max_tokens=20, extra_body={"bad_words": words}
            )
            .choices[0]
            .text
        )

    assert " four" in ask([])
    assert "four" not in ask(["four"]) and "five" not in ask(["five"])


def test_logit_bias(server, client, model):
    token = server.post("/tokenize", {"prompt": " cat"}).json()["tokens"][0]
    answer = client.completions.create(model=model, prompt=COUNT, max_tokens=3, temperature=0, logit_bias={str(token): 100})
    assert answer.choices[0].text == " cat cat cat"
    banned = server.post("/tokenize", {"prompt": " 7"}).json()["tokens"]
    answer = client.completions.create(
        model=model, prompt=COUNT, max_tokens=3, temperature=0, logit_bias=dict.fromkeys(map(str, banned), -100)
    )
    assert not answer.choices[0].text.startswith(" 7")


def test_content_parts_are_the_joined_text(server, client, model):
    """FastChat #3017."""
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    counts = [
        server.post("/tokenize", {"messages": [{"role": role, "content": content} for role in ("system", "user")]}).json()["tokens"]
        for content in (parts, "Say hello.")
    ]
    assert counts[0] == counts[1]
    assert client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}], max_tokens=3).choices
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        )


def test_token_limits(client, model):
    """lmdeploy #1589."""

    def ask(**limits):
        return client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}, **limits
        )

    assert ask(max_tokens=1).choices[0].message.content
    assert ask(max_tokens=50, max_completion_tokens=5).usage.completion_tokens == 5
    answer = client.completions.create(model=model, prompt=[1] * 250, max_tokens=10**9, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 256


def test_context_overflow(client, server, model):
    """vllm #765, #276: a prompt must leave room for one token, and one that does not harms nobody; the limit of new tokens is
    clipped to what fits."""
    word = server.post("/tokenize", {"prompt": " word"}).json()["tokens"]
    assert len(word) == 1
    answer = client.completions.create(model=model, prompt=word * 255, max_tokens=100)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "length")
    running = client.completions.create(model=model, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True})
    next(iter(running))
    for length in (256, 257, 5000, 300_000):
        for prompt in (word * length, " word" * length):
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(model=model, prompt=prompt, max_tokens=1, stream=length == 257)
            assert error.value.code == "context_length_exceeded"
            assert "maximum context length is 256 tokens" in error.value.message and str(length) in error.value.message
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"


def test_model_names(client, server, model):
    """lmstudio-bug-tracker #619, #676."""
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (
        error.value.code == "model_not_found" and "`gpt-4` does not exist" in error.value.message and model in error.value.message
    )
    for name in ({}, {"model": None}, {"model": ""}, {"model": model}):
        answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **name})
        assert answer.status_code == 200 and answer.json()["model"] == model
    for options in (None, {}, {"include_usage": False}):
        body = {"messages": MESSAGES, "max_tokens": 2, "stream": True, "stream_options": options}
        with server.stream("/v1/chat/completions", body) as answer:
            assert b"usage" not in answer.read()  # with include_usage: test_chat_stream


def test_null_is_absent(server):
    """vllm #19862, koboldcpp #643, autogen #2050."""
    from maga_transformer.server.schemas import UNSUPPORTED, ChatRequest, CompletionRequest

    for kind, path, body in (
        (ChatRequest, "/v1/chat/completions", {"messages": MESSAGES}),
        (CompletionRequest, "/v1/completions", {"prompt": "a"}),
    ):
        names = [*kind.model_fields, *UNSUPPORTED, "user", "metadata"]
        answers = [server.post(path, {**more, **body, "max_tokens": 1}) for more in ({}, dict.fromkeys(names))]
        answers += [server.post(path, {**dict.fromkeys(names), **body, "temperature": 0})]
        for answer in answers:
            assert answer.status_code == 200, answer.text
        assert answers[0].json().keys() == answers[1].json().keys()
        assert answers[2].json()["usage"] == server.post(path, {**body, "temperature": 0}).json()["usage"]


def test_unsupported_fields_are_refused_and_neutral_values_taken(server):
    from maga_transformer.server.schemas import UNSUPPORTED

    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **neutral}).status_code == 200
    for name in UNSUPPORTED:
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: ["odd value"]})
        error = answer.json()["error"]
        assert (
            answer.status_code == 400
            and error["param"] == name
            and name in error["message"]
            and error["code"] == "unsupported_parameter"
        )


def test_unknown_fields_are_ignored_and_said(server):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "api_server": "x", "legacy_api": False})
    assert answer.status_code == 200 and answer.headers["x-maga-ignored"] == "api_server, legacy_api"


def test_routes_without_v1(server):
    assert server.post("/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).status_code == 200
    assert server.get("/models").json() == server.get("/v1/models").json()


def test_greedy_text_is_the_same_everywhere(server, client, model):
    ids = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    prompt = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=10, temperature=0).choices[0].message.content
    assert client.completions.create(model=model, prompt=ids, max_tokens=10, temperature=0).choices[0].text == chat
    assert client.completions.create(model=model, prompt=prompt, max_tokens=10, temperature=0).choices[0].text == chat
    assert server.raw(prompt, max_new_tokens=10, top_k=1)["response"] == chat
    assert server.raw(prompt, max_new_tokens=10, temperature=0.0)["response"] == chat
    assert server.raw(prompt, max_new_tokens=10, top_k=0, top_p=0)["response"] == chat


def test_64_streams_at_once(server, model):
    """Each equals the same request alone."""
    prompts = [f"Number {index} and then" for index in range(64)]

    async def ask(client, prompt):
        stream = await client.completions.create(model=model, prompt=prompt, max_tokens=5, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*[ask(client, prompt) for prompt in prompts])
            alone = [await ask(client, prompt) for prompt in prompts[:6]]
            return together, alone

    together, alone = asyncio.run(ask_all())
    assert together[:6] == alone


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": '1. "a"\n2. "b"\n3. "c"\n', "max_tokens": 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 'Repeat: "a"\n"b"'}], "max_tokens": 6}),
    ],
)
def test_events_from_prepared_parts_are_those_made_whole(server, path, asked):
    """An event that tells of text alone is put together from parts; one with token ids is encoded as a whole."""

    def events(**more):
        body = {**asked, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **more}
        with server.stream(path, body) as answer:
            told = answer.read().decode()
        told = re.sub(r'"id":"[^"]*"|"created":\d+|,"(prompt_)?token_ids":\[[\d,]*\]|"cached_tokens":\d+', "", told)
        return told.split("\n\n")

    prepared, whole = events(), events(return_token_ids=True)
    assert prepared == whole and len(prepared) > asked["max_tokens"] and "\\" in "".join(prepared)
