"""Write a checkpoint as MaxText does, of any size, from a seed, chunk by chunk: it never holds the model.

    python tests/bench/make_checkpoint.py DIR [--moe] [--layers N] [--mesh first=16 | fsdp=8,tensor=2,expert=4 | whole]

DIR receives step 0 (OCDBT, zarr3 with sharding_indexed, zstd level 3, scanned layers) and a Hugging Face config.json
(qwen3 or qwen3-moe), so that `mtx2vllm convert DIR OUT` runs as it stands. The default is dense, 1.72 B parameters in
bf16, 3.44 GB, each array split 16 ways along its first axis, which is what MaxText's to_maxtext writes on 16 devices.
A mesh by axis names splits as training does: fsdp the embedding axis, tensor heads, ffn and vocabulary, expert the
experts.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

MESH_OF = {"embed": "fsdp", "heads": "tensor", "kv": "tensor", "ffn": "tensor", "vocab": "tensor", "experts": "expert"}
CONCURRENT = 4  # chunks being compressed


@dataclass(frozen=True)
class Sizes:
    """Of the model. `experts` 0: dense."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    tied: bool


DENSE = Sizes(2048, 28, 6144, 16, 8, 128, 151936, 0, True)
MOE = Sizes(1024, 12, 512, 16, 4, 128, 151936, 64, False)


