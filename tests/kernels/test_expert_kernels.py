"""The Triton kernels of the expert layers: in Triton's interpreter on CPU, and ahead of time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.kernels import activation as activation_op
from steplab.kernels.experts._rows import place_assignments
from tests.kernels.expert_cases import Case, assert_results, double, make, one_expert, results
from tests.kernels.expert_checks import GELU_ERROR, check_activation
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

pytest.importorskip("triton")


class Interpreted:
    """Small tiles here, so that short inputs have several."""

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    @pytest.mark.parametrize(("rows", "inner"), [(3, 24), (2, 256), (1, 200)])
    def test_activations_equal_the_definition(self, rows, inner, activation, weighted):
        check_activation(rows, inner, activation, torch.bfloat16, weighted)

    def test_gelu_is_exact_to_a_few_millionths_of_its_value(self):
        z = torch.linspace(-12, 12, 4096)[None]
        h = activation_op.forward("triton_rows", z, "gelu")
        dz, _, _ = activation_op.backward("triton_rows", z, torch.ones_like(z), "gelu")
        leaf = z.double().requires_grad_()
        truth = 0.5 * leaf * torch.special.erfc(-leaf / 2**0.5)  # F.gelu's tail is 0 below -8.3
        (slope,) = torch.autograd.grad(truth.sum(), leaf)
        # fp32's own -z^2 / 2 is off by 72 units of 2^-24 at 12, and so is the exponential.
        rounding = 72 * 2.0**-24
        expected = truth.detach()
        torch.testing.assert_close(h.double(), expected, rtol=GELU_ERROR + rounding, atol=1e-37)
        torch.testing.assert_close(dz.double(), slope, rtol=0, atol=GELU_ERROR)

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of z^2
    def test_far_away_nothing_overflows(self):
        z = torch.tensor([[-3e38, -1e10, -200.0, 0.0, 200.0, 1e10, 3e38]])
        for activation, wide in (("gelu", z), ("swiglu", torch.cat([z, torch.ones_like(z)], 1))):
            dz, h, _ = activation_op.backward("triton_rows", wide, torch.ones_like(z), activation)
            torch.testing.assert_close(h, torch.where(z > 0, z, 0.0), rtol=1e-6, atol=1e-30)
            slope = torch.where(z == 0, 0.5, (z > 0).float())
            torch.testing.assert_close(dz[:, : z.shape[1]], slope, rtol=GELU_ERROR, atol=1e-30)

    @settings(max_examples=12)
    @given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
    def test_any_assignments_are_placed_as_by_the_definition(self, tokens, chosen, experts, seed):
        from steplab.kernels.experts._rows import launch_place

        generator = torch.Generator().manual_seed(seed)
        experts_TK = torch.randint(experts, (tokens, chosen), generator=generator)
        row_TK, source_R, offsets_E = launch_place(experts_TK, experts)
        expected = place_assignments(experts_TK, experts)
        assert torch.equal(row_TK.long(), expected.row_TK)
        assert torch.equal(offsets_E.long(), expected.offsets_E)
        assert torch.equal(source_R[row_TK.flatten()].long(), torch.arange(tokens * chosen))

    @pytest.mark.parametrize("width", [24, 200, 256])
    def test_rows_are_copied_and_added_up(self, width):
        from steplab.kernels.experts import _rows as launch

        torch.manual_seed(0)
        x = torch.randn(5, width, dtype=torch.bfloat16)
        source = torch.randperm(15).int()
        x_rows = launch.launch_gather(x, source, 3)
        assert torch.equal(x_rows, x[source // 3])
        row = torch.randperm(15).int().view(5, 3)
        first, second, third = (x_rows[row[:, k]].float() for k in range(3))
        expected = (first + second + third).bfloat16()
        # The interpreter of Triton 3.6 rounds an exact 0 to 1e-38.
        torch.testing.assert_close(launch.launch_sum(x_rows, row), expected, rtol=0, atol=1e-37)

    @pytest.mark.parametrize("activation", ["gelu", "swiglu"])
    @pytest.mark.parametrize("routing", ["skewed", "one expert"])
    def test_the_experts_equal_the_loop(self, routing, activation):
        case = Case(routing, activation, tokens=11, dtype=torch.bfloat16)
        inputs, experts_TK, d_out = make(case)
        peer = results("loop", case, inputs, experts_TK, d_out)
        exact, exact_d_out = double(inputs, d_out)
        truth = results("loop", case, exact, experts_TK, exact_d_out)
        assert_results(results("fused", case, inputs, experts_TK, d_out), peer, truth, str(case))

    def test_without_a_token_every_expert_is_empty(self):
        from steplab.kernels.experts._rows import launch_place

        row_TK, source_R, offsets_E = launch_place(torch.empty(0, 2, dtype=torch.int64), 5)
        assert row_TK.shape == (0, 2) and not source_R.numel() and not offsets_E.any()

    def test_the_network_equals_the_definition(self):
        case = Case(tokens=9, dtype=torch.bfloat16)
        inputs, _, d_out = make(case)
        peer = one_expert("reference", case, inputs, d_out)
        truth = one_expert("reference", case, *double(inputs, d_out))
        names = ("out", "dx", "dw_in", "dw_out", "dweights")
        actual = one_expert("fused", case, inputs, d_out)
        assert_results(actual, peer, truth, str(case), names)


LAUNCHES = """
import subprocess, tempfile
from pathlib import Path
from triton import knobs
from steplab.kernels.activation import RowWeights, triton_rows
from steplab.kernels.experts import _rows as rows
from steplab.kernels.grouped_mm import aten
from steplab.kernels.router import triton_router as router

