"""What RTP-LLM's users send to the chat route beside OpenAI's fields: extra_configs, debug_info, aux_info, template keys; and
/chat/render. And what its variables make of a model: stop words of the operator's own, named templates, marks of thoughts."""

import json

import pytest

from .chain_model import END, write_chain
from .conftest import running_server

MESSAGES = [{"role": "user", "content": "Count: one, two, three,"}]


def chat(server, **fields):
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_extra_configs_override_openais_fields(server):
    plain = chat(server)["choices"][0]["message"]["content"]
    assert chat(server, extra_configs={"max_new_tokens": 3})["usage"]["completion_tokens"] == 3
    assert chat(server, temperature=5, extra_configs={"top_k": 1})["choices"][0]["message"]["content"] == plain
    assert chat(server, temperature=5, extra_configs={"do_sample": False})["choices"][0]["message"]["content"] == plain
    word = plain.split()[1]
    cut = chat(server, extra_configs={"stop_words_str": [word]})["choices"][0]
    assert cut["message"]["content"] == plain[: plain.index(word)] and cut["finish_reason"] == "stop"
    penalised = chat(server, extra_configs={"repitition_penalty": 1e5})["choices"][0]["message"]["content"]
    assert penalised != plain and penalised == chat(server, repetition_penalty=1e5)["choices"][0]["message"]["content"]
    seeded = [chat(server, temperature=1, extra_configs={"random_seed": 5})["choices"][0]["message"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    late = server.post(
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "extra_configs": {"timeout_ms": 30}},
    )
    assert late.status_code == 504
    assert chat(server, extra_configs={})["choices"][0]["message"]["content"] == plain


@pytest.mark.parametrize(
    "extra, word",
    [
        ({"top_k": -5}, "extra_configs: top_k=-5"),
        ({"max_new_token": 5}, "did you mean max_new_tokens"),
        ({"num_beams": 2}, "extra_configs.num_beams"),
        ({"return_logits": True}, "extra_configs.return_logits"),
        ({"adapter_name": "a"}, "adapter_name"),
        (5, "extra_configs=5"),
    ],
)
def test_extra_configs_that_cannot_be(server, extra, word):
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "extra_configs": extra})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text


def test_debug_info_is_what_render_tells(server):
    told = chat(server, debug_info=True, stop=["x"])["debug_info"]
    for path in ("/chat/render", "/v1/chat/render"):
        rendered = server.post(path, {"messages": MESSAGES, "stop": ["x"]})
        assert rendered.status_code == 200 and rendered.json() == told
    assert told["input_ids"] == server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert told["input_prompt"] == server.post("/detokenize", {"tokens": told["input_ids"]}).json()["prompt"]
    assert told["stop_words_list"] == ["x"] and [told["eos_token_id"]] in told["stop_word_ids_list"]
    assert told["max_seq_len"] == 256 and "messages" in told["renderer_info"]["template"]
    assert "debug_info" not in chat(server)
    assert "messages" in server.post("/chat/render", {"messages": "x"}).json()["error"]["message"]
    odd = server.post("/chat/render", {"messages": [{"role": "user", "content": "a"}], "guided_choice": [["a"]]})
    assert odd.status_code == 400 and odd.json()["error"]["param"] == "guided_choice"


def test_aux_info_and_streams(server):
    whole = chat(server, aux_info=True)
    aux = whole["aux_info"]
    assert aux["input_len"] == whole["usage"]["prompt_tokens"] and aux["output_len"] == whole["usage"]["completion_tokens"]
    assert aux["cost_time"] > 0 and "aux_info" not in chat(server)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "stream": True, "aux_info": True, "debug_info": True}
    with server.stream("/v1/chat/completions", body) as answer:
        events = [json.loads(event[6:]) for event in answer.read().decode().split("\n\n") if event.startswith("data: {")]
    assert [index for index, event in enumerate(events) if "debug_info" in event] == [0]
    assert [index for index, event in enumerate(events) if "aux_info" in event] == [len(events) - 1]
    assert events[-1]["aux_info"]["output_len"] == 3


def named_templates(folder, **templates):
    """A chain model whose tokenizer has these templates."""
    path = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}))
    return folder


def test_named_templates_stop_words_and_marks_of_thoughts(tmp_path):
    folder = named_templates(
        write_chain(tmp_path / "chain", ["Q[a]bc", END]),
        default="{{ messages[0].content }}Q",
        brief="{{ 'brief' }}Q",
        functions="{{ tools[0].function.name }}Q",
    )
    settings = {
        "DEFAULT_CHAT_TEMPLATE_KEY": "brief",
        "DEFAULT_TOOL_USE_TEMPLATE_KEY": "functions",
        "FORCE_STOP_WORDS": "1",
        "STOP_WORDS_STR": '["c"]',
        "THINK_START_TAG": "[",
        "THINK_END_TAG": "]",
    }
    with running_server(folder, **settings) as server:
        tool = {"type": "function", "function": {"name": "look"}}

        def prompt(**fields):
            return server.post("/chat/render", {"messages": [{"role": "user", "content": "hello"}], **fields}).json()[
                "input_prompt"
            ]

        assert prompt() == "briefQ" and prompt(template_key="default") == "helloQ" and prompt(tools=[tool]) == "lookQ"
        refused = server.post("/chat/render", {"messages": MESSAGES, "template_key": "odd"})
        assert refused.status_code == 400 and "template_key='odd'" in refused.json()["error"]["message"]
        assert "default, brief, functions" in refused.json()["error"]["message"]
        refused = server.post("/chat/render", {"messages": MESSAGES, "user_template": "{{ 1 }}"})
        assert refused.status_code == 400 and "user_template" in refused.json()["error"]["message"]
        choice = chat(server)["choices"][0]
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("b", "a")
        assert choice["finish_reason"] == "stop"
        # The model's own end does not count: only the operator's does.
        assert server.raw("Q", max_new_tokens=20, top_k=1)["response"] == "[a]b"
        free = server.post("/", {"prompt": "b", "max_new_tokens": 3, "top_k": 1, "return_output_ids": True}).json()
        assert free["finished"] and free["response"] == ""


def test_a_template_that_is_not_there_is_refused_at_start(tmp_path):
    server = running_server(write_chain(tmp_path / "chain", ["Qa", END]), DEFAULT_CHAT_TEMPLATE_KEY="odd")
    with pytest.raises(AssertionError, match=r"DEFAULT_CHAT_TEMPLATE_KEY=odd: there is no such template"), server:
        pass
