"""ggml's block formats as Affine weights, exactly: scales of two levels (d * sc) fit fp32 without rounding, so a dequantised
value differs from the format's definition by no more than the rounding of its last multiplication and addition.

Layouts: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. In comments, b is the count of blocks.
"""

from typing import NamedTuple

import numpy as np

from maga_transformer.formats import ggml_grids, mxfp4
from maga_transformer.formats.canonical import E4M3, Affine
from maga_transformer.formats.ggml_blocks import Bytes, Decode, Floats, bit_pairs, bits, half, nibble_pairs, nibbles, two_bits


def _decode_q4_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 2:], codes)
    return half(blocks, 0), None


def _decode_q4_1(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 4:], codes)
    return half(blocks, 0), half(blocks, 2)


def _decode_q5_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 6:], codes)
    codes |= bits(blocks[:, 2:6]) << 4
    return half(blocks, 0), None


def _decode_q5_1(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 8:], codes)
    codes |= bits(blocks[:, 4:8]) << 4
    return half(blocks, 0), half(blocks, 2)


def _decode_q8_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    np.bitwise_xor(blocks[:, 2:], 128, out=codes)  # int8 + 128
    return half(blocks, 0), None


def _decode_q2_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    two_bits(blocks[:, 16:80], codes)
    levels = blocks[:, :16]  # low nibble: scale, high nibble: minimum
    return half(blocks, 80) * (levels & 15), -half(blocks, 82) * (levels >> 4)


def _decode_q3_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    two_bits(blocks[:, 32:96], codes)
    high = np.ascontiguousarray(blocks[:, :32])  # byte l, bit k: third bit of element 32 k + l
    out = codes.reshape(-1, 8, 32)
    for plane in range(8):
        out[:, plane] |= ((high >> plane) & 1) << 2
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = np.concatenate([(packed[:, 8:] >> (2 * k)) & 3 for k in range(4)], axis=1)
    levels = (low | top << 4).astype(np.float32) - 32
    return half(blocks, 108) * levels, None


