"""The Triton attention: in Triton's interpreter on CPU, ahead of time for sm_90, and on a GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import attention as op
from steplab.kernels.attention._inputs import document_bounds
from tests.kernels.attention_cases import Case, alone, check, make, results
from tests.kernels.mismatch import assert_results
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

pytest.importorskip("triton")
NAME = "triton_flash"


@pytest.mark.slow
class Interpreted:
    """Tiles are 32 by 16 or 16 by 32 here, so that short sequences have several."""

    @pytest.mark.parametrize(
        "case",
        [
            Case(heads=1, queries=64),
            Case(heads=1, queries=37, width=24),
            Case(heads=1, queries=50, keys=35, causal=False),
            Case(heads=1, queries=33, keys=70, width=8),
            Case(heads=1, queries=1, keys=40),
            Case(heads=4, key_heads=2, queries=33),
            Case(heads=1, queries=70, documents=True),
            Case(heads=1, queries=41, keys=60, documents=True, causal=False),
            Case(queries=40, width=32, dtype=torch.bfloat16),
            Case(key_heads=1, queries=35, keys=50, documents=True, dtype=torch.bfloat16),
            Case(heads=1, queries=40, dtype=torch.float16, causal=False),
        ],
        ids=str,
    )
    def test_it_equals_the_definition(self, case):
        check(NAME, case, tiny=case.queries == 1)

    @settings(max_examples=5)
    @given(
        st.sampled_from([(1, 1), (2, 1)]),
        st.integers(1, 36),
        st.integers(0, 20),
        st.integers(1, 20),
        st.booleans(),
        st.booleans(),
        st.integers(0, 99),
    )
    def test_any_shape_equals_the_definition(self, heads, queries, more, width, causal, docs, seed):
        keys = queries + more
        case = Case(1, *heads, queries, keys, width, causal, docs, torch.float32, seed)
        check(NAME, case, tiny=True)

    @pytest.mark.parametrize("causal", [False, True])
    def test_descriptors_give_the_same_bits_as_pointers(self, causal):
        from steplab.kernels.attention import triton_flash as launch

        q, k, v, d_out, ids = make(Case(queries=36, dtype=torch.float16, documents=True))
        mask = (causal, *document_bounds(ids))
        chosen = launch.tilings(q)
        found = []
        for descriptors in (False, True):
            forward, dq, dkdv = (
                replace(tiling, descriptors=descriptors)
                for tiling in (chosen.forward, chosen.dq, chosen.dkdv)
            )
            out, lse = launch.forward_by(forward, q, k, v, *mask)
            dq_, delta = launch.dq_by(dq, d_out, q, k, v, out, lse, *mask)
            found.append((out, dq_, *launch.dkdv_by(dkdv, d_out, q, k, v, lse, delta, *mask)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_any_strides_are_read_in_place(self):
        """A slice of a fused projection, a (B, H, T, D) tensor, and the gradient of a sum."""
        qkv = torch.randn(1, 20, 3, 2, 16)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        d_out = torch.ones(()).expand(q.shape)
        strided = results(NAME, q, k.contiguous(), v, d_out, None, True)
        plain = results(NAME, *(x.contiguous() for x in (q, k, v, d_out)), None, True)
        assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))

    def test_a_row_of_a_batch_equals_the_same_row_alone(self):
        case = Case(batch=2, heads=1, queries=40, documents=True)
        *tensors, ids = make(case)
        together = results(NAME, *tensors, ids, True)
        single = results(NAME, *alone(case, 1), True)
        for whole, one in zip(together, single, strict=True):
            assert torch.equal(whole[1:2], one)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where NaN is all there is
    def test_hidden_tiles_are_not_touched(self):
        """NaN in a tile that a query does not see would spread through a product with weight 0."""
        q, k, v, d_out, _ = make(Case(heads=1, queries=64))
        ids = torch.tensor([[0] * 32 + [1] * 32], dtype=torch.int32)
        early, late = slice(32), slice(32, 64)
        for causal, documents, bad, good in (
            (True, None, late, early),
            (True, ids, early, late),
            (False, ids, late, early),
        ):
            clean = results(NAME, q, k, v, d_out, documents, causal)
            poisoned = [x.clone() for x in (q, k, v, d_out)]
            for x in poisoned:
                x[:, :, bad] = torch.nan
            found = results(NAME, *poisoned, documents, causal)
            # Without documents an early key is seen by late queries, whose d_out is NaN.
            count = 2 if documents is None else 4
            for a, b in list(zip(found, clean, strict=True))[:count]:
                assert torch.equal(a[:, :, good], b[:, :, good])

    def test_scores_may_be_large(self):
        """Scores of some thousands: the weights are 0 and 1, and nothing overflows."""
        q, k, v, d_out, _ = make(Case(heads=1, queries=40))
        out, *gradients = results(NAME, 500 * q, 500 * k, v, d_out, None, True)
        truth = op.attention("reference", *(x.double() for x in (500 * q, 500 * k, v)), True)
        torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=1e-2)
        assert all(torch.isfinite(x).all() for x in gradients)

    def test_the_log_sum_exp_is_that_of_the_scores_in_bits(self):
        from steplab.kernels.attention import triton_flash as launch

        q, k, v, _, _ = make(Case(heads=1, queries=40, causal=False))
        _, lse = launch.launch_forward(q, k, v, False, None, None)
        expected = (q.double() @ k.double().mT / 4.0).logsumexp(-1) / torch.tensor(2.0).log()
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)

    def test_compiled_it_is_one_graph_with_the_same_bits(self):
        q, k, v, d_out, ids = make(Case(heads=2, key_heads=1, queries=20, documents=True))
        eager = results(NAME, q, k, v, d_out, ids, True)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        run = torch.compile(
            lambda q, k, v, d: op.attention(op.choose(NAME, q, k, v, True, d), q, k, v, True, d),
            fullgraph=True,
            backend="aot_eager",
        )
        out = run(*leaves, ids)
        compiled = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))

    def test_the_op_is_registered_as_torch_wants_it(self):
        q, k, v, _, _ = make(Case(heads=1, queries=10))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        kernel = torch.ops.steplab.triton_flash_attention.default
        torch.library.opcheck(kernel, (*leaves, True, None, None))


LAUNCHES = """
from steplab.kernels.attention import triton_flash as launch

