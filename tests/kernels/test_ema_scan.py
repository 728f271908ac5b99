"""The Triton scan: in Triton's interpreter on CPU, ahead of time for sm_90, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import ema as op
from steplab.kernels.ema import EMAParameters
from tests.kernels.ema_cases import Case, check, make, results
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

pytest.importorskip("triton")


@pytest.mark.slow
class Interpreted:
    """A chunk has 8 steps, a program 4 channels and a block 4 or 2 steps here."""

    @pytest.mark.parametrize(
        "case",
        [
            Case(length=8),
            Case(length=1, state=True, last=True),
            Case(length=3, width=3, modes=1, state=True),
            Case(length=9, last=True),
            Case(batch=2, length=19, width=5, modes=3, state=True, last=True),
            Case(length=24, memory=-4.0, state=True, last=True),
            Case(length=5, width=2, modes=17),
            Case(length=21, dtype=torch.bfloat16, state=True, last=True),
            Case(length=11, dtype=torch.float16),
        ],
        ids=str,
    )
    def test_it_equals_the_definition(self, case):
        check("scan", case)

    def test_chunks_grow_where_there_would_be_too_many(self, monkeypatch):
        from steplab.kernels.ema import scan

        monkeypatch.setattr(scan, "MAX_CHUNKS", 4)
        check("scan", Case(length=45, width=1, modes=1, last=True))  # 3 chunks of 16, not 6 of 8

    def test_two_pieces_equal_one(self):
        inputs = make(Case(batch=2, length=23))
        whole, last = op.ema("scan", inputs.x, inputs.parameters, None, True)
        for cut in (1, 8, 13, 22):
            left, state = op.ema("scan", inputs.x[:, :cut], inputs.parameters, None, True)
            right, end = op.ema("scan", inputs.x[:, cut:], inputs.parameters, state, True)
            torch.testing.assert_close(torch.cat([left, right], 1), whole, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(end, last, rtol=2e-6, atol=2e-6)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where NaN is all there is
    def test_the_future_is_not_seen(self):
        """A NaN leaves every earlier step as it was, to the bit."""
        inputs = make(Case(length=21))
        clean = op.ema("scan", inputs.x, inputs.parameters)[0]
        for place in (0, 5, 8, 14, 20):
            spoiled = inputs.x.clone()
            spoiled[:, place] = torch.nan
            found = op.ema("scan", spoiled, inputs.parameters)[0]
            assert torch.equal(found[:, :place], clean[:, :place])
            assert bool(found[:, place:].isnan().all())

    def test_any_strides_and_expanded_gradients(self):
        inputs = make(Case(length=10))
        turned = inputs.x.transpose(1, 2).contiguous().transpose(1, 2)
        dy = torch.ones(()).expand(inputs.x.shape)
        strided = results("scan", replace(inputs, x=turned, dy=dy))
        plain = results("scan", replace(inputs, dy=dy.contiguous()))
        assert all(torch.equal(strided[name], plain[name]) for name in plain)

    def test_a_gradient_of_the_last_state_alone(self):
        inputs = make(Case(length=10, state=True, last=True))
        leaves = [t.detach().requires_grad_() for t in (inputs.x, *inputs.parameters)]

        def last_gradients(impl):
            _, last = op.ema(impl, leaves[0], EMAParameters(*leaves[1:]), inputs.state, True)
            return torch.autograd.grad(last, leaves, inputs.dlast, allow_unused=True)

        for found, expected in zip(
            last_gradients("scan"), last_gradients("sequential"), strict=True
        ):
            expected = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_nothing_is_kept_but_what_the_gradients_need(self):
        """Inputs, parameters, tables and one state per chunk: nothing as large as all states."""
        inputs = make(Case(batch=2, length=40))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            op.ema("scan", inputs.x.requires_grad_(), inputs.parameters)
        states = 2 * 5 * 2 * 2 * 4  # batch, chunks, real and imaginary, modes, channels
        tables = (4 + 2 + 4) * 2 * 2 * 4
        stored = sum(p.numel() for p in inputs.parameters)
        assert sum(x.numel() for x in kept) == inputs.x.numel() + stored + tables + states

    def test_compiled_it_is_one_graph_with_the_same_bits(self):
        inputs = make(Case(length=13, state=True, last=True))
        eager = results("scan", inputs)
        leaves = [t.detach().requires_grad_() for t in (inputs.x, *inputs.parameters)]

        def run(x, state, *stored):
            parameters = EMAParameters(*stored)
            return op.ema(op.choose("scan", x, parameters, state), x, parameters, state, True)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        y, last = compiled(leaves[0], inputs.state, *leaves[1:])
        gradients = torch.autograd.grad([y, last], leaves, [inputs.dy, inputs.dlast])
        assert torch.equal(y, eager["y"]) and torch.equal(last, eager["last"])
        names = [f"d_{name}" for name in ("x", *EMAParameters._fields)]
        assert all(torch.equal(g, eager[name]) for g, name in zip(gradients, names, strict=True))

    def test_the_ops_are_registered_as_torch_wants_them(self):
        inputs = make(Case(length=6, width=2, modes=1))
        leaves = [t.detach().requires_grad_() for t in (inputs.x, *inputs.parameters)]
        torch.library.opcheck(torch.ops.steplab.ema_scan.default, (*leaves, None, False))


LAUNCHES = """
from steplab.kernels.ema import scan

