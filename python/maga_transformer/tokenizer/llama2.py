"""Llama 2's chat format (https://arxiv.org/abs/2307.09288, and Meta's code beside it), for its chat models without a template."""

import re

# A round is one BOS ... EOS; the system text stands inside the first of the user's, and both are stripped as one.
CHAT = (
    "{% set turns = namespace(system='', left=messages) %}"
    "{% if messages and messages[0].role == 'system' %}"
    "{% set turns.system = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}{% set turns.left = messages[1:] %}{% endif %}"
    "{% for turn in turns.left %}"
    "{% if turn.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('Llama 2 takes user and assistant in turn, after at most one system message') }}{% endif %}"
    "{% if turn.role == 'user' %}"
    "{{ bos_token }}[INST] {{ ((turns.system if loop.first else '') ~ turn.content) | trim }} [/INST]"
    "{% else %} {{ turn.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
_NAME = re.compile(r"llama-?2-\d+b-chat(?![a-z])")
_VOCABULARY = range(32000, 32064 + 1)  # its own, and padded; Llama 3's is four times as large


def is_llama_2_chat(model_type: object, vocab_size: int | None, *names: object) -> bool:
    """Whether a checkpoint without a template is one of Llama 2's own chat models, or made of one.

    Base models, and others that were tuned from them to another format (Vicuna), have the same config and vocabulary, so one of
    `names` (the path, _name_or_path, general.name) has to say so beside the type llama and the vocabulary of 32000: as
    Llama-2-7b-chat-hf, llama-2-13b-chat.Q4_K_M.gguf, Llama-2-70B-chat-GPTQ. Other folders need a template that is given."""
    if model_type != "llama" or vocab_size not in _VOCABULARY:
        return False
    return any(_NAME.search(str(name).lower().replace("_", "-")) for name in names)
