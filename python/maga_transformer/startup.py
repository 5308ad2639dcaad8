"""From a configuration to a Runtime: open, build, load weights, size the K/V pages from measured memory, start the engine."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from maga_transformer import _core, kv_cache, loader
from maga_transformer.adapters.ptuning import Tuned, find_ptuning, open_ptuning
from maga_transformer.checkpoint import Checkpoint, open_checkpoint
from maga_transformer.checkpoint.hub import is_hub_name
from maga_transformer.config import Config, ConfigError
from maga_transformer.device import Device, compute_dtype, cuda_backend, find_device
from maga_transformer.explain import stored_formats
from maga_transformer.measure import memory_bandwidth
from maga_transformer.memory import available_bytes
from maga_transformer.models import Family, build_program
from maga_transformer.models.task import GENERATE
from maga_transformer.page_pool import Pool
from maga_transformer.progress import loading_progress
from maga_transformer.request import RequestError
from maga_transformer.runtime import Description, Runtime
from maga_transformer.setting_files import check_own_defaults, read_chat_template, read_sparse_config, sampling_defaults
from maga_transformer.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_WHOLE_INPUT = 8192  # tokens of an input that must be read in one step, where MAX_NUM_BATCHED_TOKENS does not say
_PROBE_MEBIBYTES = 16  # a core, to measure a CPU's memory in some 10 ms


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model but for its weights, and what is to run it."""

    config: Config  # of the device: without zeros
    device: Device
    source: Checkpoint
    program: _core.Program
    family: Family
    stored: str  # the types of its weights as they are stored, with their shares
    tuned: Tuned | None
    backend: _core.Backend
    own_kv_dtype: str  # of keys and values, if nobody chooses
    tokenizer: Tokenizer
    context: int  # tokens of prompt and output together

    @property
    def prefix(self) -> int:
        """Virtual tokens before every prompt."""
        return self.tuned.tokens if self.tuned else 0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model with its weights and its K/V pages on the device."""

    executable: _core.Executable
    buffer_bytes: int
    weight_bytes: list[int]
    pool: Pool
    pages: int
    measured: str  # how their number was found
    kv_shown: str  # their types, for people


def load_runtime(config: Config) -> Runtime:
    """Raises ConfigError, or what the readers raise (ValueError, FileNotFoundError, MagaError), each naming what is wrong."""
    started = time.monotonic()
    if not config.checkpoint_path:
        raise ConfigError(
            "CHECKPOINT_PATH is not set: name a model's folder, a GGUF file or a model of the hub, "
            "e.g. CHECKPOINT_PATH=/models/llama.gguf"
        )
    defaults = sampling_defaults(config.generation_config_path)
    if not config.generation_config_path:
        check_own_defaults(Path(config.checkpoint_path))
    opened = open_model(config)
    card = opened.device.card
    bytes_per_second = card.bytes_per_second if card else memory_bandwidth(_PROBE_MEBIBYTES)
    loaded = load_model(opened)
    engine = make_engine(opened, loaded, bytes_per_second)
    token_bytes = opened.tokenizer.token_bytes()
    engine.set_vocabulary(token_bytes)
    program, family, pool, pages = opened.program, opened.family, loaded.pool, loaded.pages
    description = Description(
        names=config.served_model_name or [model_name(config.checkpoint_path)],
        family=program.family,
        stored=opened.stored,
        device=opened.backend.describe(),
        context=pool.longest(pages) - opened.prefix,
        kv_dtype=loaded.kv_shown,
        kv_bytes=pages * pool.page_bytes,
        kv_tokens=pages * opened.config.seq_size_per_block,
        kv_measured=loaded.measured,
        weight_bytes=sum(loaded.weight_bytes),
        buffer_bytes=loaded.buffer_bytes,
        bytes_per_second=bytes_per_second,
        card_bytes=card.total_bytes if card else 0,
        load_seconds=time.monotonic() - started,
        sampling_defaults=defaults,
        task=family.task,
        segment_shift=family.segment_shift(),
        embedding_width=0 if not program.embeds else family.hidden if program.row_per_token else program.logits_width,
        whole_prompts=program.whole_prompts,
        prefix=f"{opened.prefix} virtual tokens from {opened.tuned.file}" if opened.tuned else "",
    )
    runtime = Runtime(opened.config, engine, opened.tokenizer, token_bytes, description)
    try:
        runtime.check_stop_words()
    except (RequestError, ValueError) as error:
        raise ConfigError(
            f"STOP_WORDS_STR, STOP_WORDS_LIST, FORCE_STOP_WORDS_STR, FORCE_STOP_WORDS_LIST: no request could use these: {error}"
        ) from None
    return runtime


def open_model(config: Config) -> Opened:
    """Everything that may be wrong without a weight being read is found here."""
    try:
        device = find_device(config.device)
    except ValueError as error:
        raise ConfigError(f"DEVICE={config.device}: {error}") from None
    asked, config = config, config.for_device(device.defaults)
    source = open_checkpoint(config.checkpoint_path, config.load_format)
    if config.sparse_config_file:
        source.config.update(read_sparse_config(config.sparse_config_file))
    program, family = build_program(source, config.model_type or None, config.task)
    stored = stored_formats(program, family.checkpoint)
    tuned = read_ptuning(config, program, family)
    backend, own_kv_dtype = make_backend(config, device, source.dtype(family.embedding))
    tokenizer = read_tokenizer(config, source)
    if family.task.kind == GENERATE:
        check_ends(config.checkpoint_path, tokenizer)
    context = context_of(config, program, tuned)
    if program.whole_prompts and not asked.max_num_batched_tokens:
        budget = max(config.max_num_batched_tokens, min(context, _WHOLE_INPUT))
        config = config.model_copy(update={"max_num_batched_tokens": budget})
    return Opened(
        config=config,
        device=device,
        source=source,
        program=program,
        family=family,
        stored=stored,
        tuned=tuned,
        backend=backend,
        own_kv_dtype=own_kv_dtype,
        tokenizer=tokenizer,
        context=context,
    )


def load_model(opened: Opened) -> Loaded:
    """Loads the weights, chooses the types of keys and values, and takes memory for their pages."""
    config, program, backend, tuned = opened.config, opened.program, opened.backend, opened.tuned
    card, page_tokens = opened.device.card, config.seq_size_per_block
    adaptive = config.kv_cache_dtype == "adaptive"
    kv_dtypes = [{"auto": opened.own_kv_dtype, "adaptive": "int8"}.get(config.kv_cache_dtype, config.kv_cache_dtype)]
    kv_dtypes *= len(program.cache_layers)
    if "fp8_e4m3" in kv_dtypes:
        kv_cache.state_scales(program, opened.family.checkpoint)
    pool = Pool(
        config,
        page_bytes=program.page_bytes(page_tokens, kv_dtypes),
        context=opened.context,
        prefix=opened.prefix,
        spare=int(tuned is not None and tuned.in_pages and opened.prefix % page_tokens != 0),
    )
    free = card.free_bytes if card else available_bytes()
    given = pool.given(free)  # a size that cannot be should not cost a load

    with loading_progress() as progress:
        weights = loader.load_weights(
            backend, program, opened.source, progress=progress, quantization=config.quantization, check=config.check_weights
        )
    loader.tell_of_widened(weights)
    if tuned:
        weights += tuned.add_to(program, backend)
    kv_shown = kv_cache.summary(kv_dtypes) if kv_dtypes else opened.own_kv_dtype
    if adaptive and kv_dtypes:
        choice = choose_kv_dtypes(opened, weights)
        kv_dtypes = choice.dtypes
        kv_shown = f"{kv_cache.summary(kv_dtypes)} (logits within {choice.error:.2%})"
        pool = replace(pool, page_bytes=program.page_bytes(page_tokens, kv_dtypes))
        given = pool.given(free)

    def executable(pages: int) -> _core.Executable:
        return backend.load(
            program,
            weights,
            tokens=config.max_num_batched_tokens,
            sequences=config.max_num_seqs,
            logit_rows=config.max_num_batched_tokens if program.row_per_token else config.max_num_seqs,
            pages=pages,
            page_tokens=page_tokens,
            kv_dtype=kv_dtypes or opened.own_kv_dtype,
        )

    if given is not None:
        pages, measured = given
    elif card:  # the backend measures what its largest step leaves
        pages, measured = 0, f"GPU_MEMORY_UTILIZATION={config.gpu_memory_utilization:g}"
    else:
        pages, measured = pool.measured(available_bytes() - executable(1).buffer_bytes)
    model = executable(pages)
    if pages == 0:
        pages = model.limits.pages
        pool.check(pages, measured)
    if tuned:
        tuned.fill(model, program)
    return Loaded(
        executable=model,
        buffer_bytes=model.buffer_bytes,
        weight_bytes=[weight.bytes for weight in weights],
        pool=pool,
        pages=pages,
        measured=measured,
        kv_shown=kv_shown,
    )


def make_engine(opened: Opened, loaded: Loaded, bytes_per_second: float) -> _core.Engine:
    config, tuned, card, vocab = opened.config, opened.tuned, opened.device.card, opened.program.vocab
    return _core.Engine(
        opened.backend,
        loaded.executable,
        max_sequences=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_queue=config.max_queue,
        max_sequence_length=loaded.pool.longest(loaded.pages),
        prefix_cache=config.reuse_cache,
        prefix=list(range(vocab, vocab + opened.prefix)),
        prefix_in_pages=tuned is not None and tuned.in_pages,
        prefix_has_positions=tuned is None or tuned.has_positions,
        bytes_per_second=bytes_per_second,
        flops_per_second=card.flops_per_second if card and opened.own_kv_dtype != "fp32" else 0.0,
        weight_bytes=[float(size) for size in loaded.weight_bytes],
        fault=config.fault,
    )


def choose_kv_dtypes(opened: Opened, weights: list[_core.Weight]) -> kv_cache.Choice:
    """By KV_CACHE_ERROR."""
    count = min(kv_cache.CALIBRATION_TOKENS, opened.context)
    ids = opened.tokenizer.encode(kv_cache.CALIBRATION_TEXT)[:count]
    page_tokens = opened.config.seq_size_per_block
    return kv_cache.choose_dtypes(
        functools.partial(kv_cache.logits_of, opened.backend, opened.program, weights, ids, page_tokens),
        len(opened.program.cache_layers),
        opened.own_kv_dtype,
        opened.config.kv_cache_error,
    )


def read_tokenizer(config: Config, source: Checkpoint) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer_path or None, source, trust_remote_code=config.trust_remote_code)
    if config.chat_template:
        tokenizer.set_chat_template(*read_chat_template(config.chat_template))
    try:
        tokenizer.choose_chat_templates(config.default_chat_template_key, config.default_tool_use_template_key)
    except ValueError as error:
        raise ConfigError(f"DEFAULT_CHAT_TEMPLATE_KEY={config.default_chat_template_key}: {error}") from None
    return tokenizer


def check_ends(path: str, tokenizer: Tokenizer) -> None:
    """Ends of text that the model can never draw: ConfigError where there are no others, a warning where there are."""
    if not tokenizer.foreign_eos_ids:
        return
    outside = f"outside the model's vocabulary of {tokenizer.vocab_size} tokens"
    told = f"{path}: eos_token_id {tokenizer.foreign_eos_ids}: {outside}"
    if not tokenizer.eos_ids:
        raise ConfigError(f"{told}, so no answer could end (config.json, generation_config.json, or the tokenizer's files)")
    log.warning("%s, so none will end an answer", told)


def context_of(config: Config, program: _core.Program, tuned: Tuned | None) -> int:
    """MAX_SEQ_LEN, or all positions that the model has and a tuned prompt leaves."""
    taken = tuned.tokens if tuned and tuned.has_positions else 0
    positions = program.max_positions - taken
    if positions < 1:
        raise ConfigError(f"PTUNING_PATH: {taken} virtual tokens leave none of the model's {program.max_positions} positions")
    context = config.max_seq_len or positions
    if context > positions:
        less = f", {taken} of them taken by the tuned prompt (PTUNING_PATH)" if taken else ""
        raise ConfigError(f"MAX_SEQ_LEN={context}: the model has {program.max_positions} positions{less}; valid: 1 to {positions}")
    return context


def read_ptuning(config: Config, program: _core.Program, family: Family) -> Tuned | None:
    """What stands before every prompt. ConfigError where it does not fit the model."""
    folder = find_ptuning(config.ptuning_path, config.checkpoint_path)
    if not folder:
        return None
    try:
        if program.embeds:
            raise ValueError("tuned prompts are for models that generate, this one embeds or scores")
        tuned = open_ptuning(folder)
        tuned.check(program, family)
    except (OSError, ValueError) as error:
        raise ConfigError(f"PTUNING_PATH={folder}: {error}") from None
    return tuned


def make_backend(config: Config, device: Device, stored: str) -> tuple[_core.Backend, str]:
    """The device's backend, and the type of keys and values that suits it. `stored`: the dtype of the checkpoint's weights."""
    if device.card is None:
        if config.act_type in ("bf16", "fp16"):
            raise ConfigError(f"ACT_TYPE={config.act_type}: the CPU does not compute in it; valid: auto, fp32")
        exact = config.act_type == "fp32"
        backend = _core.cpu_backend(threads=config.threads, quantize_activations=not exact, isa=config.isa)
        return backend, "fp32" if exact else "fp16"
    if config.isa:
        raise ConfigError(f"ISA={config.isa}: that chooses kernels of the CPU, but the model runs on {device.card.name} (DEVICE)")
    try:
        compute = compute_dtype(config.act_type, stored, device.card.capability)
    except ValueError as error:
        raise ConfigError(f"ACT_TYPE={config.act_type}: {error}") from None
    if compute == "fp16" and stored in ("bf16", "fp32"):
        log.warning(
            "the model, stored in %s, is computed in fp16, which ends at 65504: outputs beyond end with an error (ACT_TYPE)", stored
        )
    return cuda_backend(device, compute, config.gpu_memory_utilization), compute


def model_name(path: str) -> str:
    """A file's name without its ending, or the folder's; a model of the hub keeps its whole name."""
    if is_hub_name(path):
        return path
    place = Path(path).resolve()
    if place.name == "config.json":
        place = place.parent
    return place.stem if place.suffix in (".gguf", ".json") else place.name
