"""Fields of ggml's blocks, many blocks at a time. In comments, b is the count of blocks."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# blocks (b, bytes a block), codes to fill (b, elements a block) -> scale and offset (b, groups a block)
Decode = Callable[[Bytes, Bytes], tuple[Floats, Floats | None]]


def half(blocks: Bytes, begin: int) -> Floats:
    """(b, 1): the fp16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def nibbles(packed: Bytes, codes: Bytes) -> None:
    """(b, n) bytes -> (b, 2n) codes: the low nibbles of all, then the high ones."""
    packed = np.ascontiguousarray(packed)  # arithmetic on whole arrays, and n bytes moved as one item: 2.5 times as fast
    run = np.dtype((np.void, packed.shape[1]))
    out = codes.view(run)
    out[:, :1] = (packed & 15).view(run)
    out[:, 1:] = (packed >> 4).view(run)


def nibble_pairs(packed: Bytes) -> Bytes:
    """(b, n) bytes -> (b, 2n): the low nibble of each byte, then its high one."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def bit_pairs(packed: Bytes) -> Bytes:
    """(b, n) bytes -> (b, 4n): two bits at a time, the lowest of each byte first."""
    return np.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(packed), -1)


def bits(packed: Bytes) -> Bytes:
    """(b, n) bytes -> (b, 8n) bits, the lowest of each byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def two_bits(packed: Bytes, codes: Bytes) -> None:
    """(b, 64) bytes -> (b, 256) codes: in each half of 32 bytes, bits 0-1 of all, then bits 2-3, 4-5 and 6-7."""
    halves = np.ascontiguousarray(packed).reshape(-1, 2, 32)
    out = codes.reshape(-1, 2, 4, 32)
    for plane in range(4):
        out[:, :, plane] = (halves >> (2 * plane)) & 3
