"""The alphabet of byte-level BPE (GPT-2): every byte has a printable letter, so that any text is a string of letters."""


def _alphabet() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return letters


LETTER_OF = _alphabet()
BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}


def bytes_of(token: str) -> bytes:
    """The bytes that a token stands for; text outside the alphabet (an added token) stands for itself."""
    try:
        return bytes(BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode("utf-8")
