"""The layout of safetensors files, read back by the safetensors library itself."""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mtx2vllm.converter.errors import InputError
from mtx2vllm.converter.plans import Tensor
from mtx2vllm.converter.shards import PAGE, layout

tensors = st.lists(
    st.builds(
        lambda shape, dtype: (tuple(shape), dtype),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from(["bfloat16", "float32", "int8"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(tensors, st.one_of(st.none(), st.integers(1, 20000)))
def test_every_byte_belongs_to_one_tensor(found, limit):
    made = [Tensor(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(found)]
    files = layout(made, limit, {"layout": "hf"})
    assert sorted(n for f in files for n in f.offsets) == list(range(len(made)))
    for file in files:
        end = len(file.header)
        assert end % PAGE == 0
        for number in sorted(file.offsets, key=lambda n: (file.offsets[n], made[n].nbytes)):
            itemsize = np.dtype(made[number].dtype).itemsize
            assert file.offsets[number] == end and (end % itemsize == 0 or made[number].nbytes == 0)
            end += made[number].nbytes
        assert end == file.size
        held = sum(made[n].nbytes for n in file.offsets)
        assert limit is None or held <= limit or sum(made[n].nbytes > 0 for n in file.offsets) == 1
    order = [n for f in files for n in sorted(f.offsets)]
    assert order == sorted(order), "files are filled in the plan's order, so that they can be sent in it"


def test_the_library_reads_names_shapes_values_and_metadata(tmp_path):
    made = [Tensor("a.norm", (3,), "bfloat16"), Tensor("b", (2, 2048), "float32"), Tensor("c", (), "float32")]
    [file] = layout(made, None, {"layout": "canonical", "tool": "x"})
    data = bytearray(file.header + bytes(file.size - len(file.header)))
    values = np.arange(4096, dtype="float32").reshape(2, 2048)
    data[file.offsets[1] : file.offsets[1] + values.nbytes] = values.tobytes()
    path = tmp_path / file.name
    path.write_bytes(data)
    with safe_open(path, "np") as opened:
        assert set(opened.keys()) == {t.name for t in made}
        np.testing.assert_array_equal(opened.get_tensor("b"), values)
        assert opened.get_slice("a.norm").get_shape() == [3]
        assert opened.metadata() == {"format": "pt", "layout": "canonical", "tool": "x"}


def test_names_count_and_a_single_file_has_none():
    made = [Tensor(f"t{i}", (10,), "int8") for i in range(3)]
    assert [f.name for f in layout(made, 20, {})] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert [f.name for f in layout(made, None, {})] == ["model.safetensors"]


def test_big_tensors_come_first_and_begin_on_pages():
    made = [Tensor("norm", (7,), "bfloat16"), *(Tensor(f"w{i}", (64, 2048), "bfloat16") for i in range(3))]
    [file] = layout(made, None, {})
    assert all(file.offsets[n] % PAGE == 0 for n in (1, 2, 3))
    assert file.offsets[0] == max(file.offsets.values())


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="complex64"):
        layout([Tensor("x", (1,), "complex64")], None, {})


def test_a_header_that_readers_refuse_is_never_written():
    name = "x" * 1000
    made = [Tensor(f"{name}{i}", (1,), "int8") for i in range(100_000)]
    with pytest.raises(InputError, match="--max-shard-size"):
        layout(made, None, {})


def test_header_is_json_with_trailing_spaces_only():
    [file] = layout([Tensor("é", (2, 3), "float16")], None, {})
    length = int.from_bytes(file.header[:8], "little")
    entry = json.loads(file.header[8 : 8 + length])["é"]
    assert entry == {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 2 * prod((2, 3))]}
