"""ggml's IQ1, IQ2 and IQ3 blocks: runs of 4 or 8 numbers are points of a grid, and a block stores which ones. Unfolded to codes,
they are affine weights, exactly: of 4 bits where the levels lie evenly (IQ1, IQ3_S), else of 8."""

import zlib
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from maga_transformer.formats.ggml_blocks import Bytes, Floats, bit_pairs, bits, half, nibble_pairs


def _grid(levels: Sequence[int], size: int, packed: str) -> Bytes:
    """(points, size). A point is a number whose `size` digits, the lowest first, choose levels. `packed` has a bit for every
    number, set for those of the grid, which stand in ascending order."""
    members = np.unpackbits(np.frombuffer(zlib.decompress(b64decode(packed)), np.uint8), bitorder="little")
    digits = np.flatnonzero(members)[:, None] // len(levels) ** np.arange(size) % len(levels)
    return np.take(np.array(levels, np.uint8), digits)


_IQ1 = _grid(
    (0, 4, 8),
    8,
    "eNotUkFLnEcYfneq4XVMZWM/QXJ696ux01kR6y3pZZFdWPRiQvIHPNm0SMk5TT4nu+mX2RRCILQ0l3EwyTgNq/FQtp+wAU9WemjprQdpPYS6HgJeGgzEzK"
    "69zbzwvM/zvM9z7UJUN2zmMlY+c3dJ2/MoKarPR4rKlQsj/YYpSkcBlflAmnTL8wd+EGLg/r4yWAqoQprMRwGup/AHg4kMk6hO1ZlrWMlNbBvS4yDHnLe4"
    "v44oBAQu4QW5hPhj/CVztNu8Z5v+0s3DTralhlpxtvvn0EMWQ0xOZ1wxBDn7t/08pqKF5dKy1wLjXFA4omigUrhaN8g+dpeopuhqkGEJH81HTGLLqcRUGa"
    "Gyi5aJnyTWw3sKKyXoKjQwcxkquU8VaCVxZSrqD5bFqXjGyEug4Re6KVy24t3XoDgyEbMaKKgmprMh/TY1srjz17NGY8k9DP8bDV0+K6laKwkt0dPObza2"
    "6z+afx0DBtKlQIlpWCsyk6hpnrVb2btDa4oWNRcdCyvT7OzxamfvddFNfte+dXj83+2Xr77J9r54+8nJy/Hj4YN/dJz37aGax003qJon2djBnaRvYWLxyP"
    "HVIgTLuO+HgSnJn9Kv6t4DJcDC/eQjUIjwlfZ+iz1ta7PLki+/n/x98yCv8pN+T4z88aQPePcOhLkVUv5iFk/XzEAyCtousOWoHA5VeK56KXsS/ls+3Eu5"
    "32C3NjlipmRjSAEtXtdLLe8TIK72d+IClruoAU0joVF3OXopE+BdVMFBb+E+pYqPhgi89XqjwbgMFCrxXKCAtZTFpj0oWqizuc1gefVN09MVsfizmXqVcB"
    "aacH0hFIl5X/Qdu2YsYp6MjkENnabMexVdOwOznuETyH9Y/j/l/lBp9fyIACBw8Yw6loGqDoiDCM7NVbrdcKynMB3DVPAShkmwzLoLc+8B4wUZaQ==",
)
_IQ2 = (8, 25, 43)
_IQ2_XXS = _grid(
    _IQ2,
    8,
    "eNp1UkuqxDAMk8Hdq5B3Hwd6gG7m/ld5tvPt0BENpLHkSG4/f+XDq1ZouUAAaigwxA64afWEFLXbz718+LoBQVCqn5eSxPakiugoSjpNT6j4xkLlkEakmr"
    "dsKvaVVzQcEqXwcY6jlFtvHa9ytE5NdA8erHrVBlu7ptfiaQ4UTzR7t0+D9Mhgk18I792/MWkMozOpYEUGZTWnjKHk4pUeVVKiD+3yaLJ11MlR6vJsezlR"
    "kya9ZIuWJs+Vsrxm3zJ8I6bZP4XaFM4G+dvYCpk35szlEWu/YcUTjjHsvjFmaK+qB/ijNp18T/Nl/wr9TfsHxl0VIw==",
)
_IQ2_XS = _grid(
    _IQ2,
    8,
    "eNpdUVuuhTAIHBL6j4nuhyb2vyZ2/1s5PFr13uYcxQLDzDDGuEarR6N7jN6qFMJ9iVYGEbqnDtoZlkIhZkArpNjLfqNsO5NA1bo8JYAFBDtigJd16QK0VE"
    "ffvNELHLCRJGDcOCavsBSwVdr3Ft8MzBI/YyQguItPFR+YrVZ4Vig91ZxJmsCQSjFFFqbnQF6FMyWHrikZp8mrtADNKEt5SwnyPsOM0miHp4hoTq0xX7HO"
    "tDckM8rDMHs17BW3p+aFYCbtz+aGBpShy2TzehJuiNPq30xqNOkvCWeIZyg+If0x2t8iIbnQwY7bDyOfokOFu1z32/oVuavEmHEw5Vjp7gI+vAKcOd2IzV"
    "CwoLfAQE4LqnxJ7h+iL1v+XMoqbTQn0uOl7msKr70o/h/N4W2uYLIu79Po/gBOsClJ",
)
_IQ2_S = _grid(
    _IQ2,
    8,
    "eNptUl2KBiEMa0HfK+h9KozvCvb+V9m0OrvfsivD/MXEJGpmy4a1XPAyh9Xc6l4yLVEpeAwza3usaVZxAVJAq6YppM2cJcyaLT2AlIirZCEipW1rQbmtui"
    "2WsEqz9p4y1US+1ivoUAjWzIBAV1vJISY6EP4lcShBm/Zqq+fEhfbsmg9LaCXMz/QgxS/BAkpmUINcYMOXIGrxTSGOT9yYpnu1Vh9vI1+HvSWP7L7MthfV"
    "6UCzvw4hIPVAsBEstKF0IB8QbMGiP5Er4HetD0G65iMyICUE/BGMWiLJM1qGQ/VNuR2K20hOIF6fghIY3ex4n3JL4FPLO2KGahul7iKdaRzznbS0y8IuF4"
    "+cfyKzQ/OKg5U5ZHDnVx3K2c/KMLms2JRQPAfAKf90WOQ7NiDh02sg9DEwGad3h46fCTlhJKkX/TCtK8h6O/yVGdg1ylcNv5Ur35q+ALm8Vh4=",
)
_IQ3_XXS = _grid(
    (4, 12, 20, 28, 36, 44, 52, 62),
    4,
    "eNpNUTEOwjAMPFuxVGUKQ/eKCfGKdGCHH0WdEK9g5Jn4nKZwVdUmPt+dk/llmoBLtrNpgcxqL2xYNlvgEExopeGyAckfwgsFeMBLimx5bgKYWhSzqa+QDK"
    "IVFeeu4jj5ChqqgRTblm/0xzX6nmKbNXGSntCb6DfRq7kbjTtyjSBQy66/hN+d+2xmUmVXQJrvrAzPhsIYUZoYzGd743mEKqQLVncbdJqUEUMGcbH932U9"
    "l6yoo4HjpLQ7QEI8ddpIhIPI7z1ctL8Nw3X9CxXSe8Mevst9ZNxL7bIcM/FIRlwNpv2O7piB+AIWuhT2",
)
_IQ3_S = _grid(
    range(8, 16),
    4,
    "eNotUcFKw0AQfTPMwmZPuyHiNd1GqPmKrdSDeimC+DtpqdD2luIHiFYE+5PObpzDwLw3897b5Od1br+dOV3PD9EjytdDDGeHykbz6M0QaV9LxaAG9/YTyS"
    "YHhoCvdEYAri/mGWuWp8AVGyzpHKRqSU7VNugiLRq4le4VlqE1Yq3dGW4zf3k5mt4Mt+bQ1aL8CW7De9Q33DihhC2qTuHOswxkQW9ZRC9bTmQJkF/p39ly"
    "7x0ItCLRqIpzONKxhbV3qioBbFrxCRYJJYaDaXOaIKOwHu6czGxUfMaWBiHvTMy8gR+y3Ee5EqiCRzaYgaxCEgSjJN8LS14gtkvdwY4GeG5tDZKUhXJ3KJ"
    "UXm9K1+oxqAGx08Jn00gqR5+yipY9QsMLkm0MX/F9rhEnkBcIeC53rpb6Gi0eXc8T8kWhylcm7/IVJG/gDusYnIA==",
)

