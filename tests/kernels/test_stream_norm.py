"""The norm of a stream that is added to: its definition, and Triton's, interpreted and on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import stream_norm as op
from steplab.kernels.stream_norm import Norm, scatter_rows
from tests.kernels.norm_cases import BF16, EPS, FP32
from tests.kernels.stream_cases import (
    CASES,
    StreamCase,
    check_stream,
    run_stream,
    stream_inputs,
    stream_results,
)
from tests.kernels.triton_on_cpu import ROW_PASSES, compile_for_hopper, needs_no_gpu

NARROW = StreamCase(stream=BF16, weight=BF16, added=BF16, placed=3, taken=4)


@pytest.mark.parametrize("placed", [None, 3])
def test_the_definition_is_torchs_norm_of_the_sum(placed):
    case = StreamCase(placed=placed)
    leaves, (choice, _), _ = stream_inputs(case)
    normed, stream = run_stream("reference", case, leaves, (choice, None))
    added = leaves["added"] if choice is None else scatter_rows(leaves["added"], choice)
    assert torch.equal(stream, leaves["x"] + added)
    shifted = stream + leaves["offset"]
    expected = torch.nn.functional.rms_norm(shifted, (24,), leaves["weight"], EPS)
    torch.testing.assert_close(normed, expected)


def test_taken_rows_are_those_of_the_whole_norm():
    case = StreamCase(placed=3, taken=4)
    leaves, choices, _ = stream_inputs(case)
    rows, stream, score = run_stream("reference", case, leaves, choices)
    normed, same = run_stream("reference", case, leaves, (choices[0], None))
    assert torch.equal(same, stream)
    for batch, chosen in enumerate(choices[1].rows_BK):
        assert torch.equal(rows[batch], normed[batch, chosen])
    torch.testing.assert_close(score, normed @ leaves["router"])


def test_what_triton_cannot_take_has_a_reason():
    x, norm = torch.ones(1, 2, 8), Norm(torch.ones(8), EPS)
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
            op.choose("triton_stream", x, None, norm)
    refuse = op.IMPLS["triton_stream"].refuse
    assert "float64" in refuse(x.double(), None, norm)
    assert "at most" in refuse(torch.ones(1, 1, 20_000), None, norm)
    assert "sequences" in refuse(x[0], None, norm)


def test_counted_flops_are_complete_beside_these_ops():
    from steplab.probes.formulas import own_formula

    names = ("stream_norm", "stream_norm_rows", "stream_norm_backward")
    assert all(own_formula(name) for name in names)


def through_a_graph(impl, case, leaves, choices):
    compiled = torch.compile(run_stream, fullgraph=True, backend="aot_eager")
    return compiled(impl, case, leaves, choices)


class Interpreted:
    """Tiles are 4 rows forward and 2 backward, with 2 programs."""

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_all_gradients_against_fp64(self, case):
        check_stream("triton_stream", case)

    @settings(max_examples=8)
    @given(st.integers(1, 3), st.integers(1, 9), st.integers(16, 40), st.data())
    def test_any_shape_equals_its_definition(self, batch, length, width, data):
        # Of fewer than 16 numbers the definition's own error may be small by chance.
        counts = {name: data.draw(st.integers(1, length)) for name in ("placed", "taken")}
        check_stream("triton_stream", StreamCase((batch, length, width), **counts))

    @pytest.mark.parametrize("case", [NARROW, StreamCase(passed=False)], ids=str)
    def test_compiled_it_is_one_graph_with_the_same_bits(self, case):
        inputs = stream_inputs(case)
        eager = stream_results("triton_stream", case, *inputs)
        torch._dynamo.reset()
        found = stream_results("triton_stream", case, *inputs, through_a_graph)
        assert all(torch.equal(found[name], value) for name, value in eager.items())

    def test_what_is_saved(self):
        """Of the width of the model the new stream alone, once."""
        leaves, choices, _ = stream_inputs(NARROW)
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            _, stream, _ = run_stream("triton_stream", NARROW, leaves, choices)
        wide = {t.data_ptr() for t in saved if t.ndim == 3}
        assert wide == {stream.data_ptr()}

    def test_the_ops_are_registered_as_torch_wants_them(self):
        leaves, choices, (d_normed, d_stream, d_score) = stream_inputs(NARROW)
        ops, rstd = torch.ops.steplab, torch.ones(2, 7)
        x, weight, offset, added, router = leaves.values()
        forward = (x, added, choices[0].slots_BS, weight, offset, router, EPS, None)
        torch.library.opcheck(ops.stream_norm.default, forward)
        plain = (x, None, None, weight, None, None, EPS, FP32)
        torch.library.opcheck(ops.stream_norm.default, plain)
        rows = (x, rstd, choices[1].rows_BK, weight, offset, BF16)
        torch.library.opcheck(ops.stream_norm_rows.default, rows)
        slots = choices[1].slots_BS
        backward = (d_normed, slots, d_score, d_stream, x, rstd, weight, offset, router)
        # Sums that nobody asked for are not written, so all are asked for.
        torch.library.opcheck(ops.stream_norm_backward.default, backward)


LAUNCHES = """
from steplab.kernels.stream_norm import _stream_ops as norm

