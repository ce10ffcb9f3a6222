"""CRC-32C of a whole from the CRC-32C of its parts, so that a composed object is checked without reading it back.

A CRC is linear over GF(2): crc(A + B) is crc(A) shifted by len(B) zero bytes, xor crc(B). The shift by 2^k bytes is a
32x32 bit matrix, held as 32 columns; squaring it doubles the distance.
"""

import base64
import functools
from collections.abc import Iterable

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected (RFC 3720, appendix B.4)

Matrix = tuple[int, ...]


def whole(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of the concatenation of parts, each given as (checksum, length in bytes)."""
    crc = 0
    for part, length in parts:
        crc = _shifted(crc, length) ^ part
    return crc


def decoded(text: str) -> int:
    """The number behind the store's notation: base64 of four bytes, big-endian."""
    return int.from_bytes(base64.b64decode(text), "big")


def _shifted(crc: int, length: int) -> int:
    power = 0
    while length:
        if length & 1:
            crc = _times(_zero_bytes(power), crc)
        length >>= 1
        power += 1
    return crc


@functools.cache
def _zero_bytes(power: int) -> Matrix:
    """The effect of 2^power zero bytes."""
    if power == 0:
        bit: Matrix = (_POLYNOMIAL, *(1 << n for n in range(31)))
        return functools.reduce(lambda matrix, _: _product(matrix, matrix), range(3), bit)
    half = _zero_bytes(power - 1)
    return _product(half, half)


def _product(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_times(left, column) for column in right)


def _times(matrix: Matrix, vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
