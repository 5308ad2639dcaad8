"""From a configuration to a Runtime: open, build, load weights, size the K/V pages from measured memory, start the engine."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maga_transformer import _core, checkpoint, kv_cache, loader, models, tokenizer
from maga_transformer.adapters.ptuning import Tuned, find_ptuning, open_ptuning
from maga_transformer.chat.named_templates import NAMED_TEMPLATES
from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.checkpoint.hub import is_hub_name
from maga_transformer.config import Config, ConfigError
from maga_transformer.device import Device, compute_dtype, cuda_backend, find_device
from maga_transformer.explain import stored_formats
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.measure import memory_bandwidth
from maga_transformer.memory import available_bytes
from maga_transformer.models import Family
from maga_transformer.models.irregular import sparse_keys
from maga_transformer.models.task import GENERATE
from maga_transformer.progress import loading_progress
from maga_transformer.request import RequestError
from maga_transformer.runtime import Description, Runtime

log = logging.getLogger(__name__)

_WHOLE_INPUT = 8192  # tokens of an input that must be read in one step, where MAX_NUM_BATCHED_TOKENS does not say
_PROBE_MEBIBYTES = 16  # a core, to measure a CPU's memory in some 10 ms


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
    try:
        device = find_device(config.device)
    except ValueError as error:
        raise ConfigError(f"DEVICE={config.device}: {error}") from None
    asked, config = config, config.for_device(device.defaults)
    source = checkpoint.open_checkpoint(config.checkpoint_path, config.load_format)
    if config.sparse_config_file:
        source.config.update(read_sparse_config(config.sparse_config_file))
    program, family = models.build_program(source, config.model_type or None, config.task)
    stored = stored_formats(program, family.checkpoint)
    tuned = read_ptuning(config, program, family)
    prefix = tuned.tokens if tuned else 0
    backend, own_kv_dtype = make_backend(config, device, source.dtype(family.embedding))
    words = tokenizer.load_tokenizer(config.tokenizer_path or None, source, trust_remote_code=config.trust_remote_code)
    if config.chat_template:
        words.set_chat_template(*read_chat_template(config.chat_template))
    try:
        words.choose_chat_templates(config.default_chat_template_key, config.default_tool_use_template_key)
    except ValueError as error:
        raise ConfigError(f"DEFAULT_CHAT_TEMPLATE_KEY={config.default_chat_template_key}: {error}") from None
    adaptive = config.kv_cache_dtype == "adaptive"
    kv_dtypes = [{"auto": own_kv_dtype, "adaptive": "int8"}.get(config.kv_cache_dtype, config.kv_cache_dtype)]
    kv_dtypes *= len(program.cache_layers)
    if "fp8_e4m3" in kv_dtypes:
        kv_cache.state_scales(program, family.checkpoint)
    page_tokens = config.seq_size_per_block
    page_bytes = program.page_bytes(page_tokens, kv_dtypes)
    taken = tuned.tokens if tuned and tuned.has_positions else 0
    positions = program.max_positions - taken
    if positions < 1:
        raise ConfigError(f"PTUNING_PATH: {prefix} virtual tokens leave none of the model's {program.max_positions} positions")
    context = config.max_seq_len or positions
    if context > positions:
        less = f", {taken} of them taken by the tuned prompt (PTUNING_PATH)" if taken else ""
        raise ConfigError(f"MAX_SEQ_LEN={context}: the model has {program.max_positions} positions{less}; valid: 1 to {positions}")
    if program.whole_prompts and not asked.max_num_batched_tokens:
        budget = max(config.max_num_batched_tokens, min(context, _WHOLE_INPUT))
        config = config.model_copy(update={"max_num_batched_tokens": budget})
    spare = int(tuned is not None and tuned.in_pages and prefix % page_tokens != 0)
    pool = Pool(config, page_bytes=page_bytes, context=context, prefix=prefix, spare=spare)
    free = device.card.free_bytes if device.card else available_bytes()
    given = pool.given(free)  # a size that cannot be should not cost a load

    bytes_per_second = device.card.bytes_per_second if device.card else memory_bandwidth(_PROBE_MEBIBYTES)
    with loading_progress() as progress:
        weights = loader.load_weights(
            backend, program, source, progress=progress, quantization=config.quantization, check=config.check_weights
        )
    loader.tell_of_widened(weights)
    if tuned:
        weights += tuned.add_to(program, backend)
    kv_shown = kv_cache.summary(kv_dtypes) if kv_dtypes else own_kv_dtype
    if adaptive and kv_dtypes:
        ids = words.encode(kv_cache.CALIBRATION_TEXT)[: min(kv_cache.CALIBRATION_TOKENS, context)]
        choice = kv_cache.choose_dtypes(
            functools.partial(kv_cache.logits_of, backend, program, weights, ids, page_tokens),
            len(kv_dtypes),
            own_kv_dtype,
            config.kv_cache_error,
        )
        kv_dtypes = choice.dtypes
        kv_shown = f"{kv_cache.summary(kv_dtypes)} (logits within {choice.error:.2%})"
        page_bytes = program.page_bytes(page_tokens, kv_dtypes)
        pool = replace(pool, page_bytes=page_bytes)
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
            kv_dtype=kv_dtypes or own_kv_dtype,
        )

    if given is not None:
        pages, measured = given
    elif device.card:  # the backend measures what its largest step leaves
        pages, measured = 0, f"GPU_MEMORY_UTILIZATION={config.gpu_memory_utilization:g}"
    else:
        pages, measured = pool.measured(available_bytes() - executable(1).buffer_bytes)
    model = executable(pages)
    if pages == 0:
        pages = model.limits.pages
        pool.check(pages, measured)
    if tuned:
        tuned.fill(model, program)
    buffer_bytes = model.buffer_bytes
    longest = pool.longest(pages)
    engine = _core.Engine(
        backend,
        model,
        max_sequences=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_queue=config.max_queue,
        max_sequence_length=longest,
        prefix_cache=config.reuse_cache,
        prefix=list(range(program.vocab, program.vocab + prefix)),
        prefix_in_pages=tuned is not None and tuned.in_pages,
        prefix_has_positions=tuned is None or tuned.has_positions,
        bytes_per_second=bytes_per_second,
        flops_per_second=device.card.flops_per_second if device.card and own_kv_dtype != "fp32" else 0.0,
        weight_bytes=[float(weight.bytes) for weight in weights],
        fault=config.fault,
    )
    token_bytes = words.token_bytes()
    engine.set_vocabulary(token_bytes)
    description = Description(
        names=config.served_model_name or [model_name(config.checkpoint_path)],
        family=program.family,
        stored=stored,
        device=backend.describe(),
        context=longest - prefix,
        kv_dtype=kv_shown,
        kv_bytes=pages * page_bytes,
        kv_tokens=pages * page_tokens,
        kv_measured=measured,
        weight_bytes=sum(weight.bytes for weight in weights),
        buffer_bytes=buffer_bytes,
        bytes_per_second=bytes_per_second,
        card_bytes=device.card.total_bytes if device.card else 0,
        load_seconds=time.monotonic() - started,
        sampling_defaults=defaults,
        task=family.task,
        segment_shift=family.segment_shift(),
        embedding_width=0 if not program.embeds else family.hidden if program.row_per_token else program.logits_width,
        whole_prompts=program.whole_prompts,
        prefix=f"{prefix} virtual tokens from {tuned.file}" if tuned else "",
    )
    if words.foreign_eos_ids and family.task.kind == GENERATE:
        outside = f"outside the model's vocabulary of {words.vocab_size} tokens"
        told = f"{config.checkpoint_path}: eos_token_id {words.foreign_eos_ids}: {outside}"
        if not words.eos_ids:
            raise ConfigError(f"{told}, so no answer could end (config.json, generation_config.json, or the tokenizer's files)")
        log.warning("%s, so none will end an answer", told)
    runtime = Runtime(config, engine, words, token_bytes, description)
    try:
        runtime.check_stop_words()
    except (RequestError, ValueError) as error:
        raise ConfigError(
            f"STOP_WORDS_STR, STOP_WORDS_LIST, FORCE_STOP_WORDS_STR, FORCE_STOP_WORDS_LIST: no request could use these: {error}"
        ) from None
    return runtime


def read_chat_template(setting: str) -> tuple[str, str]:
    """The template, and what to call it in messages."""
    if setting in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[setting], f"the template {setting}"
    if "{" in setting:  # no file's name
        return setting, "CHAT_TEMPLATE"
    try:
        return Path(setting).read_text(encoding="utf-8"), setting
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"CHAT_TEMPLATE={setting}: {error}; names: {', '.join(NAMED_TEMPLATES)}") from None


def read_sparse_config(path: str) -> dict[str, Any]:
    try:
        return sparse_keys(read_json_object(path), path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"SPARSE_CONFIG_FILE={path}: {error}") from None


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
    return cuda_backend(device, compute, config.gpu_memory_utilization), compute


@dataclass(frozen=True)
class Pool:
    """How many pages the K/V cache gets, and why. Its sizes are pairs of both."""

    config: Config  # of the device: without zeros
    page_bytes: int
    context: int  # tokens of the longest sequence
    prefix: int = 0  # and of what stands before it
    spare: int = 0  # pages that no sequence can have: of a prefix, one that is copied

    def _for(self, tokens: int) -> int:
        return -(-(self.prefix + tokens) // self.config.seq_size_per_block) + self.spare

    def longest(self, pages: int) -> int:
        """Of a sequence, prefix included."""
        return min(self.context + self.prefix, (pages - self.spare) * self.config.seq_size_per_block)

    @property
    def per_sequence(self) -> int:
        return self._for(self.context)

    def given(self, free: int) -> tuple[int, str] | None:
        """The size that the user asked for; None: no size. `free`: available bytes. ConfigError when there are fewer."""
        asked = self.config.kv_cache_mem_mb
        if asked < 0:
            return None
        why = f"KV_CACHE_MEM_MB={asked}"
        if asked << 20 > free:
            raise ConfigError(f"{why}: only {free >> 20} MiB of memory are available")
        pages = (asked << 20) // self.page_bytes
        self.check(pages, why)
        return pages, why

    def measured(self, free: int) -> tuple[int, str]:
        """max_num_seqs full sequences, but at most half of the `free` bytes that weights and buffers leave."""
        wanted = self.config.max_num_seqs * self.per_sequence
        pages = max(0, min(wanted, free // 2 // self.page_bytes))
        why = (
            f"{self.config.max_num_seqs} sequences of full length"
            if pages == wanted
            else f"half of the {free >> 20} MiB that are available"
        )
        self.check(pages, why)
        return pages, why

    def check(self, pages: int, why: str) -> None:
        """ConfigError when not even one sequence fits; a warning when the longest does not."""
        context_given = self.config.max_seq_len > 0
        smallest = self.per_sequence if context_given else self._for(2)
        if pages < smallest:
            raise ConfigError(
                f"the K/V cache would have {pages} pages of {self.page_bytes >> 10} KiB ({why}), which is too little: "
                f"{'MAX_SEQ_LEN=' + str(self.context) if context_given else 'the shortest sequence'} needs "
                f"{smallest * self.page_bytes / 2**20:.1f} MiB; "
                "raise KV_CACHE_MEM_MB" + (" or lower MAX_SEQ_LEN" if context_given else "")
            )
        if pages < self.per_sequence:
            log.warning(
                "the K/V cache holds %d tokens (%s): the context is lowered from %d to that; set KV_CACHE_MEM_MB or "
                "MAX_SEQ_LEN to choose",
                self.longest(pages) - self.prefix,
                why,
                self.context,
            )


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
    wrong = _impossible(chosen)
    if wrong:
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {wrong}")
    return chosen


def check_own_defaults(checkpoint: Path) -> None:
    """Names what cannot be in the model's own generation_config.json, which is used if GENERATION_CONFIG_PATH says so."""
    try:
        sampling_defaults(str(checkpoint / "generation_config.json") if (checkpoint / "generation_config.json").is_file() else "")
    except ConfigError as error:
        log.warning("%s; it is not used, but would be refused", error)


def _impossible(fields: Mapping[str, Any]) -> str:
    """All that is wrong with them, each by its name and value."""
    wrong = []
    for chosen in ({name: value} for name, value in fields.items()):
        try:
            GenerateConfig.parse(chosen)
        except RequestError as error:
            wrong.append(error.message)
    return "; ".join(wrong)


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
    """A file's name without its ending, or the folder's; a model of the hub keeps its whole name."""
    if is_hub_name(path):
        return path
    place = Path(path).resolve()
    if place.name == "config.json":
        place = place.parent
    return place.stem if place.suffix in (".gguf", ".json") else place.name
