"""What RTP-LLM's chat route has beside OpenAI's: extra_configs, debug_info, aux_info, and a route that only renders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from maga_transformer.generate_config import GenerateConfig
from maga_transformer.request import Fault, RequestError, Sampling
from maga_transformer.samplers import SamplerFields
from maga_transformer.server.chat import ChatPrompt
from maga_transformer.server.state import State

# Fields of extra_configs that say how a text is drawn and where it ends -> what they are in a Sampling.
_SAMPLING = {
    name: name
    for name in (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "top_p_decay", "top_p_min"),
        *("top_p_reset_ids", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos"),
        "skip_special_tokens",
    )
} | {
    "do_sample": "temperature",
    "random_seed": "seed",
    "bad_words_list": "bad_words",
    "stop_words_list": "stop_words",
    "stop_words_str": "stop_strings",
    "print_stop_words": "keep_stop",
    "eos_token_id": "eos_ids",
}


def with_extra_configs(extra: Mapping[str, Any], sampling: Sampling) -> tuple[Sampling, float]:
    """RTP-LLM's generate_config beside OpenAI's fields, which it overrides, and its time limit in seconds."""
    fields = {"repetition_penalty" if name == "repitition_penalty" else name: value for name, value in extra.items()}
    try:
        config = GenerateConfig.parse(fields)
        own, rare = config.sampling(), config.rare()
    except RequestError as error:
        raise RequestError(error.fault, f"extra_configs: {error.message}", f"extra_configs.{error.field}") from None
    for name in sorted(config.given):
        if name not in _SAMPLING and name != "timeout_ms" and name not in SamplerFields.model_fields:
            message = f"extra_configs.{name}: only what says how a text is drawn, and timeout_ms, can be set for a chat"
            raise RequestError(Fault.unsupported, message, f"extra_configs.{name}")
    changes = {attribute: getattr(own, attribute) for name, attribute in _SAMPLING.items() if name in config.given}
    return dataclasses.replace(sampling, **changes, rare={**sampling.rare, **rare}), config.timeout_seconds


def debug_info(state: State, prompt: ChatPrompt, stop_words: list[str]) -> dict[str, Any]:
    """`stop_words`: of the request."""
    runtime, tokenizer = state.runtime, state.runtime.tokenizer
    config, eos = runtime.config, sorted(tokenizer.eos_ids)
    return {
        "input_prompt": prompt.text,
        "input_ids": list(prompt.ids),
        "input_urls": [],
        "tokenizer_info": f"{type(tokenizer).__name__}, {tokenizer.vocab_size} tokens",
        "max_seq_len": runtime.description.context,
        "eos_token_id": eos[0] if eos else None,
        "stop_word_ids_list": [[token] for token in eos] + config.stop_words_list + config.force_stop_words_list,
        "stop_words_list": stop_words + config.stop_words_str + config.force_stop_words_str,
        "renderer_info": {
            "class_name": "ChatTemplate",
            "renderer_model_type": runtime.description.family,
            "extra_stop_word_ids_list": [],
            "extra_stop_words_list": [],
            "template": tokenizer.chat_template,
        },
    }


def aux_info(event: Any, input_length: int) -> dict[str, Any]:
    """Times in ms, lengths in tokens. `event` is None before the first news."""
    info: dict[str, Any] = {
        "cost_time": 0.0,
        "iter_count": 0,
        "prefix_len": 0,
        "input_len": input_length,
        "reuse_len": 0,
        "output_len": 0,
        "cum_log_probs": [],
        "beam_responses": [],
    }
    if event is not None:
        info.update(
            cost_time=event.total_seconds * 1e3,
            iter_count=event.steps,
            reuse_len=event.cached_tokens,
            output_len=event.output_tokens,
            cum_log_probs=[event.cumulative_logprob],
            step_output_len=len(event.tokens),
            first_token_cost_time=event.first_token_seconds * 1e3,
            wait_time=event.wait_seconds * 1e3,
            pd_sep=False,
        )
    return info
