"""Files that settings name: a chat template, a pruned model's sizes, default sampling values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maga_transformer.chat.named_templates import NAMED_TEMPLATES
from maga_transformer.checkpoint.files import read_json_object
from maga_transformer.config import ConfigError
from maga_transformer.generate_config import GenerateConfig
from maga_transformer.models.irregular import sparse_keys
from maga_transformer.request import RequestError

log = logging.getLogger(__name__)

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


def sampling_defaults(path: str) -> Mapping[str, Any]:
    """The fields of a generation_config.json that say how to sample; the others belong to its model."""
    if not path:
        return {}
    place = Path(path)
    if place.is_dir():
        place = place / "generation_config.json"
    try:
        content = read_json_object(str(place))
    except (OSError, ValueError) as error:
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {error}") from None
    chosen = {name: content[name] for name in _SAMPLING_DEFAULTS if content.get(name) is not None}
    wrong = _impossible(chosen)
    if wrong:
        raise ConfigError(f"GENERATION_CONFIG_PATH={path}: {wrong}")
    return chosen


def check_own_defaults(checkpoint: Path) -> None:
    """Names what cannot be in the model's own generation_config.json, which is used if GENERATION_CONFIG_PATH says so."""
    place = checkpoint / "generation_config.json"
    try:
        sampling_defaults(str(place) if place.is_file() else "")
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
