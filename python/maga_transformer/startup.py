"""From a configuration to a Runtime: open, build, load weights, size the K/V pages from measured memory, start the engine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maga_transformer import _core, checkpoint, loader, models, tokenizer
from maga_transformer.config import Config, ConfigError
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.memory import available_bytes
from maga_transformer.progress import loading_progress
from maga_transformer.request import RequestError
from maga_transformer.runtime import Description, Runtime

log = logging.getLogger(__name__)


def load_runtime(config: Config) -> Runtime:
    """Raises ConfigError, or what the readers raise (ValueError, FileNotFoundError, MagaError), each naming what is wrong."""
    started = time.monotonic()
    if not config.checkpoint_path:
        raise ConfigError(
            "CHECKPOINT_PATH is not set: name a Hugging Face folder or a GGUF file, e.g. CHECKPOINT_PATH=/models/llama.gguf"
        )
    defaults = sampling_defaults(config.generation_config_path)
    backend = _core.cpu_backend(threads=config.threads, quantize_activations=config.act_type == "auto", isa=config.isa)
    source = checkpoint.open_checkpoint(config.checkpoint_path)
    words = tokenizer.load_tokenizer(config.tokenizer_path or None, source)
    program, _ = models.build_program(source, config.model_type or None)
    kv_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "fp32" if config.act_type == "fp32" else "fp16"
    page_tokens = config.seq_size_per_block
    page_bytes = program.page_bytes(page_tokens, kv_dtype)
    context = config.max_seq_len or program.max_positions
    if context > program.max_positions:
        raise ConfigError(
            f"MAX_SEQ_LEN={context}: the model has {program.max_positions} positions; valid: 1 to {program.max_positions}"
        )
    kv_given = config.kv_cache_mem_mb >= 0
    if kv_given:  # a size that cannot be should not cost a load
        pages, measured = kv_pages(config, page_bytes=page_bytes, context=context, free=available_bytes())

    with loading_progress() as progress:
        weights = loader.load_weights(backend, program, source, progress=progress)

    def executable(pages: int) -> _core.Executable:
        return backend.load(
            program,
            weights,
            tokens=config.max_num_batched_tokens,
            sequences=config.max_num_seqs,
            logit_rows=config.max_num_seqs,
            pages=pages,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
        )

    if not kv_given:
        free = available_bytes() - executable(1).buffer_bytes
        pages, measured = kv_pages(config, page_bytes=page_bytes, context=context, free=free)
    engine = _core.Engine(
        backend,
        executable(pages),
        max_sequences=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_queue=config.max_queue,
        max_sequence_length=min(context, pages * page_tokens),
        prefix_cache=config.reuse_cache,
        fault=config.fault,
    )
    token_bytes = words.token_bytes()
    engine.set_vocabulary(token_bytes)
    description = Description(
        names=config.served_model_name or [model_name(config.checkpoint_path)],
        family=program.family,
        device=backend.describe(),
        context=min(context, pages * page_tokens),
        kv_dtype=kv_dtype,
        kv_bytes=pages * page_bytes,
        kv_tokens=pages * page_tokens,
        kv_measured=measured,
        weight_bytes=sum(weight.bytes for weight in weights),
        load_seconds=time.monotonic() - started,
        sampling_defaults=defaults,
    )
    runtime = Runtime(config, engine, words, token_bytes, description)
    try:
        runtime.check_stop_words()
    except (RequestError, ValueError) as error:
        raise ConfigError(
            f"STOP_WORDS_STR, STOP_WORDS_LIST, FORCE_STOP_WORDS_STR, FORCE_STOP_WORDS_LIST: no request could use these: {error}"
        ) from None
    return runtime


def kv_pages(config: Config, *, page_bytes: int, context: int, free: int) -> tuple[int, str]:
    """How many pages the pool gets, and why. `free`: available bytes, for a pool of no given size those that weights and buffers
    leave: it holds max_num_seqs full sequences, but takes at most half of them. ConfigError when not even one sequence fits, or
    when there is less memory than was asked for."""
    page_tokens, context_given = config.seq_size_per_block, config.max_seq_len > 0
    per_sequence = -(-context // page_tokens)
    if config.kv_cache_mem_mb >= 0:
        pages, why = (config.kv_cache_mem_mb << 20) // page_bytes, f"KV_CACHE_MEM_MB={config.kv_cache_mem_mb}"
        if config.kv_cache_mem_mb << 20 > free:
            raise ConfigError(f"{why}: only {free >> 20} MiB of memory are available")
    else:
        wanted = config.max_num_seqs * per_sequence
        pages = max(0, min(wanted, free // 2 // page_bytes))
        why = (
            f"{config.max_num_seqs} sequences of full length"
            if pages == wanted
            else f"half of the {free >> 20} MiB that are available"
        )
    smallest = per_sequence if context_given else 1
    if pages < smallest:
        raise ConfigError(
            f"the K/V cache would have {pages} pages of {page_bytes >> 10} KiB ({why}), which is too little: "
            f"{'MAX_SEQ_LEN=' + str(context) if context_given else 'one page'} needs {smallest * page_bytes / 2**20:.1f} MiB; "
            "raise KV_CACHE_MEM_MB" + (" or lower MAX_SEQ_LEN" if context_given else "")
        )
    if pages < per_sequence:
        log.warning(
            "the K/V cache holds %d tokens (%s): the context is lowered from %d to that; set KV_CACHE_MEM_MB or MAX_SEQ_LEN "
            "to choose",
            pages * page_tokens,
            why,
            context,
        )
    return pages, why


def sampling_defaults(path: str) -> Mapping[str, Any]:
    """The fields of a generation_config.json that say how to sample; the others belong to its model."""
    if not path:
        return {}
    place = Path(path)
    if place.is_dir():
        place = place / "generation_config.json"
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {place.name} does not hold a JSON object")
    chosen = {name: content[name] for name in _SAMPLING_DEFAULTS if content.get(name) is not None}
    try:
        GenerateConfig.parse(chosen)
    except RequestError as error:
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {error.message}") from None
    return chosen


_SAMPLING_DEFAULTS = (
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)


def model_name(path: str) -> str:
    """A GGUF file's name without its ending, or the folder's."""
    place = Path(path).resolve()
    return place.stem if place.suffix == ".gguf" else place.name
