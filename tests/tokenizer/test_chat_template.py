"""Chat templates: rendered as transformers renders them, sandboxed, and wrong ones refused with their own words."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import write_gguf
from maga_transformer.chat.dialect import find_dialect
from maga_transformer.chat_template import ChatTemplate
from maga_transformer.checkpoint import open_checkpoint
from maga_transformer.request import Fault, RequestError
from maga_transformer.server.chat import Conversation, render_chat
from maga_transformer.tokenizer import Tokenizer, load_tokenizer
from maga_transformer.tokenizer.tokenizer import SpecialTokens
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

MESSAGES = [{"role": "user", "content": "<é & 'x'>"}, {"role": "assistant", "content": "y"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": "é<>&'"}}}]
TEMPLATES = {
    "trim and lstrip": "{% for m in messages %}\n    {%- if loop.first %}A{% endif %}\n  {{ m.content }}\n{% endfor %}\nend\n",
    "break and continue": """
        {%- for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}""",
    "tojson": "{{ tools | tojson }} {{ tools | tojson(indent=2) }} {{ messages[0].content | tojson }}",
    "special tokens": "{{ bos_token }}{{ messages[0]['content'] | trim }}{{ eos_token }}",
    "generation prompt": "{% if add_generation_prompt %}go{% else %}stop{% endif %}",
    "generation tag": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "undefined": "{{ nothing }}[{{ documents }}]{% if custom is defined %}{{ custom }}{% endif %}",
    "macro": "{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{{ turn(messages[0]) }}",
}


def tokenizer_with(template: str) -> Tokenizer:
    inner = HuggingFaceTokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    tokenizer = Tokenizer(inner, SpecialTokens(bos_id=1, eos_ids=frozenset({2}), texts={"bos_token": "<s>", "eos_token": "</s>"}))
    tokenizer.set_chat_template(template)
    return tokenizer


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("case", TEMPLATES)
def test_renders_as_transformers(case: str, tools: list | None) -> None:
    found = tokenizer_with(TEMPLATES[case])
    inner = HuggingFaceTokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    expected = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[case])
    for prompt in (True, False):
        rendered = expected.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=prompt, custom="c")
        assert found.apply_chat_template(MESSAGES, tools, add_generation_prompt=prompt, custom="c") == rendered


def test_strftime_now() -> None:
    assert tokenizer_with("{{ strftime_now('%Y') }}").apply_chat_template(MESSAGES) == str(datetime.now().year)


def test_user_text_is_no_template() -> None:
    text = "{{ 7*7 }}{% raw %}"
    assert tokenizer_with("{{ messages[0].content }}").apply_chat_template([{"role": "user", "content": text}]) == text


PARTS = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]}]


def test_parts_are_joined_for_templates_of_strings() -> None:
    for template in ("{{ '<' + messages[0]['content'] + '>' }}", "<{{ messages[0].content }}>"):
        assert tokenizer_with(template).apply_chat_template(PARTS) == "<Say hello.>"
    with pytest.raises(ValueError, match="content part of type 'image_url': this model's chat template takes text only"):
        tokenizer_with("<{{ messages[0].content }}>").apply_chat_template([{"role": "user", "content": [{"type": "image_url"}]}])


def test_templates_that_read_parts_get_them() -> None:
    """FastChat #3017."""
    loop = "{% for p in messages[0].content %}{{ p.text }}|{% endfor %}"
    template = "{% if messages[0].content is string %}{{ messages[0].content }}|{% else %}" + loop + "{% endif %}"
    assert tokenizer_with(template).apply_chat_template(PARTS) == "Say |hello.|"
    assert tokenizer_with(loop).apply_chat_template(PARTS) == "Say |hello.|"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% if %}", "chat template: line 2 of the chat template"),
        ("{{ x | nofilter }}", "chat template: line 1 of the chat template: No filter named 'nofilter'"),
        ("{% for m in messages %}", "chat template: line 1"),
    ],
)
def test_templates_that_do_not_parse(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template, "chat template")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[9].content.x }}", "messages|element|undefined"),
        ("{{ 'a' + 1 }}", "the chat template failed on these messages"),
        ("{{ 1 / 0 }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safe"),
        ("{{ strftime_now.__globals__.os }}", "unsafe"),
        ("{{ range(1000000000) | list }}", "Range too big|too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "the chat template failed"),
    ],
)
def test_failures_are_value_errors_with_the_reason(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_with(template).apply_chat_template(MESSAGES)


def test_a_refusal_reaches_the_client_in_its_own_words() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hi"
    state: Any = SimpleNamespace(
        runtime=SimpleNamespace(tokenizer=tokenizer_with(refusing), description=SimpleNamespace(context=64)),
        dialect=find_dialect([], "none", "none"),
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="System role not supported") as error:
        asyncio.run(render_chat(state, Conversation(messages=turns)))
    assert (error.value.fault, error.value.field) == (Fault.parameter, "messages")
    asyncio.run(render_chat(state, Conversation(messages=turns[1:])))


@pytest.mark.parametrize("name", ["messages", "bos_token"])
def test_variables_do_not_replace_the_messages(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be set"):
        tokenizer_with("x").apply_chat_template(MESSAGES, **{name: []})


def test_no_template() -> None:
    inner = HuggingFaceTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = Tokenizer(inner, SpecialTokens())
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_where_folders_keep_templates(demo_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(demo_folder))
    (tmp_path / "tokenizer.json").write_bytes((demo_folder / "tokenizer.json").read_bytes())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = load_tokenizer(str(tmp_path), checkpoint)
    assert tokenizer.chat_template == "plain"
    assert (tokenizer.apply_chat_template(MESSAGES), tokenizer.apply_chat_template(MESSAGES, TOOLS)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("from a file {{ '✓' }}", encoding="utf-8")
    assert load_tokenizer(str(tmp_path), checkpoint).apply_chat_template(MESSAGES) == "from a file ✓"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: line 1 of the chat template"):
        load_tokenizer(str(tmp_path), checkpoint)


# --- Llama 2 ---

ROUNDS = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "So?"},
]


def llama_folder(folder: Path, **config: Any) -> Tokenizer:
    folder.mkdir()
    inner = HuggingFaceTokenizer(models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    inner.save(str(folder / "tokenizer.json"))
    template = config.pop("template", None)
    settings = {"bos_token": "<s>", "eos_token": "</s>", **({"chat_template": template} if template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **config}))
    return load_tokenizer(None, open_checkpoint(str(folder), "dummy"))


def test_llama_2_chat_models_without_a_template(tmp_path: Path) -> None:
    found = llama_folder(tmp_path / "Llama-2-7b-chat-hf")
    first = "<s>[INST] <<SYS>>\nBe brief. \n<</SYS>>\n\n Hi [/INST] Yes. </s>"
    assert found.apply_chat_template(ROUNDS) == first + "<s>[INST] So? [/INST]"
    assert found.apply_chat_template(ROUNDS[:3]) == first
    rest = "<s>[INST] Hi [/INST] Yes. </s><s>[INST] So? [/INST]"
    assert found.apply_chat_template(ROUNDS[1:]) == found.apply_chat_template(ROUNDS[1:], add_generation_prompt=False) == rest
    assert found.apply_chat_template(PARTS) == "<s>[INST] Say hello. [/INST]"
    for messages in (ROUNDS[2:], [*ROUNDS, ROUNDS[1]], [ROUNDS[1], ROUNDS[0]]):
        with pytest.raises(ValueError, match=r"^.*Llama-2-7b-chat-hf: the chat template of Llama 2: Llama 2 takes user and"):
            found.apply_chat_template(messages)


NAMED = {"_name_or_path": "meta-llama/Llama-2-13b-chat-hf"}


@pytest.mark.parametrize(
    ("name", "config", "has_one"),
    [
        ("llama_2_70b_chat", {}, True),
        ("Llama-2-7B-chat-GPTQ", {"vocab_size": 32001}, True),  # a token for padding
        ("m", NAMED, True),
        ("m", {}, False),
        ("Llama-2-7b-hf", {}, False),
        ("vicuna-7b-v1.5", {"_name_or_path": "lmsys/vicuna-7b-v1.5"}, False),
        ("Llama-3-8b-chat", {"vocab_size": 128256}, False),
        ("m", {**NAMED, "vocab_size": 128256}, False),
        ("m", {**NAMED, "model_type": "mistral"}, False),
    ],
)
def test_which_models_get_llama_2s_template(name: str, config: dict[str, Any], has_one: bool, tmp_path: Path) -> None:
    assert (llama_folder(tmp_path / name, **config).chat_template is not None) == has_one
    own = "{{ messages[0].content }}"
    assert llama_folder(tmp_path / "own", **config, template=own).chat_template == own


@pytest.mark.parametrize("architecture", ["llama", "stablelm"])
def test_llama_2_gguf(architecture: str, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(31997))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 31997],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    path = write_gguf(tmp_path / "llama-2-7b-chat.Q4_K_M.gguf", metadata, {}, architecture=architecture)
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = load_tokenizer(str(path), open_checkpoint(str(folder), "dummy"))
    if architecture == "llama":
        assert found.apply_chat_template(ROUNDS[3:]) == "<s>[INST] So? [/INST]"
    else:
        assert found.chat_template is None
