"""A checkpoint ten times the memory: converted under a hard limit (RLIMIT_DATA), bit for bit, whatever its grid."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtx2vllm.converter.conversion import prepare
from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.job import Options

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import make_checkpoint

BUDGET = 16 << 20
SIZES = make_checkpoint.Sizes(256, 4, 384, 4, 2, 32, 4096, 128, False)  # 327 MB
GRIDS = {
    "input axis": {"fsdp": 16},
    "expert axis": {"expert": 16},
    "both": {"fsdp": 4, "expert": 8},
    "first axis": {"first": 32},
}
# What TensorStore takes while it decodes, and the stacks of its threads, which count although hardly used.
BESIDES = 96 << 20

CONVERT = """
import json, os, resource, sys, threading
from mtx2vllm.converter.execute.memory import keep_freed_memory
keep_freed_memory()
import numpy, tensorstore, blake3
from mtx2vllm.converter.conversion import convert
limit = int(sys.argv[3])
if limit:
    data = sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
    threading.stack_size(1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit,) * 2)
convert(sys.argv[1], sys.argv[2], memory_budget=int(sys.argv[4]), layout="canonical", workers=2)
print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))  # ru_maxrss has the parent's
"""


def convert_under(limit, checkpoint, out, budget):
    command = [sys.executable, "-c", CONVERT, str(checkpoint), str(out), str(limit), str(budget)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout) * 1024


@pytest.mark.parametrize("grid", GRIDS)
def test_ten_times_the_budget_under_a_hard_limit(grid, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    nbytes = make_checkpoint.make(checkpoint, SIZES, GRIDS[grid])
    assert nbytes > 10 * BUDGET
    peak = convert_under(BUDGET + BESIDES, checkpoint, tmp_path / "out", BUDGET)
    assert peak < BUDGET + 2 * BESIDES
    compare(checkpoint, tmp_path / "out", GRIDS[grid])


def compare(checkpoint, out, mesh):
    """With the generator's own values, layer by layer, in plain numpy."""
    [path] = Path(out).rglob("*.safetensors")
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def tensor(name):
        entry = header[name]
        begin, end = entry["data_offsets"]
        return np.frombuffer(raw[8 + length + begin : 8 + length + end], "uint16").reshape(entry["shape"])

    whole = {}
    table = sorted(make_checkpoint.leaves(SIZES).items())
    for number, (key, (shape, axes)) in enumerate(table):
        chunks = make_checkpoint.chunk_shape(shape, axes, mesh)
        array = np.empty(shape, "uint16")
        for index, box in make_checkpoint._boxes(shape, chunks):
            values = make_checkpoint.values(box, axes, "bfloat16", (0, number, index))
            array[tuple(slice(*r) for r in box)] = values.view("uint16")
        whole[key.removeprefix("params.params.decoder.layers.")] = array
    for layer in range(SIZES.layers):
        at = f"model.layers.{layer}."
        gate, up = (np.swapaxes(whole[f"moe_block.wi_{i}"][:, layer], 1, 2) for i in (0, 1))
        np.testing.assert_array_equal(
            tensor(at + "mlp.experts.routed_experts.w13_weight"), np.concatenate([gate, up], 1)
        )
        down = np.swapaxes(whole["moe_block.wo"][:, layer], 1, 2)
        np.testing.assert_array_equal(tensor(at + "mlp.experts.routed_experts.w2_weight"), down)
        qkv = [
            whole[f"self_attention.{n}.kernel"][:, layer].reshape(SIZES.hidden, -1).T for n in ("query", "key", "value")
        ]
        np.testing.assert_array_equal(tensor(at + "self_attn.qkv_proj.weight"), np.concatenate(qkv))
    np.testing.assert_array_equal(tensor("model.embed_tokens.weight"), whole["params.params.token_embedder.embedding"])


def test_a_whole_array_in_one_chunk_fits_as_long_as_the_chunk_does(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    sizes = make_checkpoint.Sizes(256, 4, 384, 4, 2, 32, 4096, 16, False)
    make_checkpoint.make(checkpoint, sizes, {})
    chunk = 16 * 4 * 256 * 384 * 2
    for budget in (chunk * 3 // 2, 2 * chunk, 8 * chunk):
        convert_under(budget + 3 * chunk + BESIDES, checkpoint, tmp_path / str(budget), budget)
    one, *others = (
        next((tmp_path / str(b)).rglob("*.safetensors")).read_bytes() for b in (chunk * 3 // 2, 2 * chunk, 8 * chunk)
    )
    assert all(other == one for other in others)
    with pytest.raises(
        InputError,
        match=r"one stored chunk .* of params\.params\.decoder\.layers\.moe_block\.wi_0 decodes to 12,582,912 bytes",
    ) as caught:
        prepare(str(checkpoint), Options(memory_budget=chunk)).schedule(str(tmp_path / "never"))
    assert "--memory-budget" in str(caught.value)


def test_the_schedule_says_what_a_run_takes(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    nbytes = make_checkpoint.make(checkpoint, SIZES, GRIDS["input axis"])
    job = prepare(str(checkpoint), Options(memory_budget=BUDGET))
    made = job.schedule(str(tmp_path / "out"))
    assert made.rings <= BUDGET
    assert made.written == job.nbytes
    stack = SIZES.experts * SIZES.layers * SIZES.hidden * SIZES.ffn * 2
    spilled = {leaf for o in made.oversize if o.how == "spill" for leaf in o.leaves}
    assert {f"decoder.layers.moe_block.{name}" for name in ("wi_0", "wi_1")} <= spilled
    assert 2 * stack <= made.scratch < nbytes
    assert all("do not fit into" in o.reason for o in made.oversize)
