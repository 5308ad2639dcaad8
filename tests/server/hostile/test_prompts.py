"""Prompts, H35 to H40, and templates, H51 to H54."""

import concurrent.futures
import json

import pytest

from ..chain_model import END, write_chain
from ..conftest import running_server
from .conftest import CONTEXT, SETTINGS
from .live import Target

RAW, COMPLETIONS, CHAT = "/", "/v1/completions", "/v1/chat/completions"
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"


def stream(target, path, body):
    """The text of the deltas, whether there was an end, and the last event."""
    more = {"yield_generator": True, "return_incremental": True} if path == RAW else {"stream": True}
    answer = target.ask(path, {**body, **more})
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        return "", False, answer
    events = [line.partition(":")[2].strip() for line in answer.content.decode().splitlines() if line.startswith("data:")]
    ended = events[-1].lower() == "[done]"
    told = [json.loads(event) for event in events if event.startswith("{")]
    if path == RAW:
        return "".join(event["response"] for event in told), ended, answer
    choices = [choice for event in told for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices), ended, answer


EMPTY = [
    (RAW, {}, 509),
    (RAW, {"prompt": None}, 509),
    (RAW, {"prompt": ""}, 510),
    (RAW, {"prompt": []}, 509),
    (RAW, {"prompt": [""]}, 510),
    (RAW, {"prompt_batch": []}, 509),
    (RAW, {"prompt_batch": ["a", ""]}, 510),
    (RAW, {"messages": []}, 509),
    (COMPLETIONS, {}, "missing_prompt"),
    (COMPLETIONS, {"prompt": ""}, "empty_prompt"),
    (COMPLETIONS, {"prompt": []}, "empty_prompt"),
    (COMPLETIONS, {"prompt": [""]}, "empty_prompt"),
    (CHAT, {}, "missing_prompt"),
    (CHAT, {"messages": []}, "missing_prompt"),
    (ANTHROPIC, {"messages": [], "max_tokens": 1}, "invalid_request_error"),
    ("/api/v1/generate", {"prompt": ""}, "empty_prompt"),
]


