"""Write the digests of every tensor of safetensors files: equal digests mean equal bits.

    python make/digests.py OUT.json FILE.safetensors [FILE.safetensors ...]

OUT.json: {"<tensor>": {"dtype": "BF16", "shape": [256, 64], "sha256": "..."}, ...}: dtype as safetensors
spells it, sha256 over the tensor's bytes (little-endian, C order) as they lie in the file.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path


def digests(path: Path) -> dict[str, dict[str, object]]:
    """Digests of one file's tensors, read with the standard library alone (safetensors' format 0.x)."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        sha = hashlib.sha256(data[begin:end]).hexdigest()
        found[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": sha}
    return found


def dump(tensors: dict[str, dict[str, object]]) -> str:
    """JSON with one tensor a line, sorted, so that a change shows as a line in a diff."""
    lines = [f"{json.dumps(name)}: {json.dumps(tensors[name])}" for name in sorted(tensors)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    out, *files = map(Path, sys.argv[1:])
    out.write_text(dump({name: entry for file in files for name, entry in digests(file).items()}))
