"""The one typed configuration, from flags, environment and a YAML file. Nothing else in the project reads the environment."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from maga_transformer.chat.dialect import Dialect, find_dialect
from maga_transformer.unsupported import INEFFECTIVE, REFUSED


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it as the user spelt it, and what would be valid."""


def _json_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos}); a JSON list is expected") from None


def _comma_list(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


JsonStrings = Annotated[list[str], BeforeValidator(_json_list)]
JsonIdLists = Annotated[list[list[int]], BeforeValidator(_json_list)]


def _setting(
    default: Any,
    help: str,
    *,
    env: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    group: str = "",
    secret: bool = False,
    **constraints: Any,
) -> Any:
    """A field whose environment name is its own in capitals and whose flag its own with dashes, unless others are given.
    `group` is the title over it and the fields that follow. The value of a secret one is never shown."""
    extra: dict[str, Any] = {"env": list(env), "flags": list(flags), "group": group, "secret": secret}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


_DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _dtype_name(value: object) -> object:
    """vLLM's names are taken too."""
    return _DTYPE_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


_OFF, _ON = ("0", "false", "off", "no", "none"), ("1", "true", "on", "yes")


def _kv_dtype_name(value: object) -> object:
    name = _dtype_name(value)
    return "fp8_e4m3" if name == "fp8" else name


_NOT_QUANTIZED = (*_OFF, "auto", "fp16", "bf16", "fp32")


def _quantization_name(value: object) -> object:
    """RTP-LLM's INT8_MODE is a switch, its WEIGHT_TYPE also names types that are none of int8, int4 and fp8."""
    if not isinstance(value, str):
        return value
    return {"1": "int8", "true": "int8"}.get(value.lower(), "" if value.lower() in _NOT_QUANTIZED else value.lower())


_TASK_NAMES = {  # RTP-LLM's
    "language_model": "generate",
    "dense_embedding": "embed",
    "seq_classification": "score",
    "reranker": "score",
    "1": "embed",
    "0": "auto",
}


def _task_name(value: object) -> object:
    return _TASK_NAMES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


# What 0 stands for in settings whose best value depends on the device.
DEVICE_DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "cuda from 64 GiB": {"max_num_seqs": 1024, "max_num_batched_tokens": 8192},
}


def _by_device(name: str) -> str:
    return "0: " + ", ".join(f"{defaults[name]} on {kind}" for kind, defaults in DEVICE_DEFAULTS.items())


