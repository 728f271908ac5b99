"""Attention by blocks of queries: in torch, in Triton's interpreter, for sm_90, and on a GPU."""

import pytest
import torch

from steplab.costs import op_flops
from steplab.kernels import attention as op
from steplab.kernels.attention import blocks
from steplab.testing.tolerance import assert_as_good_as
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

SHAPES = [  # B, H, T, S, K, V, causal
    (2, 1, 11, 11, 8, 24, True),
    (1, 2, 8, 8, 4, 6, True),
    (1, 1, 5, 14, 8, 16, True),
    (1, 2, 6, 9, 4, 12, False),
    (3, 2, 1, 9, 8, 24, True),
]


def make(shape, dtype, device="cpu"):
    """Return q, k, v and the gradient of the output; heads stand inside in memory."""
    B, H, T, S, K, V, _ = shape
    generator = torch.Generator().manual_seed(0)

    def normal(length, width):
        x = torch.randn(B, length, H, width, generator=generator, dtype=torch.float64)
        return x.to(device, dtype).transpose(1, 2)

    return normal(T, K), normal(S, K), normal(S, V), normal(T, V)


def results(impl, q, k, v, d_out, causal):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = op.attention(impl, *leaves, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def check(shape, dtype, device="cpu"):
    inputs, causal = make(shape, dtype, device), shape[-1]
    assert op.choose("blocks", *inputs[:3], causal) == "blocks"
    actual, peer = (results(impl, *inputs, causal) for impl in ("blocks", "reference"))
    truth = results("reference", *(x.double() for x in inputs), causal)
    for name, *three in zip(("out", "dq", "dk", "dv"), actual, peer, truth, strict=True):
        assert_as_good_as(*three, name=f"{shape} {dtype} {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_definition(shape, dtype, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    if dtype == torch.float64:
        inputs, causal = make(shape, dtype), shape[-1]
        for found, expected in zip(
            results("blocks", *inputs, causal), results("reference", *inputs, causal), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    else:
        check(shape, dtype)


class Interpreted:
    """A block has 4 queries."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_the_kernels_equal_the_definition(self, shape, dtype):
        check(shape, dtype)

    def test_compiled_it_is_one_graph_with_the_same_bits(self):
        q, k, v, d_out = make(SHAPES[0], torch.float32)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        run = torch.compile(
            lambda *x: op.attention("blocks", *x, True), fullgraph=True, backend="aot_eager"
        )
        out = run(*leaves)
        found = [out, *torch.autograd.grad(out, leaves, d_out)]
        for mine, eager in zip(found, results("blocks", q, k, v, d_out, True), strict=True):
            assert torch.equal(mine, eager)

    def test_the_ops_are_registered_as_torch_wants_them(self):
        leaves = [x.detach().requires_grad_() for x in make(SHAPES[3], torch.float32)[:3]]
        torch.library.opcheck(torch.ops.steplab.blocks_attention.default, (*leaves, False))


LAUNCHES = """
from steplab.kernels.attention import blocks

for dtype in (torch.bfloat16, torch.float32):
    scores = torch.empty(8, 2048, 2048, dtype=dtype)
    blocks.launch_softmax(scores, 0.1, True, 512)
    blocks.launch_softmax_backward(scores, scores, 0.1, True, 512)
scores = torch.empty(1, 1, 16384, dtype=torch.bfloat16)
blocks.launch_softmax_backward(scores, scores, 0.1, True, 512)
for kernel in kernels:
    assert len(kernel.asm["cubin"]) > 0
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    assert compile_for_hopper(LAUNCHES) == "5 kernels"


def test_blocks_cover_every_pair_once(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    for queries, keys in ((11, 11), (8, 8), (5, 14), (1, 3)):
        by_query, by_key = torch.zeros(queries, keys), torch.zeros(queries, keys)
        for own, seen in blocks.query_blocks(queries, keys, True):
            by_query[own, seen] += 1
        for own, later in blocks.key_blocks(queries, keys, True):
            by_key[later, own] += 1
        visible = torch.ones(queries, keys).tril(keys - queries)
        assert torch.equal(by_query, by_key) and bool((by_query >= visible).all())
        assert by_query.max() == 1


def test_the_pairs_are_those_that_the_formula_counts():
    from steplab.probes.formulas import own_formula

    q, k = torch.empty(2, 1, 1300, 8, device="meta"), torch.empty(2, 1, 1500, 8, device="meta")
    v = torch.empty(2, 1, 1500, 24, device="meta")
    pairs = op_flops.attention_block_pairs(1300, 1500)
    computed = blocks.query_blocks(1300, 1500, True)
    assert pairs == sum((own.stop - own.start) * seen.stop for own, seen in computed)
    assert own_formula("blocks_attention")(q, k, v, True) == 2 * pairs * 2 * (8 + 24)
    assert pairs == 512 * 712 + 512 * 1224 + 276 * 1500


def test_what_it_refuses():
    q, k, v, _ = make(SHAPES[0], torch.float32)

    def refused(*inputs):
        return blocks.refuse(op.AttentionInputs(*inputs))

    assert "one dtype" in refused(q.double(), k, v, True)
    assert "as many keys as queries" in refused(q, k[:, :, :3], v, True)
    assert "document boundaries" in refused(q, k, v, True, torch.zeros(2, 11))
    assert "at least one" in refused(q[:, :, :0], k, v, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1100, 1100, 64, 256, True), (1, 2, 700, 1300, 32, 64, True)], ids=str
)
def test_gpu_equals_the_definition(shape, dtype):
    check(shape, dtype, "cuda")