def test_h35_nothing_to_continue(target):
    for path, body, code in EMPTY:
        answer = target.ask(path, body)
        assert answer.status == 400 and answer.error[0] == code, (body, answer.content)
        _, _, again = stream(target, path, body)
        assert again.status == 400 and again.error == answer.error
    for prompt in ("", "   "):
        own = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "messages": [{"role": "user", "content": prompt}]}
        whole = target.ask(CHAT, own).json()["choices"][0]["message"]["content"]
        assert stream(target, CHAT, own)[:2] == (whole, True)
    body = {"prompt": "   ", "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    whole = target.ask(COMPLETIONS, body).json()["choices"][0]["text"]
    assert stream(target, COMPLETIONS, body)[:2] == (whole, True)
    body = {"prompt": "   ", "temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    assert target.ask(RAW, body).json()["response"] == whole and stream(target, RAW, body)[:2] == (whole, True)


@pytest.mark.parametrize("size", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_h36_the_limit_is_exact(target, size):
    """A letter is a token. With one left for the answer, 255 fit."""
    bodies = [
        (RAW, {"prompt": "a" * size, "max_new_tokens": 10}),
        (COMPLETIONS, {"prompt": "a" * size}),
        (COMPLETIONS, {"prompt": [70] * size}),
        # <user> and <system>, which the template writes, count too
        (CHAT, {"messages": [{"role": "user", "content": "a" * (size - 6)}]}),
        (CHAT, {"messages": [{"role": "system", "content": "b" * 100}, {"role": "user", "content": "a" * (size - 114)}]}),
    ]
    for path, body in bodies:
        answer = target.ask(path, {**body, "ignore_eos": True})
        if size < CONTEXT:
            assert answer.status == 200, answer.content
            told = answer.json()
            used = told["aux_info"] if path == RAW else told["usage"]
            assert used["input_len" if path == RAW else "prompt_tokens"] == size
            assert used["output_len" if path == RAW else "completion_tokens"] == 1
        else:
            assert answer.status == 400 and answer.error[0] in (511, "context_length_exceeded"), answer.content
            assert "256 tokens" in answer.error[1] and f"{size} tokens" in answer.error[1]


@pytest.mark.parametrize("size", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_h36_the_limit_of_other_routes(target, size):
    said = "a" * (size - 6)
    for path, body in (
        (ANTHROPIC, {"messages": [{"role": "user", "content": said}], "max_tokens": 9}),
        (ANTHROPIC, {"system": "b" * 100, "messages": [{"role": "user", "content": said[108:]}], "max_tokens": 9}),
        (RESPONSES, {"input": said}),
        (RESPONSES, {"instructions": "b" * 100, "input": said[108:]}),
        (RAW, {"messages": [{"role": "user", "content": said}]}),
    ):
        answer = target.ask(path, body)
        assert answer.status == (200 if size < CONTEXT else 400), (path, answer.content)
        assert size < CONTEXT or ("256 tokens" in answer.error[1] and f"{size} tokens" in answer.error[1])


LONG = {
    "one letter": "a" * (1 << 20),
    "combining marks": "\u0301" * (1 << 19),
    "joined emoji": "\U0001f468\u200d" * 100_000,
    "blanks": " " * (1 << 20),
    "digits": "1234567890" * 100_000,
    "words": "word " * 400_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_h38_long_texts_hold_nobody_up(server, kind):
    """By a tokenizer with merges, on which they are tokenised off the event loop, in time that grows as they do."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.post, "/", {"prompt": LONG[kind]})
        served = 0
        while not long.done():
            assert server.get("/health").status_code == 200
            served += 1
    answer = long.result()
    assert answer.status_code == 400 and answer.json()["error_code"] == 511
    assert "256 tokens" in answer.json()["message"]
    assert kind != "words" or "400001 tokens" in answer.json()["message"]
    assert served > 1
    assert server.post("/tokenize", {"prompt": LONG[kind][:200_000]}).json()["count"] > 256


def test_h39_letters_and_stops_across_tokens(tmp_path):
    """The model says one byte a token: letters of one to four bytes, and stops that begin in one piece and end in another."""
    folder = write_chain(tmp_path / "bytes", ["Qé", "€", "😀", "strop", END], ["Za\0b", END])
    with running_server(folder, **{**SETTINGS, "LOAD_FORMAT": "auto"}) as server:
        target = Target(server)
        with target.live():
            cases = (([], "é€😀strop"), (["rop"], "é€😀st"), (["😀s"], "é€"), (["€"], "é"), (["stroq"], "é€😀strop"))
            for stop, expected in cases:
                fields = (COMPLETIONS, {"stop": stop, "max_tokens": 40}), (RAW, {"stop_words_str": stop, "max_new_tokens": 40})
                for path, own in fields:
                    body = {"prompt": "Q", "temperature": 0, **own}
                    whole = target.ask(path, body).json()
                    assert (whole["response"] if path == RAW else whole["choices"][0]["text"]) == expected
                    assert stream(target, path, body)[:2] == (expected, True)
                turn = {"messages": [{"role": "user", "content": "Q"}], "stop": stop, "max_tokens": 40, "temperature": 0}
                assert target.ask(CHAT, turn).json()["choices"][0]["message"]["content"] == expected
                assert stream(target, CHAT, turn)[:2] == (expected, True)
            for stop, expected in ((["a\0c"], "a\0b"), (["\0"], "a"), (["\0b"], "a")):  # H04: a stop is not cut at a NUL
                told = target.ask(COMPLETIONS, {"prompt": "Z", "temperature": 0, "stop": stop, "max_tokens": 9}).json()
                assert told["choices"][0]["text"] == expected
            for most in range(1, 12):  # cut amid a letter: what there is of it is not told
                text = target.ask(COMPLETIONS, {"prompt": "Q", "temperature": 0, "max_tokens": most}).json()["choices"][0]["text"]
                assert (
                    "é€😀strop".startswith(text.rstrip("\ufffd"))
                    and stream(target, COMPLETIONS, {"prompt": "Q", "temperature": 0, "max_tokens": most})[0] == text
                )


MESSAGES = [  # a message, a word
    ({"role": "robot", "content": "a"}, "messages[0].role"),
    ({"role": 5, "content": "a"}, "messages[0].role"),
    ({"role": [], "content": "a"}, "messages[0].role"),
    ({"content": "a"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": [5]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "odd"}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}, "image_url"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "messages[0].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "messages[0].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": ""}, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
    ("hi", "messages[0]"),
    (None, "messages[0]"),
]


CALL = {"type": "tool_use", "id": "1", "name": "f", "input": "{"}
OF_BLOCKS = [  # Anthropic's
    ({"messages": [5]}, "messages[0]=5"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": [CALL]}]}, "messages[0].content[0].input"),
    ({"messages": [{"role": "user", "content": "a"}], "system": [{"type": "odd"}]}, "system[0]"),
    ({"messages": [{"role": "user", "content": "a"}], "system": 5}, "system=5"),
    ({"messages": [{"role": "user", "content": "a"}] * 10_000}, "70000 tokens"),
]
ITEMS = [  # of /v1/responses
    (5, "input[0]=5"),
    ({"role": "robot", "content": "a"}, "input[0].role"),
    ({"role": "user", "content": None}, "input[0].content"),
    ({"role": "user", "content": [{"type": "odd"}]}, "input[0].content[0]"),
    ({"type": "function_call", "name": "f", "arguments": "{", "call_id": "1"}, "input[0].arguments"),
    ({"type": "function_call_output", "output": 5, "call_id": "1"}, "input[0].output"),
]


def test_h40_messages(target):
    for message, word in MESSAGES:
        for path in (CHAT, RAW, "/tokenize"):
            answer = target.ask(path, {"messages": [message]})
            assert answer.status == 400 and word in answer.error[1], (message, answer.content)
    for value in ("hi", 5, {"role": "user"}):
        assert "messages" in target.ask(CHAT, {"messages": value}).error[1]
    many = [{"role": "user", "content": "a"}] * 10_000
    answer = target.ask(CHAT, {"messages": many})
    assert answer.error[0] == "context_length_exceeded" and "70000 tokens" in answer.error[1]
    for block in ({"type": []}, {"type": "tool_use", "name": 5}, {"type": "tool_result", "content": 5}, 5):
        body = {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1}
        assert "messages[0].content[0]" in target.ask("/v1/messages", body).error[1]
    for messages, word in OF_BLOCKS:
        answer = target.ask(ANTHROPIC, {"max_tokens": 1, **messages})
        assert answer.status == 400 and word in answer.error[1], (messages, answer.content)
    for item, word in ITEMS:
        answer = target.ask(RESPONSES, {"input": [item]})
        assert answer.status == 400 and word in answer.error[1], (item, answer.content)
    for choice in ({"type": []}, {"type": "odd"}, {"type": "tool", "name": "f"}):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tool_choice": choice}
        assert "tool_choice" in target.ask("/v1/messages", body).error[1]


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_h51_templates_and_their_variables(target):
    user = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path in (CHAT, "/tokenize", "/chat/render"):
        answer = target.ask(path, {**user, "chat_template": "{{ messages }}"})
        assert answer.status == 400 and "chat_template:" in answer.error[1], (path, answer.content)
    assert "user_template:" in target.ask(CHAT, {**user, "user_template": "x"}).error[1]
    for variables in (
        {"tokenize": True},
        {"messages": []},
        {"self": 1},
        {"return_tensors": "pt"},
        {"": 1},
        {"tools": []},
        {"add_generation_prompt": False},
        {"chat_template": "x"},
        {"a b": 1},
        {"__class__": 1} | {f"k{i}": 1 for i in range(100_000)},
        {"large": [[1] * 20_000]},
    ):
        answer = target.ask(CHAT, {**user, "chat_template_kwargs": variables})
        named = "chat_template_kwargs" + (f".{next(iter(variables))}" if len(variables) == 1 else "")
        assert answer.status == 400 and named in answer.error[1] and len(answer.content) < 500, answer.content
        assert target.ask("/tokenize", {**user, "chat_template_kwargs": variables}).error[1] == answer.error[1]
    for value in ("x", [1], 5):
        assert "chat_template_kwargs" in target.ask(CHAT, {**user, "chat_template_kwargs": value}).error[1]
    assert target.ask(CHAT, {**user, "chat_template_kwargs": {"deep": deep(100)}}).status in (200, 400)
    nested = b"[" * 900 + b"]" * 900
    body = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ' + nested + b"}}"
    assert target.ask(CHAT, body).status in (200, 400)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('form' ~ 'at'))('{0.__class__}', 5) }}{{ ''['__cla' ~ 'ss__'].mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}{{ messages.__class__.mro() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{% for m in messages %}{{ m.__init__.__globals__ }}{% endfor %}{{ x.y.z }}",
        "{% set _ = messages.append(1) %}",
    ],
)
def test_h52_templates_that_reach_out(tiny, template, tmp_path):
    """A model's own template runs in a sandbox: the request fails by its name, and nothing has run."""
    mark = tmp_path / "mark"
    with running_server(tiny, **{**SETTINGS, "CHAT_TEMPLATE": template.replace("MARK", str(mark))}) as server:
        target = Target(server)
        with target.live():
            answer = target.ask(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
            assert answer.status == 400 and "template" in answer.error[1].lower(), answer.content
    assert not mark.exists()


def test_h54_templates_in_what_users_say(target):
    said = "{{ 7*7 }}{% raw %}{# a #}<|im_end|>"
    ids = target.ask("/tokenize", {"messages": [{"role": "user", "content": said}]}).json()["tokens"]
    assert target.ask("/detokenize", {"tokens": ids}).json()["prompt"] == f"<user>{said}"
    for prompt in ("a\0b", "   ", "\u202e", "😀" * 50, "<|im_end|>", "{{ 7*7 }}"):
        assert target.ask(RAW, {"prompt": prompt, "max_new_tokens": 1}).json()["finished"]