class Config(BaseModel):
    """Every setting. Load it with `Config.load`, which knows where each value came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_path: str = _setting(
        "",
        "folder of Hugging Face, Meta or Megatron-LM, a GGUF file, or a model of the hub (ORG/NAME, ORG/NAME/FILE.gguf)",
        flags=("--checkpoint-path", "--model"),
        group="The model",
    )
    tokenizer_path: str = _setting(
        "", "tokenizer folder or file; empty: the checkpoint's own", flags=("--tokenizer-path", "--tokenizer")
    )
    trust_remote_code: bool = _setting(
        False, "run code of the checkpoint (by transformers) where its tokenizer is nothing else; no other code of it ever runs"
    )
    load_format: Literal["auto", "dummy"] = _setting(
        "auto", "auto: the checkpoint's tensors; dummy: random weights of the shapes that config.json gives"
    )
    check_weights: Literal["warn", "refuse", "off"] = _setting(
        "warn", "weights that hold NaN or an infinity: warn names them in the log, refuse ends the start, off does not look"
    )
    sparse_config_file: str = _setting(
        "", "JSON file that says how the layers of a pruned model differ (layer_head_num, layer_inter_size)"
    )
    ptuning_path: str = _setting(
        "",
        "folder of what was tuned to stand before every prompt (PEFT, P-Tuning v2); empty: the checkpoint's own `ptuning`, if any",
    )
    model_type: str = _setting("", "model family; empty: read from the checkpoint")
    task: Annotated[Literal["auto", "generate", "embed", "score"], BeforeValidator(_task_name)] = _setting(
        "auto", "what the model is served for; auto: what its files say", env=("TASK", "TASK_TYPE", "EMBEDDING_MODEL")
    )
    quantization: Annotated[Literal["", "int8", "int4", "fp8"], BeforeValidator(_quantization_name)] = _setting(
        "",
        "rounds the weights of linears while loading: int8 or fp8 (e4m3) by row, int4 by 128 columns; empty: as they are stored",
        env=("QUANTIZATION", "WEIGHT_TYPE", "INT8_MODE"),
        flags=("--quantization", "-q"),
    )
    served_model_name: Annotated[list[str], BeforeValidator(_comma_list)] = _setting(
        [], "names the model answers to, comma separated; empty: the checkpoint's name"
    )
    generation_config_path: str = _setting(
        "",
        "folder (or file) of a generation_config.json with default sampling values",
        flags=("--generation-config-path", "--generation-config"),
    )
    stop_words_str: JsonStrings = _setting([], "JSON list of strings that end every output")
    stop_words_list: JsonIdLists = _setting([], "JSON list of token id lists that end every output")
    force_stop_words_str: JsonStrings = _setting([], "JSON list of strings that replace the model's own stop tokens")
    force_stop_words_list: JsonIdLists = _setting([], "JSON list of token id lists that replace the model's own stop tokens")
    force_stop_words: bool = _setting(
        False, "stop_words_str and stop_words_list replace the model's own stop tokens, rather than add to them"
    )

    device: Annotated[str, BeforeValidator(_lower)] = _setting(
        "auto",
        "auto (a GPU if there is a usable one), cpu, cuda, or cuda:N",
        group="Arithmetic",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    act_type: Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_dtype_name)] = _setting(
        "auto",
        "type that a GPU computes in, auto: the checkpoint's own, bf16 where that is neither bf16 nor fp16; on a CPU auto (int8 "
        "blocks for quantised layers, fast) or fp32 (exact)",
        flags=("--dtype", "--act-type"),
    )
    threads: int = _setting(0, "threads that compute; 0: one per usable core", ge=0, le=1024)
    isa: str = _setting("", "instruction set of the kernels; empty: the best this machine has")

    max_seq_len: int = _setting(
        0,
        "limit of prompt and output together; 0: the model's own",
        flags=("--max-seq-len", "--max-model-len"),
        group="Memory and batching",
        ge=0,
    )
    seq_size_per_block: int = _setting(16, "tokens of a K/V page", flags=("--seq-size-per-block", "--block-size"), ge=1, le=1024)
    kv_cache_mem_mb: int = _setting(-1, "MiB of the K/V pages; -1: sized from measured memory", ge=-1)
    gpu_memory_utilization: float = _setting(0.9, "share of a GPU's memory for weights, buffers and K/V pages together", gt=0, le=1)
    kv_cache_dtype: Annotated[
        Literal["auto", "fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "adaptive"], BeforeValidator(_kv_dtype_name)
    ] = _setting(
        "auto",
        "element type of keys and values; auto: on a GPU the type it computes in, on a CPU fp16 (fp32 with act_type fp32); int8, "
        "fp8 (fp8_e4m3), fp8_e5m2: 8 bits with a scale for each head of a token, in fp8_e4m3 the checkpoint's if it has some; "
        "adaptive: 8 bits in as many layers as kv_cache_error allows",
    )
    kv_cache_error: float = _setting(
        0.02, "relative error of a text's logits that kv_cache_dtype adaptive may cause, measured at start", gt=0, lt=1
    )
    max_num_seqs: int = _setting(0, f"sequences that run at once; {_by_device('max_num_seqs')}", ge=0, le=65536)
    max_num_batched_tokens: int = _setting(
        0,
        f"tokens a step may carry; {_by_device('max_num_batched_tokens')}; a model that must read an input in one step: its "
        "context, up to 8192, if that is more",
        ge=0,
        le=1 << 20,
    )
    max_queue: int = _setting(1024, "requests that may wait; more are refused with 429", ge=1)
    concurrency_limit: int = _setting(
        0, "requests in the engine at once, running or waiting; more are refused; 0: max_queue alone decides", ge=0
    )
    reuse_cache: bool = _setting(
        True,
        "reuse the K/V pages of common prefixes",
        env=("REUSE_CACHE", "USE_BLOCK_CACHE"),
        flags=("--reuse-cache", "--enable-prefix-caching"),
    )

    chat_template: str = _setting(
        "",
        "file of a chat template (Jinja), the template itself, or chatml, llama-2, llama-3, mistral, gemma, vicuna, alpaca, "
        "xverse, aquila, phi-2, plain; "
        "empty: the model's own",
        group="Chats",
    )
    default_chat_template_key: str = _setting("default", "which of the model's named templates conversations without tools take")
    default_tool_use_template_key: str = _setting("tool_use", "which one, if it is there, conversations with tools take")
    tool_call_parser: str = _setting(
        "auto", "how the model writes tool calls; auto: as its chat template says, none: not looked for"
    )
    reasoning_parser: str = _setting(
        "auto", "how the model writes its thoughts; auto: as its chat template says, none: left in the text"
    )
    think_mode: bool = _setting(
        False,
        "look for thoughts between think_start_tag and think_end_tag where the chat template does not say how they are marked",
    )
    think_start_tag: str = _setting("", "mark before a thought, instead of the one that the chat template says; empty: that one")
    think_end_tag: str = _setting("", "mark behind a thought; empty: the one that the chat template says")
    reasoning_field: Literal["both", "reasoning_content", "reasoning", "none"] = _setting(
        "both", "names under which chat answers give the thoughts"
    )
    enable_auto_tool_choice: bool = _setting(True, "tools may be called where a request does not say tool_choice")
    trust_request_chat_template: bool = _setting(False, "take chat templates from requests: they are programs of the clients")
    strict: bool = _setting(
        False, "refuse unknown fields on OpenAI's routes; false: they are ignored and named in a header", env=("MAGA_STRICT",)
    )

    host: str = _setting("0.0.0.0", "address to listen on", env=("MAGA_HOST",), group="The server")
    port: int = _setting(8088, "port to listen on; 0: any free one", env=("START_PORT", "PORT"), ge=0, le=65535)
    timeout_keep_alive: int = _setting(
        75, "seconds an idle connection is kept; more than a proxy's, or it reuses closed ones", ge=1
    )
    drain_timeout: float = _setting(30.0, "seconds that running requests have to finish after SIGTERM", ge=0, allow_inf_nan=False)
    api_key: Annotated[list[str], BeforeValidator(_comma_list)] = _setting(
        [], "keys that clients must send, comma separated; empty: none is wanted", env=("MAGA_API_KEY",), secret=True
    )
    admin_api_key: Annotated[list[str], BeforeValidator(_comma_list)] = _setting(
        [], "keys for what changes or shows the server itself", env=("MAGA_ADMIN_API_KEY",), secret=True
    )
    allowed_origins: Annotated[list[str], BeforeValidator(_comma_list)] = _setting(
        [], "origins whose pages may ask this server, comma separated, * for all; empty: none"
    )
    read_timeout: float = _setting(
        15.0,
        "seconds in which a request's head must have come, and that its body may be silent or behind 16 KiB/s",
        gt=0,
        allow_inf_nan=False,
    )
    root_path: str = _setting("", "path under which a proxy shows this server")
    max_body_mb: int = _setting(32, "largest request body in MiB", ge=1, le=4096)
    ssl_certfile: str = _setting("", "PEM file of the certificate (and those above it) for HTTPS; empty: HTTP")
    ssl_keyfile: str = _setting("", "PEM file of the certificate's key; empty: it is in ssl_certfile")
    chat_page: bool = _setting(True, "answer a browser's GET / with a page to chat and to watch the engine")

    ft_server_test: bool = _setting(False, "log requests to the console", group="Operation")
    log_level: Annotated[Literal["", "DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)] = _setting(
        "",
        "level of the log; empty: INFO with ft_server_test, else WARNING",
        env=("LOG_LEVEL", "PY_LOG_LEVEL"),
        flags=("--log-level", "--uvicorn-log-level"),
    )
    log_format: Literal["text", "json"] = _setting(
        "text", "lines of the log; prompts and outputs are in neither", env=("LOG_FORMAT",)
    )
    stall_timeout: float = _setting(
        120.0,
        "seconds without progress, while work waits, after which /health fails and the log says where each thread is",
        gt=0,
        allow_inf_nan=False,
    )
    metrics_prefix: str = _setting(
        "maga_", "before the names of /metrics; `vllm:` makes them vLLM's", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$"
    )
    otlp_traces_endpoint: str = _setting(
        "",
        "URL of an OpenTelemetry collector that gets a span of every request (OTLP over HTTP); empty: none",
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",),
    )
    fault: str = _setting("", "fault to inject, kind:place:count (tests only)", env=("MAGA_FAULT",))

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _validate_together(self) -> Config:
        self._check_budget()
        self.dialect([])
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError(f"ssl_keyfile={self.ssl_keyfile} without ssl_certfile: HTTPS needs both")
        return self

    def dialect(self, templates: Sequence[str]) -> Dialect:
        """Of a model with these chat templates. ValueError naming the setting that cannot be."""
        tags = (self.think_start_tag, self.think_end_tag)
        if bool(tags[0]) != bool(tags[1]):
            raise ValueError(
                f"think_start_tag={tags[0]!r} and think_end_tag={tags[1]!r}: a thought needs both marks, or neither is set"
            )
        return find_dialect(
            templates, self.tool_call_parser, self.reasoning_parser, tags if tags[0] else None, think=self.think_mode
        )

    def _check_budget(self) -> None:
        if self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step could not carry one token of every running sequence; raise the first or lower the second"
            )

    def for_device(self, kind: str) -> Config:
        """With the device's defaults (DEVICE_DEFAULTS) in place of zeros. ConfigError where those contradict what was set."""
        chosen = {name: value for name, value in DEVICE_DEFAULTS[kind].items() if getattr(self, name) == 0}
        settled = self.model_copy(update=chosen)
        try:
            settled._check_budget()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return settled

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each value that is not a default came from: "flag --port", "environment START_PORT", a file's name."""
        return self._sources

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None, file: str = "") -> Config:
        """Flags win over the environment, the environment over the file. `environ` defaults to the process's own; pass {} for
        none. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        file = file or environ.get(CONFIG_FILE, "")
        values: dict[str, object] = {}
        sources: dict[str, str] = {}
        spelt: dict[str, str] = {}
        for layer in (_from_file(file), _from_environment(environ), _from_flags(flags or {})):
            for name, (value, spelling, source) in layer.items():
                values[name], spelt[name], sources[name] = value, spelling, source
        try:
            config = cls(**values)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(item, spelt) for item in error.errors())) from None
        config._sources.update(sources)
        return config

    @classmethod
    def without_environment(cls, **settings: object) -> Config:
        """For a library's caller: only what is passed counts."""
        return cls.load(settings, environ={})


