"""Rows of a table: torch's lookup, and sorted ids, against fp64, and by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.kernels.embedding import IMPLS, embedding
from steplab.testing.tolerance import assert_as_good_as
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def looked_up(impl, weight, ids, scale, dout):
    """Return the rows, and the gradient of the table."""
    table = weight.clone().requires_grad_()
    found = IMPLS[impl].embedding(table, ids, scale)
    found.backward(dout.to(found.dtype))
    return found.detach(), table.grad


def assert_is_the_lookup(impl, rows, width, ids, dtype=torch.float32, scale=1.5, device="cpu"):
    generator = torch.Generator().manual_seed(rows + width)
    weight = torch.randn(rows, width, generator=generator).to(device, dtype)
    ids = torch.tensor(ids, dtype=torch.int64, device=device)
    dout = torch.randn(len(ids), width, generator=generator).to(device, dtype)
    found, dweight = looked_up(impl, weight, ids, scale, dout)
    peer, dpeer = looked_up("aten", weight, ids, scale, dout)
    truth, dtruth = looked_up("aten", weight.double(), ids, scale, dout.double())
    assert found.dtype == dweight.dtype == dtype
    assert_as_good_as(found, peer, truth, "rows")
    floor = rounding_of_sums(ids, dout, scale, dtruth)
    assert_as_good_as(dweight, dpeer, dtruth, "gradient", floor)
    absent = torch.ones(rows, dtype=torch.bool, device=device)
    absent[ids] = False
    assert not dweight[absent].any()
    again = looked_up(impl, weight, ids, scale, dout)
    assert torch.equal(found, again[0]) and torch.equal(dweight, again[1])


def rounding_of_sums(ids, dout, scale, dtruth):
    """Return what rounding may cost: additions in fp32 one after the other, and a product.

    Each of them rounds by at most half a unit of the sum of the magnitudes.
    """
    magnitudes = torch.zeros_like(dtruth).index_add_(0, ids, dout.double().abs() * abs(scale))
    counts = torch.bincount(ids, minlength=len(dtruth))[:, None]
    each = torch.finfo(torch.float32).eps / 2 * counts * magnitudes
    return float(each.norm() / dtruth.norm().clamp_min(1e-300))


def test_ids_of_any_shape_and_no_scale():
    weight = torch.randn(7, 5)
    ids = torch.tensor([[1, 6, 1], [0, 0, 3]])
    assert torch.equal(embedding(weight, ids), weight[ids])
    assert torch.equal(embedding(weight, ids, 2.0), 2 * weight[ids])


def test_a_compiled_lookup_is_the_same():
    weight, ids = torch.randn(7, 5, requires_grad=True), torch.tensor([[1, 6], [1, 3]])
    compiled = torch.compile(embedding, backend="aot_eager", fullgraph=True)
    plain = torch.autograd.grad(embedding(weight, ids, 3.0).square().sum(), weight)[0]
    found = torch.autograd.grad(compiled(weight, ids, 3.0).square().sum(), weight)[0]
    assert torch.equal(plain, found)


class Interpreted:
    @settings(max_examples=30, deadline=None)
    @given(
        ids=st.lists(st.integers(0, 8), min_size=0, max_size=40),
        width=st.sampled_from([1, 16, 24, 40]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def test_gradients_are_sums_over_equal_ids(self, ids, width, dtype):
        assert_is_the_lookup("triton_sorted", 9, width, ids, dtype)

    @pytest.mark.parametrize("rows", [7, 8, 9])
    def test_ids_of_few_and_of_many_bits(self, rows, monkeypatch):
        monkeypatch.setattr(IMPLS["triton_sorted"], "SHORT", 4)  # tables of up to 8 rows
        last = rows - 1
        assert_is_the_lookup("triton_sorted", rows, 16, [last, 0, 4, last, 3, 0, 2, 4])

    def test_an_id_outside_of_the_table_is_nan_and_harms_nothing_else(self):
        weight, ids = torch.ones(4, 16), torch.tensor([1, -1, 4, 3])
        found, dweight = looked_up("triton_sorted", weight, ids, 1.0, torch.ones(4, 16))
        assert found.isnan().all(1).tolist() == [False, True, True, False]
        assert dweight.sum(1).tolist() == [0, 16, 0, 16]

    def test_ids_that_torch_does_not_take_are_left_to_its_error(self):
        weight, ids = torch.ones(4, 16), torch.tensor([1, 3], dtype=torch.uint8)
        assert "32 or 64 bits" in IMPLS["triton_sorted"].refuse(weight, ids)
        with pytest.raises(RuntimeError, match="scalar type"):
            embedding(weight, ids)

    def test_a_transposed_gradient(self):
        weight, ids = torch.randn(5, 6, requires_grad=True), torch.tensor([0, 3, 3])
        dout = torch.randn(6, 3).T
        IMPLS["triton_sorted"].embedding(weight, ids, 1.0).backward(dout)
        torch.testing.assert_close(weight.grad[3], dout[1] + dout[2])


@needs_no_gpu
@pytest.mark.slow
def test_the_kernels_compile_for_hopper():
    launches = """
from steplab.kernels.embedding import triton_sorted
weight, dout = (torch.empty(rows, 768, dtype=torch.bfloat16) for rows in (50_257, 16_384))
ids = torch.zeros(16_384, dtype=torch.int64)
triton_sorted.embedding._init_fn(weight, ids, 27.7)
triton_sorted.embedding_backward._init_fn(dout, ids, 27.7, 50_257)
for kernel in kernels:
    assert ".local" not in kernel.asm["ptx"], kernel.metadata.name
    wide = "ld.global.v4.b32" in kernel.asm["ptx"]
    assert wide or kernel.metadata.name == "bounds_kernel", kernel.metadata.name
print(len(kernels), "kernels")
"""
    assert compile_for_hopper(launches) == "3 kernels"


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [50_257, 70_000])
def test_hydras_lookup_on_a_gpu(rows, dtype):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(rows, (16_384,), generator=generator)
    ids[::7] = 42  # a frequent one
    assert_is_the_lookup("triton_sorted", rows, 768, ids.tolist(), dtype, 27.7, "cuda")