q, k, out, d_out = (
    torch.empty(1, 256, h, 64, dtype=torch.bfloat16).transpose(1, 2) for h in (4, 2, 4, 4))
mask = (True, *2 * [torch.zeros(1, 256, dtype=torch.int32)])
_, lse = launch.launch_forward(q, k, k, *mask)
launch.launch_backward(d_out, q, k, k, out, lse, *mask)
for kernel in kernels:
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata
    assert "wgmma" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert len(kernel.asm["cubin"]) > 0
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    """Documents and shared heads; tensor cores and the copy engine are used."""
    assert compile_for_hopper(LAUNCHES) == "3 kernels"


@needs_no_gpu
def test_without_a_gpu_it_is_refused():
    q, k, v, _, _ = make(Case())
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        op.choose(NAME, q, k, v, True)


def test_every_width_and_dtype_has_tilings():
    from steplab.kernels.attention.triton_flash import tilings_for

    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for itemsize in (2, 4):
            for width in (16, 32, 64, 128, 256):
                chosen = tilings_for(width, itemsize, capability)
                for tiling in (chosen.forward, chosen.dq, chosen.dkdv):
                    # Tiles that stay and tiles of each stage, two of each; the forward has one
                    # that stays.
                    held = (1 if tiling is chosen.forward else 2) * tiling.rows
                    elements = (held + 2 * tiling.stages * tiling.columns) * width
                    limit = 227 if capability == (9, 0) else 99
                    assert elements * itemsize <= limit * 1024, (capability, itemsize, width)


GPU_CASES = [
    Case(batch=2, queries=512, width=64),
    Case(batch=2, queries=300, width=64, causal=False),
    Case(queries=333, keys=500, width=128),
    Case(heads=8, key_heads=2, queries=400, width=64),
    Case(batch=2, queries=700, width=64, documents=True),
    Case(batch=2, heads=4, key_heads=2, queries=301, keys=555, width=128, documents=True),
    Case(queries=200, width=16),
    Case(queries=200, width=80),
    Case(queries=260, width=256),
    Case(queries=1, keys=300, width=64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_equals_the_definition(case, dtype):
    # In a short document the reference is as good as exact by chance.
    tiny = case.queries == 1 or case.documents
    check(NAME, replace(case, dtype=dtype), "cuda", tiny=tiny)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_repeats_its_bits_and_rows_are_independent(width):
    case = Case(batch=3, queries=600, width=width, dtype=torch.bfloat16, documents=True)
    *tensors, ids = make(case, "cuda")
    first = results(NAME, *tensors, ids, True)
    again = results(NAME, *tensors, ids, True)
    single = results(NAME, *(x[1:2] for x in tensors), ids[1:2], True)
    for a, b, one in zip(first, again, single, strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:2], one)


@pytest.mark.gpu
def test_gpu_reads_odd_strides_by_pointers():
    """Rows of 66 elements are no multiple of 16 bytes, so the copy engine cannot read them."""
    padded = [torch.randn(1, 2, 200, 66, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, d_out = (x[..., :64] for x in padded)
    actual = results(NAME, q, k, v, d_out, None, True)
    peer = results("reference", q, k, v, d_out, None, True)
    truth = results("reference", *(x.double() for x in (q, k, v, d_out)), None, True)
    assert_results(actual, peer, truth, "odd strides")


@pytest.mark.gpu
def test_gpu_compiles_to_one_graph():
    q, k, v, d_out, ids = make(
        Case(heads=4, key_heads=2, queries=256, width=64, documents=True, dtype=torch.bfloat16),
        "cuda",
    )
    eager = results(NAME, q, k, v, d_out, ids, True)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    run = torch.compile(lambda *x: op.attention(NAME, *x[:3], True, x[3]), fullgraph=True)
    out = run(*leaves, ids)
    compiled = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
