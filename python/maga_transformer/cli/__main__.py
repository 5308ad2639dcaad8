"""`python -m maga_transformer.cli` is `maga`."""

from maga_transformer.cli import main

main()
