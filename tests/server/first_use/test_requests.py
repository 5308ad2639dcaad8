"""Lines 10 to 12: wrong names and keys, what does not fit, and stopping."""

import signal
import subprocess

import pytest

from ..conftest import demo_model, running_server
from ..test_lifecycle import idle, leave, wait_for

HELLO = [{"role": "user", "content": "Say hello."}]


def test_10_an_unknown_model_is_answered_with_those_that_are_served(server, model):
    answer = server.post("/v1/chat/completions", {"model": "nosuch", "messages": HELLO})
    assert answer.status_code == 404 and model in answer.json()["error"]["message"]


def test_10_a_missing_key_is_answered_with_the_header_that_carries_it():
    with running_server(demo_model(), MAGA_API_KEY="k") as server:
        answer = server.post("/v1/chat/completions", {"messages": HELLO})
        assert answer.status_code == 401 and "Authorization: Bearer" in answer.json()["error"]["message"]
        assert server.get("/health").status_code == 200


def test_10_a_browser_gets_the_page_and_a_post_an_answer(server):
    page = server.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html") and "<html" in page.text
    assert server.raw("a", max_new_tokens=1)["finished"]


def test_11_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 300}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert "This model's maximum context length is 256 tokens" in error["message"] and "rate limit" not in error["message"]


def test_11_tools_work_though_the_template_has_no_place_for_them(server):
    function = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 60}
    answer = server.post("/v1/chat/completions", {**body, "temperature": 0}).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize("times", [1, 2])
def test_12_ctrl_c_stops_the_server_without_a_traceback(times):
    """Once: what runs may end, here within a second. Twice: at once, whatever runs and however long it may take."""
    settings = {"DRAIN_TIMEOUT": "1" if times == 1 else "600", "MAGA_FAULT": "slow:forward:100000"}
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with running_server(demo_model(), **settings) as server, server.stream("/v1/completions", body) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGINT)
        if times == 2:
            assert wait_for(lambda: server.get("/health").status_code == 503)
            server.process.send_signal(signal.SIGINT)
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            pytest.fail("it still runs")
    assert not any("Traceback" in line for line in server.lines), "\n".join(server.lines)


def test_12_a_client_that_leaves_frees_its_place(server):
    assert wait_for(lambda: idle(server))
    leave(server, {"prompt": "Once upon a time", "yield_generator": True, "max_new_tokens": 240, "ignore_eos": True}, after=600)
    assert wait_for(lambda: idle(server))