CONFIG_FILE = "MAGA_CONFIG"  # the environment's name for a YAML file of settings
Layer = dict[str, tuple[object, str, str]]  # field -> (value, as the user spelt it, source)


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def public_value(config: Config, name: str) -> Any:
    """A setting's value, for people."""
    value = getattr(config, name)
    return f"{len(value)} set" if _extra(Config.model_fields[name])["secret"] and value else value


def environment_names(name: str, field: FieldInfo) -> list[str]:
    return _extra(field)["env"] or [name.upper()]


def flag_names(name: str, field: FieldInfo) -> list[str]:
    return _extra(field)["flags"] or ["--" + name.replace("_", "-")]


def repeatable(field: FieldInfo) -> bool:
    """Whether it is a comma separated list, whose flag may also be given several times."""
    return any(isinstance(part, BeforeValidator) and part.func is _comma_list for part in field.metadata)


def groups() -> dict[str, dict[str, FieldInfo]]:
    """The settings under the titles that help, documents and `maga config` give them."""
    grouped: dict[str, dict[str, FieldInfo]] = {}
    title = ""
    for name, field in Config.model_fields.items():
        title = _extra(field)["group"] or title
        grouped.setdefault(title, {})[name] = field
    return grouped


def _names() -> dict[str, str]:
    """Every spelling that a flag, a keyword or a file may use -> field."""
    names = {}
    for name, field in Config.model_fields.items():
        names[name] = name
        for flag in flag_names(name, field):
            if flag.startswith("--"):
                names[flag[2:].replace("-", "_")] = name
    return names