half, full, index = ((lambda *s, d=d: torch.empty(*s, dtype=d))
                     for d in (torch.bfloat16, torch.float32, torch.int32))
weights = RowWeights(full(64), index(64))
for activation, wide, weights in (
    ("gelu", 3072, None), ("gelu", 3072, weights), ("swiglu", 6144, weights)
):
    triton_rows.forward(half(64, wide), activation, weights)
    triton_rows.backward(half(64, wide), half(64, 3072), activation, weights)
rows.launch_gather(half(32, 768), index(64), 2)
rows.launch_sum(half(64, 768), index(32, 2))
passes = len(kernels)
rows.launch_place(torch.zeros(32, 2, dtype=torch.int64), 8)
for experts in (255, 8):
    inputs = half(32, 768), full(experts, 768), full(1, 768)
    p, w, e, g = router.launch_forward(*inputs, 2)
    router.launch_backward(p, w, g, *inputs, p, e, g)
ends, group = aten.find_segments(index(255), 4096)
aten.add_segments(half(len(ends), 768, 64), group, 255)
for kernel in kernels[-4:]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " STACK:0 " in usage, usage  # no spilled registers
for number, kernel in enumerate(kernels):
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata
    assert len(kernel.asm["cubin"]) > 0
    # Passes over rows: 16 bytes at a time, and no division.
    if number < passes:
        ptx = kernel.asm["ptx"]
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx and "div." not in ptx, ptx
print(passes, len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES) == "8 16 kernels"


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("rows", "inner"), [(333, 3072), (100, 200), (7, 24), (64, 1536)])
def test_gpu_activations_equal_the_definition(rows, inner, activation, weighted):
    check_activation(rows, inner, activation, torch.bfloat16, weighted, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(9999, 2, 8), (333, 8, 256), (1, 1, 3)])
def test_gpu_assignments_are_placed_as_by_the_definition(tokens, chosen, experts):
    from steplab.kernels.experts._rows import place_rows

    torch.manual_seed(0)
    experts_TK = torch.randint(experts, (tokens, chosen), device="cuda")
    row_TK, source_R, offsets_E = place_rows(experts_TK, experts)
    expected = place_assignments(experts_TK, experts)
    assert torch.equal(row_TK.long(), expected.row_TK)
    assert torch.equal(offsets_E.long(), expected.offsets_E)
    assert torch.equal(source_R[row_TK.flatten()].cpu(), torch.arange(tokens * chosen).int())
