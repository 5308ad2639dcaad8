"""docs/settings.md: every setting of Config with its flags, environment variables and default.

`python tests/settings_table.py` writes it anew; tests/server/test_config.py fails where it is not what Config says."""

from pathlib import Path

from maga_transformer.cli.options import shown
from maga_transformer.config import CONFIG_FILE, Config, environment_names, flag_names, groups
from maga_transformer.unsupported import FOREIGN_FLAGS, INEFFECTIVE, REFUSED

FILE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = f"""# Settings

A setting comes from a flag (`maga serve --port 80`), an environment variable (`START_PORT=80`), a line of a YAML file
(`port: 80`; the file is named by `--config` or `{CONFIG_FILE}`), or its default; the first of these that is there wins. A YAML file
takes the names of the first column and those of the flags, with `-` or `_`. Switches have a `--no-` twin, in the environment they
are 1 or 0. `maga config` prints what each setting is and where it came from. Unknown settings are refused, with the nearest name.
"""
REFUSED_HEAD = """
## Not supported

Variables of RTP-LLM that ask for what this engine cannot do. Other values than those that ask for nothing are refused.

| variable | why |
|---|---|
"""
INEFFECTIVE_HEAD = """
## Without effect

Variables of RTP-LLM that tune parts which this engine does not have, or sizes by itself. They are named in the log: """
FOREIGN_HEAD = """
## vLLM's other flags

`maga serve` takes these flags of `vllm serve` too.

| flag | here |
|---|---|
"""


def document() -> str:
    parts = [HEAD]
    for title, fields in groups().items():
        parts.append(f"\n## {title}\n\n| setting | flags | environment | default | |\n|---|---|---|---|---|\n")
        for name, field in fields.items():
            cells = [
                name,
                " ".join(f"`{flag}`" for flag in flag_names(name, field)),
                " ".join(f"`{variable}`" for variable in environment_names(name, field)),
                shown(Config.model_fields[name].get_default(call_default_factory=True)),
                (field.description or "").replace("|", "\\|"),
            ]
            parts.append("| " + " | ".join(cells) + " |\n")
    parts.append(REFUSED_HEAD)
    parts += [f"| `{name}` | {reason} |\n" for name, (_, reason) in REFUSED.items()]
    parts.append(INEFFECTIVE_HEAD + ", ".join(f"`{name}`" for name in sorted(INEFFECTIVE)) + ".\n")
    parts.append(FOREIGN_HEAD)
    for flag in FOREIGN_FLAGS:
        worth = "no effect" if flag.neutral is None else "refused where it asks for something"
        parts.append(f"| {' '.join(f'`{name}`' for name in flag.flags)} | {worth}: {flag.reason} |\n")
    return "".join(parts)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
