"""Find NaN and infinity while the bytes are in the cache: an exponent of ones in the raw bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 17  # items at a time: two buffers of them stay in a core's second-level cache

# dtype -> (the unsigned integer of its size, its bits without the sign, the bits of infinity)
_BITS: dict[str, tuple[str, int, int]] = {
    "bfloat16": ("uint16", 0x7FFF, 0x7F80),
    "float16": ("uint16", 0x7FFF, 0x7C00),
    "float32": ("uint32", 0x7FFFFFFF, 0x7F800000),
    "float64": ("uint64", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}


def screen(data: NDArray[np.uint8], dtype: str) -> tuple[int, int]:
    """Count (NaN, infinite) values in the bytes of an array."""
    if dtype not in _BITS:
        return _by_value(data.view(dtype))
    unsigned, mask, infinity = _BITS[dtype]
    bits = data.view(unsigned)
    scratch = np.empty(min(BLOCK, len(bits)), bits.dtype)
    nans = infs = 0
    for at in range(0, len(bits), BLOCK):
        block = bits[at : at + BLOCK]
        magnitude = np.bitwise_and(block, bits.dtype.type(mask), out=scratch[: len(block)])
        if int(magnitude.max()) >= infinity:
            nans += int(np.count_nonzero(magnitude > infinity))
            infs += int(np.count_nonzero(magnitude == infinity))
    return nans, infs


def _by_value(values: NDArray[Any]) -> tuple[int, int]:
    if values.dtype.kind in "iub":
        return 0, 0
    nans = int(np.isnan(values).sum())
    return nans, int((~np.isfinite(values)).sum()) - nans
