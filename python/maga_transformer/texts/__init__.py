"""Texts that come with the package, older than any copyright, each paragraph on one line:

alice   Lewis Carroll, Alice's Adventures in Wonderland (1865), chapters I to III: what `maga eval` reads
holmes  Arthur Conan Doyle, The Adventures of Sherlock Holmes (1892), stories I to V: what `maga quantize` calibrates with"""

from pathlib import Path


def read_text(file: str, name: str) -> tuple[str, str]:
    """What to call it, and the text: of a file, or, where `file` is "", of the package's `name`."""
    place = Path(file) if file else Path(__file__).with_name(f"{name}.txt")
    try:
        return place.name, place.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from None