# A number is scale / 8 * (2 * code - 9): eight times the grid's -1, 0 or 1, and one more or, where the index's twelfth bit is set,
# one less.
_IQ1_SHIFTED = np.concatenate([_IQ1 + 1, _IQ1])
_BITS = bits(np.arange(256, dtype=np.uint8)[:, None])  # (256, 8)
_SIGNS = np.where(_BITS, np.int8(-1), np.int8(1))
_EVEN_SIGNS = _SIGNS[[i | i.bit_count() % 2 << 7 for i in range(128)]]  # 7 of 8 are stored: the number of minuses is even


def decode_iq1_s(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    words = _words(blocks[:, 34:], "<u2")  # of 32 numbers: four times 3 bits of an index, 3 bits of scale, the shift
    high = (words[:, :, None] >> _shifts(3)) & 7 | (words >> 12 & 8)[:, :, None]
    _take(_IQ1_SHIFTED, blocks[:, 2:34] | high.reshape(-1, 32) << 8, codes)
    return _shifted(half(blocks, 0), words >> 12 & 7)


def decode_iq1_m(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    _take(_IQ1_SHIFTED, blocks[:, :32] | nibble_pairs(blocks[:, 32:48]).astype(np.uint16) << 8, codes)
    words = _words(blocks[:, 48:], "<u2")  # four times 3 bits of scale, and 4 bits of the block's
    whole = np.bitwise_or.reduce((words >> 12) << np.array([0, 4, 8, 12], np.uint16), axis=1, keepdims=True)
    return _shifted(whole.view(np.float16).astype(np.float32), ((words[:, :, None] >> _shifts(3)) & 7).reshape(-1, 16))


def decode_iq2_xxs(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    parts = np.ascontiguousarray(blocks[:, 2:]).reshape(-1, 8, 8)
    words = _words(parts[:, :, 4:], "<u4")  # of 32 numbers: four times 7 signs, 4 bits of scale
    _signed(codes, _take(_IQ2_XXS, parts[:, :, :4]), _take(_EVEN_SIGNS, words >> _shifts(7) & 127))
    return half(blocks, 0) * _and_a_half(words[:, :, 0] >> 28, 0.25), None


def decode_iq2_xs(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    words = _words(blocks[:, 2:66], "<u2")
    _signed(codes, _take(_IQ2_XS, words & 511), _take(_EVEN_SIGNS, words >> 9))
    return half(blocks, 0) * _and_a_half(nibble_pairs(blocks[:, 66:]), 0.25), None


def decode_iq2_s(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    index = blocks[:, 2:34] | bit_pairs(blocks[:, 66:74]).astype(np.uint16) << 8
    _signed(codes, _take(_IQ2_S, index), _take(_SIGNS, blocks[:, 34:66]))
    return half(blocks, 0) * _and_a_half(nibble_pairs(blocks[:, 74:]), 0.25), None


def decode_iq3_xxs(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    words = _words(blocks[:, 66:], "<u4")  # of 32 numbers, as in IQ2_XXS
    _signed(codes, _take(_IQ3_XXS, blocks[:, 2:66]), _take(_EVEN_SIGNS, words[:, :, None] >> _shifts(7) & 127))
    return half(blocks, 0) * _and_a_half(words >> 28, 0.5), None


def decode_iq3_s(blocks: Bytes, codes: Bytes) -> tuple[Floats, Floats | None]:
    index = blocks[:, 2:66] | bits(blocks[:, 66:74]).astype(np.uint16) << 8
    # 2 * code - 15 is the odd number that a digit stands for, and of the code's complement its negative
    _take(_IQ3_S, index, codes)
    codes ^= _take(_BITS * np.uint8(15), blocks[:, 74:106]).reshape(codes.shape)
    scale = half(blocks, 0) * (2 * nibble_pairs(blocks[:, 106:]) + 1)
    return 2 * scale, -15 * scale


def _take(table: npt.NDArray[Any], index: npt.NDArray[Any], out: Bytes | None = None) -> npt.NDArray[Any]:
    """The rows of `table` at `index`, one after the other, each moved as one item. No index is outside."""
    item = np.dtype(f"u{table.shape[1]}")
    if out is None:
        out = np.empty(index.size * table.shape[1], np.uint8)
    np.take(table.view(item)[:, 0], index.reshape(-1), mode="clip", out=out.reshape(-1).view(item))
    return out.view(table.dtype)


def _signed(codes: Bytes, points: Bytes, signs: npt.NDArray[np.int8]) -> None:
    np.multiply(points.view(np.int8), signs, out=codes.reshape(-1).view(np.int8))
    codes ^= 128


def _shifted(whole: Floats, levels: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """IQ1's scales and offsets."""
    scale = whole * (2 * levels + 1)
    return scale / 4, scale * np.float32(-9 / 8)


def _and_a_half(levels: npt.NDArray[Any], unit: float) -> Floats:
    found: Floats = (levels.astype(np.float32) + np.float32(0.5)) * np.float32(unit)
    return found


def _words(packed: Bytes, kind: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(packed).view(kind)


def _shifts(width: int) -> npt.NDArray[np.uint16]:
    """Of four fields, from the lowest."""
    return np.arange(0, 4 * width, width, dtype=np.uint16)
