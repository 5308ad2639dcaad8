"""What only the administrator may see and do."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from maga_transformer import __version__
from maga_transformer.config import Config, public_value
from maga_transformer.generate_config import validate
from maga_transformer.request import Fault
from maga_transformer.server.body import json_object
from maga_transformer.server.errors import encode
from maga_transformer.server.state import State


class LogLevelRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


def _none(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value:
        raise ValueError("adapters are not supported yet; valid: {}")
    return value


class PeftInfo(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    lora_info: Annotated[dict[str, Any] | None, AfterValidator(_none), Field(json_schema_extra={"maxProperties": 0})] = None


class UpdateRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    peft_info: PeftInfo | None = None


async def server_info(request: Request) -> Response:
    """Every setting with its value and where it came from; keys are not among them."""
    runtime = State.of(request).runtime
    config, about = runtime.config, runtime.description
    settings = {
        name: {"value": public_value(config, name), "source": config.sources.get(name, "default")} for name in Config.model_fields
    }
    body = {"version": __version__, "model": about.names[0], "family": about.family, "device": about.device, "settings": settings}
    return Response(encode(body), media_type="application/json")


async def update(request: Request) -> Response:
    """RTP-LLM's: the whole set of adapters that should be served. There are none yet, so only the empty set is taken."""
    validate(UpdateRequest, await json_object(request, State.of(request).body_limit), lambda _: Fault.update)
    return Response(encode({"status": "ok"}), media_type="application/json")


async def set_log_level(request: Request) -> Response:
    """RTP-LLM's: {"log_level": "DEBUG"}."""
    asked = validate(LogLevelRequest, await json_object(request, State.of(request).body_limit))
    logging.getLogger().setLevel(asked.log_level)
    return Response(encode({"status": "ok"}), media_type="application/json")
