"""The alphabet of byte-level BPE (GPT-2): every byte has a printable letter, so that any text is a string of letters."""


def _alphabet() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return letters


LETTER_OF = _alphabet()
_BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}
_LETTERS = frozenset(_BYTE_OF)


def in_alphabet(token: str) -> bool:
    return _LETTERS.issuperset(token)


def spelled(data: bytes) -> str:
    return "".join([LETTER_OF[byte] for byte in data])


def bytes_of(token: str) -> bytes:
    """The bytes that a token stands for; text outside the alphabet (an added token) stands for itself."""
    if token.isascii() or not in_alphabet(token):  # the printable ASCII letters are their own bytes
        return token.encode("utf-8")
    return bytes([_BYTE_OF[letter] for letter in token])
