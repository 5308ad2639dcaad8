"""Options of commands that are made from the settings of Config, and from vLLM's flags that mean nothing here."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from maga_transformer.config import Config, ConfigError, environment_names, flag_names, groups, repeatable
from maga_transformer.unsupported import FOREIGN_FLAGS, ForeignFlag

Path = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", help="model folder or GGUF file; without: CHECKPOINT_PATH", show_default=False),
]
File = Annotated[
    str,
    typer.Option(
        "--config", metavar="FILE", help="YAML of settings; flags and environment win over it [MAGA_CONFIG]", show_default=False
    ),
]


def with_settings(command: Callable[..., None], *, leave_out: Sequence[str] = (), foreign: bool = False) -> Callable[..., None]:
    """Gives a command one option a setting of Config, but for the groups to leave out, and passes those that were given as its
    `settings`. `foreign`: it takes vLLM's other flags too, says what they are worth, and refuses those that ask for something."""
    own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values() if parameter.name != "settings"]
    options = []
    for title, fields in groups().items():
        if title in leave_out:
            continue
        for name, field in fields.items():
            switch = field.annotation is bool
            flags = flag_names(name, field)
            default = shown(field.get_default(call_default_factory=True))
            option = typer.Option(
                *([f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags] if switch else flags),
                help=f"{field.description} [{', '.join(environment_names(name, field))}; {default}]",
                metavar=None if switch else "VALUE",
                show_default=False,
                rich_help_panel=title,
            )
            kind = bool | None if switch else list[str] | None if repeatable(field) else str | None
            options.append(_parameter(name, Annotated[kind, option]))
    settings = {option.name for option in options}
    strangers = {f"foreign_{index}": flag for index, flag in enumerate(FOREIGN_FLAGS if foreign else ())}
    for name, flag in strangers.items():
        option = typer.Option(*flag.flags, hidden=True)
        options.append(_parameter(name, Annotated[str | None if flag.takes_value else bool | None, option]))

    def call(**values: Any) -> None:
        for name, flag in strangers.items():
            _meet(flag, values.pop(name))
        taken = {name: values.pop(name) for name in settings}
        given = {name: (",".join(value) or None) if isinstance(value, list) else value for name, value in taken.items()}
        command(**values, settings={name: value for name, value in given.items() if value is not None})

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    call.__signature__ = inspect.Signature(parameters + options)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters + options}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


def several_names(arguments: Sequence[str]) -> list[str]:
    """`--served-model-name A B` as vLLM takes it, to a flag for each name. A path behind it is the model's."""
    spread: list[str] = []
    naming = False
    for argument in arguments:
        if argument.startswith("-"):
            naming = argument.replace("_", "-") == "--served-model-name"
        elif naming and not spread[-1].startswith("-"):
            naming = not (argument.startswith(("/", "./", "../", "~")) or os.path.exists(argument))
            spread += ["--served-model-name"] if naming else []
        spread.append(argument)
    return spread


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _meet(flag: ForeignFlag, value: str | bool | None) -> None:
    if value is None:
        return
    if flag.neutral is None:
        print(f"note: {flag.flags[0]} has no effect here: {flag.reason}", file=sys.stderr)
    elif str(value).lower() not in flag.neutral:
        raise ConfigError(f"{flag.flags[0]}{f'={value}' if flag.takes_value else ''}: {flag.reason}")


def shown(value: object) -> str:
    return "none" if value in ("", []) else str(value)


def load(path: str | None, file: str, settings: dict[str, object]) -> Config:
    given = {"checkpoint_path": path} if path else {}
    if path and settings.get("checkpoint_path") not in (None, path):
        raise ConfigError(f"PATH={path} and --checkpoint-path={settings['checkpoint_path']} name two checkpoints; keep one")
    return Config.load({**settings, **given}, file=file)
