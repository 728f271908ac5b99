"""The Triton loss: in Triton's interpreter on CPU, ahead of time for sm_90, and on a GPU."""

import math
from dataclasses import replace

import pytest
import torch

from steplab.kernels import cross_entropy as op
from steplab.kernels.cross_entropy._chunks import chunk_rows, chunk_words
from steplab.modules.loss import LinearCrossEntropy
from tests.kernels.cross_entropy_cases import Case, check, in_small_chunks, make, results
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

pytest.importorskip("triton")
NAME = "triton_chunked"
BF16 = torch.bfloat16


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the padding of rows
class Interpreted:
    """Steps are 64 columns wide and chunks 8 tokens long, so that small inputs have several."""

    @pytest.fixture(autouse=True)
    def _several_chunks(self, monkeypatch):
        in_small_chunks(monkeypatch)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize(
        "case",
        [
            Case(tokens=20, vocabulary=150),
            Case(tokens=19, vocabulary=129, ignored=0.3),
            Case(tokens=1, vocabulary=64),
            Case(tokens=9, vocabulary=3, ignored=0.2),
            Case(tokens=21, vocabulary=131, ignored=0.2, dtype=BF16),
            Case(tokens=21, vocabulary=66, dtype=BF16, weight_dtype=torch.float32),
            Case(tokens=20, vocabulary=66, dtype=torch.float16),
            Case(tokens=20, vocabulary=150, size=40.0),
            Case(tokens=9, vocabulary=600, size=40.0, ignored=0.2),  # two whole tiles and a rest
            Case(tokens=9, vocabulary=512, dtype=BF16),  # no rest
        ],
        ids=str,
    )
    def test_it_equals_the_definition(self, case, reduction):
        check(NAME, replace(case, reduction=reduction))

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    def test_the_lean_mean_equals_the_definition(self, dtype):
        check("triton_lean", Case(tokens=21, vocabulary=66, ignored=0.2, dtype=dtype))

    def test_it_equals_the_chunks_of_torch(self):
        """The same products and chunks: only the order of the sums within a row differs."""
        for reduction in ("mean", "none"):
            inputs = make(Case(tokens=20, vocabulary=150, ignored=0.2, reduction=reduction))
            ours, torchs = (results(impl, *inputs, reduction) for impl in (NAME, "chunked"))
            for one, other in zip(ours, torchs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_where_all_is_ignored_the_mean_is_nan_and_the_gradients_are_zero(self):
        x, weight, targets, _ = make(Case(tokens=9, ignored=1.1))
        mean, *gradients = results(NAME, x, weight, targets, torch.tensor(1.0), "mean")
        assert math.isnan(mean) and not any(bool(g.any()) for g in gradients)
        losses, *gradients = results(NAME, x, weight, targets, torch.ones(9), "none")
        assert not losses.any() and not any(bool(g.any()) for g in gradients)
        mean, *gradients = results("triton_lean", x, weight, targets, torch.tensor(1.0), "mean")
        assert math.isnan(mean) and not any(bool(g.any()) for g in gradients)

    @pytest.mark.parametrize("target", [150, -1])
    def test_a_target_outside_of_the_vocabulary_gives_nan(self, target):
        """Memory beside the logits is not read; the other tokens keep their losses."""
        x, weight, targets, _ = make(Case(tokens=9, vocabulary=150))
        good = op.cross_entropy(NAME, x, weight, targets, "none")
        targets[4] = target
        others = torch.arange(9) != 4
        losses, *gradients = results(NAME, x, weight, targets, torch.ones(9), "none")
        assert torch.equal(losses[others], good[others]) and math.isnan(losses[4])
        mean, *other_gradients = results(NAME, x, weight, targets, torch.tensor(1.0), "mean")
        assert math.isnan(mean)
        for dx, dw in (gradients, other_gradients):
            assert bool(dx[4].isnan().all()) and not dx[others].isnan().any()
            assert bool(dw.isnan().all())

    def test_logits_may_be_huge(self):
        x, weight, targets, d_loss = make(Case(tokens=20, vocabulary=150, size=2e4))
        found = results(NAME, x, weight, targets, d_loss, "mean")
        exact = results("reference", x.double(), weight.double(), targets, d_loss.double(), "mean")
        for ours, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=1e-3)

    def test_strides_of_targets_and_of_the_gradient_are_respected(self):
        x, weight, _, _ = make(Case(tokens=20))
        targets = torch.randint(37, (20, 2))[:, 0]
        d_loss = torch.tensor(0.7).expand(20)
        strided = results(NAME, x, weight, targets, d_loss, "none")
        plain = results(NAME, x, weight, targets.contiguous(), d_loss.contiguous(), "none")
        assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_compiled_it_is_one_graph_with_the_same_bits(self, reduction):
        x, weight, targets, d_loss = make(Case(tokens=20, reduction=reduction))
        eager = results(NAME, x, weight, targets, d_loss, reduction)
        module = LinearCrossEntropy(reduction)
        module.impl = NAME
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        loss = torch.compile(module, fullgraph=True, backend="aot_eager")(*leaves, targets)
        compiled = [loss.detach(), *torch.autograd.grad(loss, leaves, d_loss)]
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))

    def test_the_ops_are_registered_as_torch_wants_them(self):
        x, weight, targets, _ = make(Case(tokens=10))
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        ops = torch.ops.steplab
        known = (*leaves, targets, -100)
        torch.library.opcheck(ops.triton_chunked_cross_entropy_mean, (*known, True, True))
        torch.library.opcheck(ops.triton_chunked_cross_entropy_tokens, known)