def _resolve(key: str, where: str) -> str:
    names = _names()
    field = names.get(key.replace("-", "_"))
    if field is None:
        close = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
        raise ConfigError(
            f"{key}: unknown setting{where}"
            + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(Config.model_fields)}")
        )
    return field


def _from_flags(flags: Mapping[str, object]) -> Layer:
    return {_resolve(key, ""): (value, key, f"flag {key}") for key, value in flags.items() if value is not None}


# RTP-LLM's switches: the setting that each turns on, and to what.
_SWITCHES = {"INT8_KV_CACHE": ("kv_cache_dtype", "int8"), "FP8_KV_CACHE": ("kv_cache_dtype", "fp8_e4m3")}


def _from_environment(environ: Mapping[str, str]) -> Layer:
    layer: Layer = {}
    known = {CONFIG_FILE}
    for name, field in Config.model_fields.items():
        for env in environment_names(name, field):
            known.add(env)
            value = environ.get(env)
            if not value:
                continue
            if name in layer and layer[name][0] != value:
                raise ConfigError(
                    f"{layer[name][1]}={layer[name][0]} and {env}={value} are the same setting with two values; keep one"
                )
            layer[name] = (value, env, f"environment {env}")
    for env, (name, meaning) in _SWITCHES.items():
        value = environ.get(env, "").strip().lower()
        if not value or value in _OFF:
            continue
        if value not in _ON:
            raise ConfigError(f"{env}={_cut(value)}: a switch; valid: 0 or 1")
        if name in layer and Config.model_fields[name].default != layer[name][0] != meaning:
            raise ConfigError(f"{layer[name][1]}={layer[name][0]} and {env}={value} are the same setting with two values; keep one")
        layer[name] = (meaning, env, f"environment {env}")
    for env, (neutral, reason) in REFUSED.items():
        value = environ.get(env)
        if value is not None and value.strip().lower() not in neutral:
            raise ConfigError(f"{env}={_cut(value)}: {reason}")
    for env in environ:
        if env.startswith("MAGA_") and env not in known:
            close = difflib.get_close_matches(env, known, n=1)
            raise ConfigError(f"{env}: unknown setting in the environment" + (f"; did you mean {close[0]}?" if close else ""))
    return layer


