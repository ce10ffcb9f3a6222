"""The blocked transpose against plain assignment."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx2vllm.converter.execute import copying


@st.composite
def views(draw):
    """Two views of the same shape, strided and permuted by themselves."""
    n = draw(st.integers(1, 4))
    shape = [draw(st.sampled_from([1, 2, 16, 17, 40])) for _ in range(n)]
    found = []
    for seed in range(2):
        order = draw(st.permutations(range(n)))
        steps = [draw(st.integers(1, 2)) for _ in range(n)]
        base = [shape[d] * steps[d] + draw(st.integers(0, 2)) for d in order]
        dtype = draw(st.just(np.uint16) if seed == 0 else st.just(found[0].dtype))
        array = np.random.default_rng(seed).integers(0, 2**16, base).astype(dtype)
        cut = array[tuple(slice(0, shape[d] * steps[d], steps[d]) for d in order)]
        found.append(cut.transpose([order.index(d) for d in range(n)]))
    return found


@settings(max_examples=300, deadline=None)
@given(views())
def test_equals_an_assignment(pair):
    target, source = pair
    copying.copy(target, source)
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "float32", "float64", "int8"])
@pytest.mark.parametrize("shape", [(300, 3, 700), (256, 1, 512), (17, 2, 16), (1, 1, 1)])
def test_large_blocks(shape, dtype):
    source = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    target = np.zeros((shape[1], shape[2], shape[0] + 5), dtype)
    for layer in range(shape[1]):
        copying.copy(target[layer, :, 2 : 2 + shape[0]], source[:, layer].T)
    np.testing.assert_array_equal(target[:, :, 2:-3].astype(float), source.transpose(1, 2, 0).astype(float))
    assert not target[:, :, :2].astype(float).any() and not target[:, :, -3:].astype(float).any()


def test_axes_that_lie_alike_are_one():
    source = np.zeros((8, 5, 4, 6), np.uint16).transpose(2, 3, 0, 1)[..., 1]
    target = np.zeros((4, 6, 8), np.uint16)
    to, of = copying.coalesced(target, source)
    assert to.shape == of.shape == (24, 8)