def _six_bit_levels(packed: Bytes) -> tuple[Bytes, Bytes]:
    """(b, 12) bytes -> scales and minimums (b, 8), of 6 bits each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1)
    return scales, minimums


def _decode_q4_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    scales, minimums = _six_bit_levels(blocks[:, 4:16])
    nibbles(np.ascontiguousarray(blocks[:, 16:]).reshape(-1, 32), codes.reshape(-1, 64))
    return half(blocks, 0) * scales, -half(blocks, 2) * minimums


def _decode_q5_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    scales, minimums = _six_bit_levels(blocks[:, 4:16])
    nibbles(np.ascontiguousarray(blocks[:, 48:]).reshape(-1, 32), codes.reshape(-1, 64))
    high = np.ascontiguousarray(blocks[:, 16:48])  # byte l, bit k: fifth bit of element 32 k + l
    out = codes.reshape(-1, 8, 32)
    for plane in range(8):
        out[:, plane] |= ((high >> plane) & 1) << 4
    return half(blocks, 0) * scales, -half(blocks, 2) * minimums


def _decode_q6_k(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    low = np.ascontiguousarray(blocks[:, :128]).reshape(-1, 2, 2, 32)
    high = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    out = codes.reshape(-1, 2, 4, 32)
    for plane in range(4):
        out[:, :, plane] = ((low[:, :, plane & 1] >> (4 * (plane >> 1))) & 15) | ((high >> (2 * plane)) & 3) << 4
    levels = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return half(blocks, 208) * levels, None


# The 16 levels of IQ4 blocks, plus 128.
_IQ4 = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)


def _decode_iq4_nl(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 2:], codes)
    np.take(_IQ4, codes, out=codes)
    return half(blocks, 0), None


def _decode_iq4_xs(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(np.ascontiguousarray(blocks[:, 8:]).reshape(-1, 16), codes.reshape(-1, 32))
    np.take(_IQ4, codes, out=codes)
    levels = nibble_pairs(blocks[:, 4:8]) | bit_pairs(blocks[:, 2:4]) << 4
    return half(blocks, 0) * (levels.astype(np.float32) - 32), None


def _decode_mxfp4(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(blocks[:, 1:], codes)
    np.take(mxfp4.CODES, codes, out=codes)
    return mxfp4.scales_of(blocks[:, :1]), None


def _decode_nvfp4(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    nibbles(np.ascontiguousarray(blocks[:, 4:]).reshape(-1, 8), codes.reshape(-1, 16))
    np.take(mxfp4.CODES, codes, out=codes)
    return _UE4M3[blocks[:, :4]], None


# Of whole numbers that are twice the stored ones. The sign's bit is not read, and no code is NaN: as ggml has it.
_UE4M3: Floats = np.abs(E4M3) * np.float32(0.5)
_UE4M3[[0x7F, 0xFF]] = 0, 240


def _decode_tq1_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    """Five ternary digits a byte, which is 256/243 of the number that they make: of each run of bytes all first digits, then all
    second ones; of the last four bytes, four digits each."""
    to = 0
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        rest = np.ascontiguousarray(blocks[:, begin:end])
        for _ in range(digits):
            codes[:, to : to + end - begin] = (rest > 85).view(np.uint8) + (rest > 170)  # 3 * rest >> 8
            rest *= 3  # modulo 256
            to += end - begin
    return half(blocks, 52), None


def _decode_tq2_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    two_bits(blocks[:, :64], codes)
    return half(blocks, 64), None


def _decode_q1_0(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    np.multiply(bits(blocks[:, 2:]), 2, out=codes)  # -1 or 1, plus 1
    return half(blocks, 0), None


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
    "iq1_s": Format(256, 50, 4, 32, 0, ggml_grids.decode_iq1_s),
    "iq1_m": Format(256, 56, 4, 16, 0, ggml_grids.decode_iq1_m),
    "iq2_xxs": Format(256, 66, 8, 32, 128, ggml_grids.decode_iq2_xxs),
    "iq2_xs": Format(256, 74, 8, 16, 128, ggml_grids.decode_iq2_xs),
    "iq2_s": Format(256, 82, 8, 16, 128, ggml_grids.decode_iq2_s),
    "iq3_xxs": Format(256, 98, 8, 32, 128, ggml_grids.decode_iq3_xxs),
    "iq3_s": Format(256, 110, 4, 32, 0, ggml_grids.decode_iq3_s),
    "mxfp4": Format(32, 17, 5, 32, mxfp4.ZERO, _decode_mxfp4),
    "nvfp4": Format(64, 36, 5, 16, mxfp4.ZERO, _decode_nvfp4),
    "tq1_0": Format(256, 54, 2, 256, 1, _decode_tq1_0),
    "tq2_0": Format(256, 66, 2, 256, 1, _decode_tq2_0),
    "q1_0": Format(128, 18, 2, 128, 1, _decode_q1_0),
}

_ELEMENTS_AT_ONCE = 1 << 18  # what is computed on the way stays in the caches


def affine_from_blocks(dtype: str, rows_of_blocks: Bytes) -> Affine:
    """(rows, bytes of a row) of a block format -> its Affine form."""
    form = FORMATS[dtype]
    rows, row_bytes = rows_of_blocks.shape
    columns = row_bytes // form.nbytes * form.elements
    codes = np.empty((rows, columns), np.uint8)
    blocks = np.ascontiguousarray(rows_of_blocks).reshape(-1, form.nbytes)
    unfolded = codes.reshape(-1, form.elements)
    scale = np.empty((len(blocks), form.elements // form.group), np.float32)
    offset = None
    step = max(1, _ELEMENTS_AT_ONCE // form.elements)
    for begin in range(0, len(blocks), step):
        part = slice(begin, begin + step)
        scale[part], shift = form.decode(blocks[part], unfolded[part])
        if shift is not None:
            offset = np.empty_like(scale) if offset is None else offset
            offset[part] = shift
    shape = (rows, columns // form.group)
    return Affine(
        codes=codes,
        bits=form.bits,
        group=form.group,
        scale=scale.reshape(shape),
        offset=None if offset is None else offset.reshape(shape),
        zero=form.zero,
    )