def bf16(*shape): return torch.empty(shape, dtype=torch.bfloat16)
long, number = torch.int64, torch.empty(2, 64)
for width in (768, 1792, 8192):
    x, part, vector = bf16(2, 64, width), bf16(2, 32, width), bf16(width)
    slots, rows = torch.zeros(2, 64, dtype=long), torch.zeros(2, 32, dtype=long)
    norm.launch_forward(x, part, slots, vector, vector, vector, 1e-6, (x, None, number, number))
    norm.launch_forward(x, x, None, vector, vector, None, 1e-6, (x, x, number, None))
    norm.launch_rows(x, number, rows, vector, vector, part)
    norm.launch_backward(part, slots, number, x, x, number, vector, vector, vector)
    norm.launch_backward(x, None, None, x, x, number, vector, vector, None)
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    pytest.importorskip("triton")
    assert compile_for_hopper(LAUNCHES + ROW_PASSES) == "21 kernels"


SEVERAL_LENGTHS = """
from steplab.kernels.stream_norm import _stream_ops as norm

vector, number = torch.empty(768), torch.empty(1, 64)
for length in (64, 80, 8):
    x = torch.empty(1, length, 768, dtype=torch.bfloat16)
    norm.launch_forward(x, None, None, vector, None, None, 1e-6, (None, x, number, None))
    norm.launch_backward(x, None, None, x, x, x[..., 0].float(), vector, vector, None)
found = {kernel.metadata.name: set() for kernel in kernels}
for kernel in kernels:
    found[kernel.metadata.name].add(kernel.hash)
print(max(map(len, found.values())))
"""


@needs_no_gpu
def test_a_length_that_varies_does_not_compile_again_and_again():
    """Two are Triton's own: a number of rows divides by 16 or it does not."""
    pytest.importorskip("triton")
    assert int(compile_for_hopper(SEVERAL_LENGTHS)) <= 2


GPU_CASES = [
    StreamCase((4, 1024, 768), BF16, BF16, BF16, placed=512, taken=512),
    StreamCase((4, 1024, 768), BF16, BF16, BF16),
    StreamCase((2, 300, 1792), BF16, BF16, BF16, placed=150, taken=150),
    StreamCase((2, 333, 768), FP32, FP32, BF16, placed=100, taken=170, out=BF16),
    StreamCase((3, 50, 100), FP32, FP32, FP32, placed=7, taken=11, passed=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gpu_equals_its_definition(case):
    check_stream("triton_stream", case, "cuda")


@pytest.mark.gpu
def test_gpu_repeats_its_bits():
    inputs = stream_inputs(GPU_CASES[0], "cuda")
    first, again = (stream_results("triton_stream", GPU_CASES[0], *inputs) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