LAUNCHES = """
from steplab.kernels.cross_entropy import triton_chunked as rows

logits = torch.empty(8, 50304, dtype=torch.bfloat16)[:, :50257]
targets, losses, norms = torch.zeros(8, dtype=torch.int64), torch.zeros(8), torch.zeros(2, 8)
rows.loss(logits, targets, -100, losses, norms, losses[:1])
rows.loss(logits, targets, -100, losses, norms, None)
rows.gradient(logits[:, :1280], targets, -100, norms, 1280, losses)
for kernel in kernels:
    ptx = kernel.asm["ptx"]
    assert "ld.global.v4.b32" in ptx, "16 bytes at once, though 50,257 is odd"
    assert "st.global.v4.b32" in ptx or kernel is kernels[1]
    assert "ld.local" not in ptx and len(kernel.asm["cubin"]) > 0
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES) == "3 kernels"


@pytest.fixture
def many_chunks(monkeypatch):
    in_small_chunks(monkeypatch, 128)


GPU_CASES = [
    Case(tokens=2000, width=256, vocabulary=5003, ignored=0.1),
    Case(tokens=1537, width=128, vocabulary=50_257),
    Case(tokens=700, width=64, vocabulary=1000, ignored=0.5),
    Case(tokens=1, width=64, vocabulary=333),
    Case(tokens=600, width=40, vocabulary=7),
    Case(tokens=600, width=64, vocabulary=2048, size=40.0),
]


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["chunked", NAME, "triton_lean"])
@pytest.mark.parametrize(
    "dtypes", [(BF16, None), (BF16, torch.float32), (torch.float16, None), (torch.float32, None)]
)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_equals_the_definition(case, dtypes, impl, reduction, many_chunks):
    dtype, weight_dtype = dtypes
    check(impl, replace(case, dtype=dtype, weight_dtype=weight_dtype, reduction=reduction), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gpu_compiles_to_one_graph_without_a_sync(reduction, many_chunks):
    case = Case(tokens=1500, width=128, vocabulary=5003, dtype=BF16, reduction=reduction)
    x, weight, targets, d_loss = make(case, "cuda")
    eager = results(NAME, x, weight, targets, d_loss, reduction)
    module = LinearCrossEntropy(reduction)
    module.impl = NAME
    run = torch.compile(module, fullgraph=True)
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    for watched in (False, True):  # the first call compiles, and may wait for it
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            loss = run(*leaves, targets)
            compiled = [loss.detach(), *torch.autograd.grad(loss, leaves, d_loss)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gpu_a_captured_graph_takes_new_inputs(reduction, many_chunks):
    case = Case(tokens=1500, width=128, vocabulary=5003, dtype=BF16, reduction=reduction)
    static = make(case, "cuda")
    other = make(replace(case, seed=1, ignored=0.3), "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(NAME, *static, reduction)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(NAME, *static, reduction)
    for kept, new in zip(static, other, strict=True):
        kept.copy_(new)
    graph.replay()
    for ours, plain in zip(captured, results(NAME, *other, reduction), strict=True):
        assert torch.equal(ours, plain)


def sizes_of_the_peak(impl, T, D, V):
    """Bytes of what lives at the fullest moments, in bf16."""
    if impl == NAME:
        rows = chunk_rows(T, 2 * 50_304, D)
        in_chunks = 4 * V * D + 2 * rows * 50_304 + 2 * T * D + 4 * rows * D
        return max(in_chunks, 4 * V * D + 2 * V * D + 2 * T * D)
    words = chunk_words(V, 2 * T)
    return 2 * V * D + 4 * T * D + 2 * T * words + 4 * words * D


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [NAME, "triton_lean"])
def test_gpu_memory_is_one_chunk_and_the_gradients(impl):
    T, D, V = 16_384, 768, 50_257
    x = torch.randn(T, D, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(V, D, device="cuda", dtype=BF16, requires_grad=True)
    targets = torch.randint(V, (T,), device="cuda")
    assert op.choose("auto", x, weight, targets) == NAME
    results(impl, x, weight, targets, torch.ones((), device="cuda"), "mean")  # cuBLAS's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    op.cross_entropy(impl, x, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.02 * sizes_of_the_peak(impl, T, D, V)
    logits = 2 * T * V
    assert peak < (2 * logits / 6 if impl == NAME else (logits + 2 * V * D + 2 * T * D) / 10)
