"""Chat templates that can be asked for by name, and which of them stands in for a model that brings none."""

from collections.abc import Callable

from maga_transformer.tokenizer.llama2 import CHAT as LLAMA_2

_EACH = "{% for turn in messages %}"
_SYSTEM_FIRST = (  # formats without a place for it: before the first of the user's words
    "{% set told = namespace(system='', left=messages) %}{% if messages and messages[0].role == 'system' %}"
    "{% set told.system = messages[0].content ~ '\n\n' %}{% set told.left = messages[1:] %}{% endif %}"
    "{% for turn in told.left %}{% set text = (told.system if loop.first else '') ~ turn.content %}"
)
NAMED_TEMPLATES = {
    "chatml": _EACH + "<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama-2": LLAMA_2,
    "llama-3": "{{ bos_token }}"
    + _EACH
    + "<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n{{ turn.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}" + _SYSTEM_FIRST + "{% if turn.role == 'assistant' %} {{ text | trim }}{{ eos_token }}"
    "{% else %}[INST] {{ text }} [/INST]{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}" + _SYSTEM_FIRST + "<start_of_turn>{{ 'model' if turn.role == 'assistant' else turn.role }}\n"
    "{{ text | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "vicuna": "{{ bos_token }}" + _SYSTEM_FIRST + "{% if turn.role == 'assistant' %} ASSISTANT: {{ text | trim }}{{ eos_token }}"
    "{% else %}USER: {{ text }}{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}",
    "alpaca": "{{ bos_token }}" + _SYSTEM_FIRST + "{{ '### Response:' if turn.role == 'assistant' else '### Instruction:' }}\n"
    "{{ text | trim }}\n\n{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}",
    "xverse": _SYSTEM_FIRST + "{% if turn.role == 'assistant' %}Assistant: {{ text }}{{ eos_token }}"
    "{% else %}Human: {{ text }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}",
    # AquilaChat; AquilaChat2 has several, by size.
    "aquila": _EACH + "{% if turn.role == 'system' %}{{ turn.content }}{% else %}"
    "###{{ 'Assistant' if turn.role == 'assistant' else 'Human' }}: {{ turn.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}###Assistant:{% endif %}",
    "phi-2": _SYSTEM_FIRST + "{{ 'Output:' if turn.role == 'assistant' else 'Instruct:' }} {{ text | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Output:{% endif %}",
    "plain": _EACH + "{{ turn.role | capitalize }}: {{ turn.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
}
_SIGNS = {"<|start_header_id|>": "llama-3", "<start_of_turn>": "gemma", "<|im_end|>": "chatml"}  # tokens of their own
_OF_FAMILIES = {"xverse": "xverse", "aquila": "aquila", "phi": "phi-2", "mpt": "chatml"}  # published for their chat models


def fallback_template(token_id: Callable[[str], int | None], family: str) -> str:
    """The name of the template that suits a model: by its vocabulary's turn marks, what its publisher gave out for the family, or
    words that any model has read."""
    marked = next((name for sign, name in _SIGNS.items() if token_id(sign) is not None), None)
    return marked or _OF_FAMILIES.get(family, "plain")
