"""Numbers of bytes as people write and read them: 4GiB, 500MB, 1073741824."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: object) -> int:
    """Bytes.

    Raises:
        ValueError: not a size, or none at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not 1 <= size < 1 << 62:
        raise ValueError(f"{text!r} is not a size; write for example 4GiB or 500MB")
    return int(size)


def size(n: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"