def run(length, width, modes, has_state):
    x = torch.empty(1, length, width, dtype=torch.bfloat16)
    parameters = [torch.empty(width, modes) for _ in range(2)]
    parameters += [torch.empty(width), torch.empty(width, modes, 2), torch.empty(width)]
    state = torch.empty(1, 2, modes, width) if has_state else None
    tiling = scan.tiling_of(parameters)
    kept = scan.forward_by(tiling, x, parameters, state, has_state)[-1]
    scan.backward_by(tiling, x, None, x, parameters, kept, has_state)

run(600, 96, 4, True)
run(1, 96, 4, True)  # a length of 1 is no constant to the compiler
run(4096, 1024, 16, False)
for kernel in kernels:
    name = kernel.metadata.name
    assert len(kernel.asm["cubin"]) > 0
    if name in ("ema_sums_kernel", "ema_outputs_kernel", "ema_gradients_kernel"):
        # All modes of a channel are in one thread's registers: nothing passes between threads.
        assert kernel.metadata.shared == 0 and "shfl" not in kernel.asm["ptx"], name
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES) == "23 kernels"


@needs_no_gpu
def test_without_a_gpu_it_is_refused():
    inputs = make(Case())
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        op.choose("scan", inputs.x, inputs.parameters)


def test_long_sequences_have_a_bounded_number_of_chunks():
    from steplab.kernels.ema.scan import MAX_CHUNKS, ScanTiling

    for length in (1, 256, 257, 8192, 8193, 1_000_000):
        chunk = ScanTiling().chunk_length(length)
        assert -(-length // chunk) <= MAX_CHUNKS
        assert chunk == 256 or -(-length // (chunk // 2)) > MAX_CHUNKS


GPU_CASES = [
    Case(batch=2, length=600, width=100, modes=16, state=True, last=True),
    Case(length=1, width=64, modes=16, state=True, last=True),
    Case(length=1000, width=40, modes=8, memory=-4.0, last=True),
    Case(length=300, width=33, modes=3),
    Case(length=260, width=32, modes=32, state=True, last=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_equals_the_definition(case):
    check("scan", replace(case, dtype=torch.bfloat16), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gpu_other_dtypes(dtype):
    check("scan", replace(GPU_CASES[0], dtype=dtype), "cuda")


@pytest.mark.gpu
def test_gpu_repeats_its_bits():
    inputs = make(Case(batch=3, length=700, width=64, modes=16, dtype=torch.bfloat16), "cuda")
    first, again = results("scan", inputs), results("scan", inputs)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_gpu_compiles_to_one_graph():
    inputs = make(Case(length=300, width=64, modes=8, dtype=torch.bfloat16), "cuda")
    run = torch.compile(lambda x, *p: op.ema("scan", x, EMAParameters(*p))[0], fullgraph=True)
    assert torch.equal(run(inputs.x, *inputs.parameters), results("scan", inputs)["y"])
