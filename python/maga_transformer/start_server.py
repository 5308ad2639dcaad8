"""`python3 -m maga_transformer.start_server`: the server, configured by environment variables or flags."""

from __future__ import annotations

import sys


def main() -> None:
    from maga_transformer.cli import main as cli

    cli(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