def leaves(s: Sizes) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Every parameter: shape and logical axes."""
    e, n = (s.hidden, "embed"), (s.layers, "layers")
    q, k, d, f = (s.heads, "heads"), (s.kv_heads, "kv"), (s.head_dim, "head_dim"), (s.ffn, "ffn")
    v, x = (s.vocab, "vocab"), (s.experts, "experts")
    table = {"token_embedder.embedding": (v, e), "decoder.decoder_norm.scale": (e,)}
    if not s.tied:
        table["decoder.logits_dense.kernel"] = (e, v)
    attention = {
        "query.kernel": (e, n, q, d),
        "key.kernel": (e, n, k, d),
        "value.kernel": (e, n, k, d),
        "out.kernel": (q, n, d, e),
        "query_norm.scale": (d, n),
        "key_norm.scale": (d, n),
    }
    table |= {f"decoder.layers.self_attention.{name}": axes for name, axes in attention.items()}
    table |= {f"decoder.layers.{p}_self_attention_layer_norm.scale": (e, n) for p in ("pre", "post")}
    if s.experts:
        mlp = {"gate.kernel": (e, n, x), "wi_0": (x, n, e, f), "wi_1": (x, n, e, f), "wo": (x, n, f, e)}
        table |= {f"decoder.layers.moe_block.{name}": axes for name, axes in mlp.items()}
    else:
        mlp = {"wi_0.kernel": (e, n, f), "wi_1.kernel": (e, n, f), "wo.kernel": (f, n, e)}
        table |= {f"decoder.layers.mlp.{name}": axes for name, axes in mlp.items()}
    return {
        f"params.params.{name}": (tuple(a[0] for a in axes), tuple(a[1] for a in axes)) for name, axes in table.items()
    }


def chunk_shape(shape: tuple[int, ...], axes: tuple[str, ...], mesh: dict[str, int]) -> tuple[int, ...]:
    """One device's shard; an axis that the mesh does not divide stays whole, as MaxText leaves it."""
    ways = [mesh.get(MESH_OF.get(a, ""), 1) for a in axes]
    if "first" in mesh:
        ways[0] = mesh["first"]
    return tuple(n // w if n % w == 0 else n for n, w in zip(shape, ways, strict=True))


def zarr_metadata(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """As Orbax writes it: one inner chunk a shard."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    inner = {"chunk_shape": chunks, "codecs": [little, zstd], "index_codecs": [little, {"name": "crc32c"}]}
    return {
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }


def write(items: Path, sizes: Sizes, mesh: dict[str, int], dtype: str, seed: int) -> int:
    """All arrays, through one process's OCDBT database that is then merged, as Orbax does. Returns bytes of values."""
    base = {"driver": "file", "path": f"{items}/ocdbt.process_0/"}
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    total = 0
    metadatas = []
    for number, (key, (shape, axes)) in enumerate(sorted(leaves(sizes).items())):
        chunks = chunk_shape(shape, axes, mesh)
        store = _create(base, key, shape, chunks, dtype, context)
        for block in _batches(_boxes(shape, chunks)):
            pending = [
                store[tuple(slice(*r) for r in box)].write(values(box, axes, dtype, (seed, number, index)))
                for index, box in block
            ]
            for future in pending:
                future.result()
        total += prod(shape) * np.dtype(dtype).itemsize
        metadatas.append({"param_name": key, "write_shape": chunks, "chunk_shape": chunks, "ext_metadata": None})
    _create(base, "step", (), (), "int64", context).write(np.int64(0)).result()
    source = ts.KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()
    merged = ts.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{items}/"}}, context=context
    ).result()
    source.experimental_copy_range_to(merged).result()
    _describe(items, metadatas)
    return total


def values(box: tuple[tuple[int, int], ...], axes: tuple[str, ...], dtype: str, seed: tuple[int, ...]) -> Any:
    """Normal values as weights have them (norms: around 1); the entropy decides how fast zstd decodes."""
    shape = [high - low for low, high in box]
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    x = 1 + 0.1 * x if axes[-1] == "layers" or len(axes) == 1 else 0.02 * x
    return x.astype(dtype)


def _create(base: Any, key: str, shape: Any, chunks: Any, dtype: str, context: Any) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{key}/"}}
    return ts.open({**spec, "metadata": zarr_metadata(shape, chunks, dtype), "create": True}, context=context).result()


def _boxes(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    lines = [[(at, at + c) for at in range(0, n, c)] for n, c in zip(shape, chunks, strict=True)]
    yield from enumerate(product(*lines))


def _batches(found: Iterator[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    batch = []
    for item in found:
        batch.append(item)
        if len(batch) == CONCURRENT:
            yield batch
            batch = []
    yield batch


def _describe(items: Path, metadatas: list[dict[str, Any]]) -> None:
    tree = {"('step',)": _entry(("step",), "scalar", None)}
    for entry in metadatas:
        path = tuple(entry["param_name"].split("."))
        tree[str(path)] = _entry(path, "jax.Array", entry["write_shape"])
    about = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    (items / "_METADATA").write_text(json.dumps(about))
    (items / "array_metadatas").mkdir()
    (items / "array_metadatas/process_0").write_text(
        json.dumps({"array_metadatas": [{"array_metadata": m} for m in metadatas]})
    )
    about = {"item_handlers": {"items": "PyTreeHandler"}, "custom_metadata": {"scan_layers": True}}
    (items.parent / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    for directory in (items, items.parent):
        (directory / "commit_success.txt").write_text("")


def _entry(path: tuple[str, ...], kind: str, write_shape: Any) -> dict[str, Any]:
    about = {"value_type": kind, "skip_deserialize": False}
    if write_shape is not None:
        about["write_shape"] = write_shape
    return {"key_metadata": [{"key": p, "key_type": 2} for p in path], "value_metadata": about}


def hf_config(s: Sizes, dtype: str) -> dict[str, Any]:
    """The config.json of the same model."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if s.experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if s.experts else "qwen3",
        "dtype": dtype,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "intermediate_size": s.ffn,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "tie_word_embeddings": s.tied,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    if s.experts:
        config |= {"num_experts": s.experts, "num_experts_per_tok": 8, "moe_intermediate_size": s.ffn}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return config


def make(directory: Path, sizes: Sizes, mesh: dict[str, int], dtype: str = "bfloat16", seed: int = 0) -> int:
    """The whole checkpoint with its config. Returns the bytes of its values, uncompressed."""
    items = directory / "0" / "items"
    items.mkdir(parents=True)
    np.dtype(ml_dtypes.bfloat16)  # numpy knows the name from here on
    (directory / "config.json").write_text(json.dumps(hf_config(sizes, dtype), indent=1))
    return write(items, sizes, mesh, dtype, seed)


def parse_mesh(text: str) -> dict[str, int]:
    """first=16 | fsdp=8,tensor=2 | whole"""
    return {} if text == "whole" else {k: int(n) for k, n in (part.split("=") for part in text.split(","))}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--mesh", type=parse_mesh, default={"first": 16})
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    names = ("hidden", "layers", "ffn", "heads", "kv_heads", "head_dim", "vocab", "experts")
    for name in names:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    args = parser.parse_args()
    default = MOE if args.moe or args.experts else DENSE
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    sizes = Sizes(**{**vars(default), **given})
    print(f"{make(args.directory, sizes, args.mesh, args.dtype, args.seed) / 1e9:.2f} GB in {args.directory}")


if __name__ == "__main__":
    main()
