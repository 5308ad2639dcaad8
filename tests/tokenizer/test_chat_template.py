"""Chat templates: rendered as transformers renders them, sandboxed, and wrong ones refused with their own words."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from maga_transformer.chat_template import ChatTemplate
from maga_transformer.checkpoint import open_checkpoint
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
