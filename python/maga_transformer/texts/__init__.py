"""Texts that come with the package, older than any copyright, each paragraph on one line:

alice   Lewis Carroll, Alice's Adventures in Wonderland (1865), chapters I to III: what `maga eval` reads
holmes  Arthur Conan Doyle, The Adventures of Sherlock Holmes (1892), stories I to V: what `maga quantize` calibrates with"""

from pathlib import Path


def text_path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.txt")
