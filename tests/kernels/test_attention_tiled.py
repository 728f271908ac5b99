"""The tiled torch version against the definition, and what it shares with the Triton one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import attention as op
from steplab.kernels.attention import tiled
from steplab.kernels.attention._inputs import document_bounds, document_of
from tests.kernels.attention_cases import Case, alone, check, make, results
from tests.kernels.mismatch import assert_results, worst_tiles

CASES = [
    Case(queries=64),
    Case(batch=2, queries=150),
    Case(queries=70, causal=False),
    Case(queries=65, keys=130, width=24),
    Case(queries=130, keys=65, causal=False),
    Case(queries=1, keys=100),
    Case(heads=6, key_heads=2, queries=90),
    Case(batch=2, queries=140, documents=True),
    Case(batch=2, queries=100, keys=140, documents=True),
    Case(batch=2, queries=140, documents=True, causal=False),
    Case(heads=4, key_heads=1, queries=100, keys=135, documents=True, dtype=torch.bfloat16),
    Case(queries=100, dtype=torch.bfloat16),
    Case(queries=100, dtype=torch.float16, causal=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_definition(case):
    check("tiled", case)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    st.integers(1, 140),
    st.integers(0, 80),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape_equals_the_definition(batch, heads, queries, more, width, causal, docs, seed):
    keys = queries + more
    case = Case(batch, *heads, queries, keys, width, causal, docs, torch.float32, seed)
    check("tiled", case, tiny=True)


def test_gradients_pass_gradcheck():
    case = Case(heads=2, key_heads=1, queries=5, keys=9, width=4, dtype=torch.float64)
    q, k, v, _, _ = make(case)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: op.attention("tiled", q, k, v, True, documents), leaves
    )


def test_several_tiles_pass_gradcheck(monkeypatch):
    monkeypatch.setattr(tiled, "TILE", 4)
    q, k, v, _, _ = make(Case(heads=1, queries=6, keys=9, width=3, dtype=torch.float64))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: op.attention("tiled", *x, True), leaves)


@pytest.mark.parametrize("documents", [False, True])
def test_a_row_of_a_batch_equals_the_same_row_alone(documents):
    case = Case(batch=3, queries=100, documents=documents)
    *tensors, ids = make(case)
    together = results("tiled", *tensors, ids, True)
    single = results("tiled", *alone(case, 1), True)
    for whole, one in zip(together, single, strict=True):
        assert torch.equal(whole[1:2], one)


def test_hidden_tiles_are_not_touched():
    """NaN beyond the last tile that a query sees would spread through a product with weight 0."""
    q, k, v, _, _ = make(Case(queries=192))
    expected = op.attention("tiled", q, k, v, True)
    k[:, :, 128:], v[:, :, 128:] = torch.nan, torch.nan
    assert torch.equal(op.attention("tiled", q, k, v, True)[:, :, :128], expected[:, :, :128])


def test_the_log_sum_exp_is_that_of_the_scores():
    q, k, v, _, _ = make(Case(queries=70, dtype=torch.float64, causal=False))
    _, lse = tiled.forward(q, k, v, False, None, None)
    torch.testing.assert_close(lse, (q @ k.mT / 4.0).logsumexp(-1))


def test_compiled_it_is_one_graph_with_the_same_bits():
    q, k, v, d_out, ids = make(Case(heads=4, key_heads=2, queries=70, documents=True))
    eager = results("tiled", q, k, v, d_out, ids, True)
    torch._dynamo.reset()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    run = torch.compile(
        lambda q, k, v, d: op.attention(op.choose("tiled", q, k, v, True, d), q, k, v, True, d),
        fullgraph=True,
        backend="aot_eager",
    )
    out = run(*leaves, ids)
    compiled = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_the_op_is_registered_as_torch_wants_it():
    q, k, v, _, ids = make(Case(heads=2, key_heads=1, queries=20, documents=True))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.steplab.tiled_attention.default, (*leaves, True, *document_bounds(ids))
    )


def test_the_output_lies_in_memory_as_the_next_projection_reads_it():
    q, k, v, _, _ = make(Case(queries=20))
    assert op.attention("tiled", q, k, v, True).transpose(1, 2).is_contiguous()


@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=3))
def test_documents_are_runs_of_equal_ids(rows):
    ids = torch.tensor(rows, dtype=torch.int32)
    first, past = document_bounds(ids)
    number = document_of(ids)
    for b, row in enumerate(rows):
        for i in range(len(row)):
            same = [j for j in range(len(row)) if len(set(row[min(i, j) : max(i, j) + 1])) == 1]
            assert (first[b, i], past[b, i]) == (same[0], same[-1] + 1)
            assert [j for j in range(len(row)) if number[b, j] == number[b, i]] == same


def test_who_takes_no_documents_says_so():
    q, k, v, _, ids = make(Case(queries=20, documents=True))
    for impl in ("flash", "math"):
        with pytest.raises(Unsupported, match="takes no document boundaries"):
            op.choose(impl, q, k, v, True, ids)
    assert op.choose("auto", q, k, v, True, ids) in ("reference", "triton_flash")
    with pytest.raises(UserError, match="one document id per key"):
        op.choose("tiled", q, k, v, True, ids[:, :5])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(queries=9, keys=5), "as many keys as queries"),
        (Case(queries=9, keys=5, documents=True, causal=False), "as many keys as queries"),
        (Case(heads=3, key_heads=2), "multiple of the key heads"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_with_the_reason(case, reason):
    q, k, v, _, ids = make(case)
    with pytest.raises(Unsupported, match=reason):
        op.choose("tiled", q, k, v, case.causal, ids)


def test_keys_of_another_batch_are_refused():
    q, k = torch.randn(2, 1, 4, 8), torch.randn(1, 1, 4, 8)
    with pytest.raises(Unsupported, match="as many rows of keys as of queries"):
        op.choose("tiled", q, k, k, True)


def test_mixed_dtypes_and_shared_heads_are_refused():
    q, k, v, _, _ = make(Case(heads=4, key_heads=2))
    with pytest.raises(Unsupported, match="one dtype"):
        op.choose("tiled", q.half(), k, v, True)
    with pytest.raises(Unsupported, match="as many key heads"):
        op.choose("flash", q, k, v, True)


def test_a_mismatch_is_reported_by_batch_head_and_tile():
    case = Case(batch=2, heads=3, queries=64)
    *tensors, ids = make(case)
    truth = results("reference", *(x.double() for x in tensors), ids, True)
    peer = results("reference", *tensors, ids, True)
    actual = [x.clone() for x in peer]
    actual[2][1, 2, 37] *= 1.001
    with pytest.raises(AssertionError, match="dk") as failure:
        assert_results(actual, peer, truth, "planted")
    assert "batch 1, head 2, rows 32-47" in str(failure.value)
    assert worst_tiles(actual[2], peer[2], truth[2]).startswith("batch 1, head 2, rows 32-47")
