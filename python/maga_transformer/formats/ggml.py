"""ggml's block formats as Affine weights, exactly: scales of two levels (d * sc) fit fp32 without rounding, so a dequantised
value differs from the format's definition by no more than the rounding of its last multiplication and addition.

Layouts: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. In comments, b is the count of blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maga_transformer.formats import mxfp4
from maga_transformer.formats.canonical import Affine

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# blocks (b, bytes a block), codes to fill (b, elements a block) -> scale and offset (b, groups a block)
Decode = Callable[[Bytes, Bytes], tuple[Floats, Floats | None]]


def _half(blocks: Bytes, begin: int) -> Floats:
    """(b, 1): the fp16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, codes: Bytes) -> None:
    """(b, n) bytes -> (b, 2n) codes: the low nibbles of all, then the high ones."""
    packed = np.ascontiguousarray(packed)  # arithmetic on whole arrays, and n bytes moved as one item: 2.5 times as fast
    half = np.dtype((np.void, packed.shape[1]))
    out = codes.view(half)
    out[:, :1] = (packed & 15).view(half)
    out[:, 1:] = (packed >> 4).view(half)


def _bits(packed: Bytes) -> Bytes:
    """(b, n) bytes -> (b, 8n) bits, the lowest of each byte first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _decode_q4_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 2:], codes)
    return _half(blocks, 0), None


def _decode_q4_1(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 4:], codes)
    return _half(blocks, 0), _half(blocks, 2)


def _decode_q5_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 6:], codes)
    codes |= _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0), None


def _decode_q5_1(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 8:], codes)
    codes |= _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0), _half(blocks, 2)


def _decode_q8_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    np.bitwise_xor(blocks[:, 2:], 128, out=codes)  # int8 + 128
    return _half(blocks, 0), None


def _two_bits(packed: Bytes, codes: Bytes) -> None:
    """(b, 64) bytes -> (b, 256) codes: in each half of 32 bytes, bits 0-1 of all, then bits 2-3, 4-5 and 6-7."""
    halves = np.ascontiguousarray(packed).reshape(-1, 2, 32)
    out = codes.reshape(-1, 2, 4, 32)
    for plane in range(4):
        out[:, :, plane] = (halves >> (2 * plane)) & 3


def _decode_q2_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _two_bits(blocks[:, 16:80], codes)
    levels = blocks[:, :16]  # low nibble: scale, high nibble: minimum
    return _half(blocks, 80) * (levels & 15), -_half(blocks, 82) * (levels >> 4)


def _decode_q3_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _two_bits(blocks[:, 32:96], codes)
    high = np.ascontiguousarray(blocks[:, :32])  # byte l, bit k: third bit of element 32 k + l
    out = codes.reshape(-1, 8, 32)
    for plane in range(8):
        out[:, plane] |= ((high >> plane) & 1) << 2
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = np.concatenate([(packed[:, 8:] >> (2 * k)) & 3 for k in range(4)], axis=1)
    levels = (low | top << 4).astype(np.float32) - 32
    return _half(blocks, 108) * levels, None


def _six_bit_levels(packed: Bytes) -> tuple[Bytes, Bytes]:
    """(b, 12) bytes -> scales and minimums (b, 8), of 6 bits each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1)
    return scales, minimums


def _decode_q4_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    scales, minimums = _six_bit_levels(blocks[:, 4:16])
    _nibbles(np.ascontiguousarray(blocks[:, 16:]).reshape(-1, 32), codes.reshape(-1, 64))
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _decode_q5_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    scales, minimums = _six_bit_levels(blocks[:, 4:16])
    _nibbles(np.ascontiguousarray(blocks[:, 48:]).reshape(-1, 32), codes.reshape(-1, 64))
    high = np.ascontiguousarray(blocks[:, 16:48])  # byte l, bit k: fifth bit of element 32 k + l
    out = codes.reshape(-1, 8, 32)
    for plane in range(8):
        out[:, plane] |= ((high >> plane) & 1) << 4
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _decode_q6_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    low = np.ascontiguousarray(blocks[:, :128]).reshape(-1, 2, 2, 32)
    high = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    out = codes.reshape(-1, 2, 4, 32)
    for plane in range(4):
        out[:, :, plane] = ((low[:, :, plane & 1] >> (4 * (plane >> 1))) & 15) | ((high >> (2 * plane)) & 3) << 4
    levels = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return _half(blocks, 208) * levels, None


# The 16 levels of IQ4 blocks, plus 128.
_IQ4 = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)


def _decode_iq4_nl(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 2:], codes)
    np.take(_IQ4, codes, out=codes)
    return _half(blocks, 0), None


def _decode_iq4_xs(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(np.ascontiguousarray(blocks[:, 8:]).reshape(-1, 16), codes.reshape(-1, 32))
    np.take(_IQ4, codes, out=codes)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.stack([(blocks[:, 2:4] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 8)
    return _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32), None


def _decode_mxfp4(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _nibbles(blocks[:, 1:], codes)
    np.take(mxfp4.CODES, codes, out=codes)
    return mxfp4.scales_of(blocks[:, :1]), None


class Format(NamedTuple):
    elements: int  # of a block
    nbytes: int
    bits: int
    group: int
    zero: int
    decode: Decode


FORMATS = {
    "q4_0": Format(32, 18, 4, 32, 8, _decode_q4_0),
    "q4_1": Format(32, 20, 4, 32, 0, _decode_q4_1),
    "q5_0": Format(32, 22, 5, 32, 16, _decode_q5_0),
    "q5_1": Format(32, 24, 5, 32, 0, _decode_q5_1),
    "q8_0": Format(32, 34, 8, 32, 128, _decode_q8_0),
    "q2_k": Format(256, 84, 2, 16, 0, _decode_q2_k),
    "q3_k": Format(256, 110, 3, 16, 4, _decode_q3_k),
    "q4_k": Format(256, 144, 4, 32, 0, _decode_q4_k),
    "q5_k": Format(256, 176, 5, 32, 0, _decode_q5_k),
    "q6_k": Format(256, 210, 6, 16, 32, _decode_q6_k),
    "iq4_nl": Format(32, 18, 8, 32, 128, _decode_iq4_nl),
    "iq4_xs": Format(256, 136, 8, 32, 128, _decode_iq4_xs),
    "mxfp4": Format(32, 17, 5, 32, mxfp4.ZERO, _decode_mxfp4),
}


def affine_from_blocks(dtype: str, rows_of_blocks: Bytes) -> Affine:
    """(rows, bytes of a row) of a block format -> its Affine form."""
    form = FORMATS[dtype]
    rows, row_bytes = rows_of_blocks.shape
    columns = row_bytes // form.nbytes * form.elements
    codes = np.empty((rows, columns), np.uint8)
    blocks = np.ascontiguousarray(rows_of_blocks).reshape(-1, form.nbytes)
    scale, offset = form.decode(blocks, codes.reshape(-1, form.elements))
    shape = (rows, columns // form.group)
    return Affine(
        codes=codes,
        bits=form.bits,
        group=form.group,
        scale=np.ascontiguousarray(scale.reshape(shape)),
        offset=None if offset is None else np.ascontiguousarray(offset.reshape(shape)),
        zero=form.zero,
    )
