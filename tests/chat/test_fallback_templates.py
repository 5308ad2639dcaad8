"""Templates that stand in for a model's own: chosen by its tokens, then by its family; their exact text."""

import pytest
from maga_transformer.chat.named_templates import NAMED_TEMPLATES, fallback_template
from maga_transformer.chat_template import ChatTemplate

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TOLD = {
    "xverse": ("Human: {}Hi\n\nAssistant: Hello.</s>Human: Bye\n\nAssistant: ", "Be kind.\n\n"),
    "aquila": ("{}###Human: Hi###Assistant: Hello.###Human: Bye###Assistant:", "Be kind."),
    "phi-2": ("Instruct: {}Hi\nOutput: Hello.\nInstruct: Bye\nOutput:", "Be kind.\n\n"),
}


@pytest.mark.parametrize("name", TOLD)
def test_text(name):
    template = ChatTemplate(NAMED_TEMPLATES[name], name)
    text, system = TOLD[name]
    for first, words in ([], ""), ([{"role": "system", "content": "Be kind."}], system):
        rendered = template.render(first + TURNS, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
        assert rendered == text.format(words)


@pytest.mark.parametrize(
    "family, tokens, name",
    [
        ("xverse", (), "xverse"),
        ("aquila", (), "aquila"),
        ("phi", (), "phi-2"),
        ("mpt", (), "chatml"),
        ("llama", (), "plain"),
        ("phi", ("<|im_end|>",), "chatml"),
    ],
)
def test_choice(family, tokens, name):
    assert fallback_template(lambda text: 7 if text in tokens else None, family) == name