def _from_file(file: str) -> Layer:
    if not file:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {file}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {file}: a mapping of settings is expected, not {type(content).__name__}")
    return {_resolve(str(key), f" in {file}"): (value, str(key), file) for key, value in content.items()}


def hub_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Where models of the Hugging Face hub are kept, as its own tools have it."""
    environ = os.environ if environ is None else environ
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "hub").expanduser()


def hub_offline(environ: Mapping[str, str] | None = None) -> bool:
    environ = os.environ if environ is None else environ
    return any(environ.get(name, "").strip().lower() in _ON for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_endpoint(environ: Mapping[str, str] | None = None) -> str:
    environ = os.environ if environ is None else environ
    return (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def ineffective_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Names set in the environment that tune parts this engine does not have: harmless, but never silent."""
    environ = os.environ if environ is None else environ
    return [name for name in INEFFECTIVE if environ.get(name)]


def _explain(error: Any, spelt: Mapping[str, str]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    place = spelt.get(name, name) + "".join(f"[{part}]" for part in error["loc"][1:])
    field = Config.model_fields.get(name)
    value = "..." if name in Config.model_fields and _extra(Config.model_fields[name])["secret"] else _cut(error["input"])
    return f"{place}={value}: {message}" + (f" ({field.description})" if field else "")


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= 64 else text[:61] + "..."
