"""Products with gelu in their kernels: interpreted, ahead of time, and on a GPU, against fp64."""

from dataclasses import replace

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import activation as activation_op
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.dispatch import worth_trying
from steplab.kernels.experts import epilogue
from steplab.kernels.grouped_mm import _epilogue as launch
from steplab.kernels.grouped_mm import product
from steplab.testing.tolerance import assert_as_good_as
from tests.kernels.expert_cases import (
    ROUTINGS,
    Case,
    assert_results,
    double,
    make,
    one_expert,
    results,
)
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

pytest.importorskip("triton")
GROUPS = {
    "odd": [7, 24, 24, 41],
    "one row": [1, 40, 40, 41],
    "first empty": [0, 17, 33, 41],
    "last only": [0, 0, 0, 41],
    "whole tiles": [16, 32, 32, 41],
}
DEFAULT = launch.FORWARD, launch.BACKWARD
FEED_FORWARD = ("out", "dx", "dw_in", "dw_out", "dweights")


def draw(rows, width, inner, offsets, device="cpu"):
    """Return x, w_in, w_out, offsets and the weights of rows that are in another order."""
    generator = torch.Generator().manual_seed(rows)
    shapes = (rows, width), (len(offsets), inner, width), (len(offsets), width, inner)
    x, w_in, w_out = (
        torch.randn(*shape, generator=generator).mul(shape[-1] ** -0.5).to(device, torch.bfloat16)
        for shape in shapes
    )
    source = torch.randperm(rows, generator=generator).to(device, torch.int32)
    weights = activation_op.RowWeights(torch.rand(rows, generator=generator).to(device), source)
    ends = torch.tensor(offsets, dtype=torch.int32, device=device)
    return 4 * x, w_in, w_out, ends, weights


def apart(x, w_in, w_out, ends, weights, z=None):
    """Return z, h, dz, h again and dweights by products and activations one after the other."""
    if weights is not None and x.dtype == torch.float64:
        weights = activation_op.RowWeights(weights.values_R.double(), weights.source_R)
    own_z = product("loop", x, w_in.mT, ends)
    h = activation_op.forward("reference", own_z, "gelu", weights)
    z = own_z if z is None else z  # the backward's, which is given
    dh = product("loop", x, w_out, ends)
    return [own_z, h, *activation_op.backward("reference", z, dh, "gelu", weights)]


def check_products(rows, width, inner, offsets, weighted, device="cpu", tilings=DEFAULT):
    """Compare both products with the same in fp64, and with the same apart as a peer."""
    inputs = [*draw(rows, width, inner, offsets, device)]
    inputs[4] = inputs[4] if weighted else None
    x, w_in, w_out, ends, weights = inputs
    z, h = launch.product_gelu(x, w_in, ends, weights, tilings[0])
    found = [z, h, *launch.product_slope(x, w_out, ends, z, weights, tilings[1])]
    peer = apart(*inputs, z)
    truth = apart(x.double(), w_in.double(), w_out.double(), ends, weights, z.double())
    for name, a, p, t in zip(("z", "h", "dz", "h again"), found, peer, truth, strict=False):
        assert_as_good_as(a, p, t, f"{name} of {offsets}")
    if device == "cpu":  # a GPU's compiler may round other steps of the two kernels together
        assert torch.equal(found[1], found[3])
    if weighted:
        assert_as_good_as(found[4], peer[4], truth[4], f"dweights of {offsets}")
    else:
        assert found[4] is None


@pytest.mark.slow
class Interpreted:
    """Tiles of 16 rows, 32 columns and 16 along the sum, taken by three programs in turn."""

    @pytest.mark.parametrize("offsets", GROUPS.values(), ids=GROUPS)
    def test_a_table_names_every_block_once(self, offsets):
        table, room = launch.find_blocks(torch.tensor(offsets, dtype=torch.int32), 41, 16)
        expected = [
            (group, row, end)
            for group, (start, end) in enumerate(zip([0, *offsets], offsets, strict=False))
            for row in range(start, end, 16)
        ]
        used = int(table[-1])
        assert list(zip(*table[:-1].view(3, room)[:, :used].tolist(), strict=True)) == expected

    def test_many_groups_are_found_by_several_programs(self):
        table, room = launch.find_blocks(torch.arange(1, 256).int(), 255, 16)
        assert room == 271 and int(table[-1]) == 255
        assert table[:255].tolist() == list(range(255))

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("offsets", GROUPS.values(), ids=GROUPS)
    def test_products_equal_those_apart(self, offsets, weighted):
        check_products(41, 48, 64, offsets, weighted)

    @pytest.mark.parametrize("form", ["plain", "flat"])
    def test_so_do_those_that_finish_a_tile_first(self, form):
        tiling = launch.FORWARD._replace(form=form, finished=8)  # a quarter of the columns
        check_products(41, 48, 64, GROUPS["odd"], True, tilings=[tiling] * 2)

    def test_no_rows_are_no_work(self):
        x, w_in, w_out, ends, weights = draw(0, 48, 64, [0, 0])
        z, h = launch.product_gelu(x, w_in, ends, weights)
        dz, again, dweights = launch.product_slope(x, w_out, ends, z, weights)
        assert z.shape == h.shape == dz.shape == again.shape == (0, 64)
        assert dweights.shape == (0,)

    @pytest.mark.parametrize("routing", ["skewed", "one expert"])
    def test_the_experts_equal_the_loop(self, routing):
        case = Case(routing, tokens=19, width=48, inner=64, dtype=torch.bfloat16)
        inputs, experts_TK, d_out = make(case)
        peer = results("loop", case, inputs, experts_TK, d_out)
        exact, exact_d_out = double(inputs, d_out)
        truth = results("loop", case, exact, experts_TK, exact_d_out)
        actual = results("epilogue", case, inputs, experts_TK, d_out)
        assert_results(actual, peer, truth, str(case))

    @pytest.mark.parametrize("weighted", [False, True])
    def test_the_network_equals_the_definition(self, weighted):
        case = Case(tokens=19, width=48, inner=64, dtype=torch.bfloat16)
        inputs, _, d_out = make(case)
        peer = one_expert("reference", case, inputs, d_out, weighted)
        truth = one_expert("reference", case, *double(inputs, d_out), weighted)
        actual = one_expert("epilogue", case, inputs, d_out, weighted)
        assert_results(actual, peer, truth, str(case), FEED_FORWARD[: 5 if weighted else 4])

    def test_what_has_no_whole_tiles_or_another_activation_is_refused(self):
        x, w_in, w_out = (torch.empty(s).bfloat16() for s in ((4, 48), (2, 64, 48), (2, 48, 64)))
        weights = experts_op.ExpertWeights(w_in, w_out, "gelu")
        assert epilogue.refuse(x, weights) == ""
        assert epilogue.refuse(x, weights._replace(w_out_EDF=w_out[..., :40])) == (
            "needs as width a multiple of 16 from 48 on, and inner of 32, not 48 and 40"
        )
        assert epilogue.refuse(x, weights._replace(activation="swiglu")) == "needs gelu, not swiglu"
        with pytest.raises(Unsupported, match="needs gelu, not swiglu"):
            feed_forward_op.choose("epilogue", x, w_in[0], w_out[0, :, :32])


def test_a_search_does_not_try_it_before_it_is_measured():
    assert not worth_trying("experts", "epilogue") and "epilogue" not in experts_op.PREFERENCE
    assert not worth_trying("feed_forward", "epilogue")
    assert "epilogue" not in feed_forward_op.PREFERENCE


LAUNCHES = """
import re, subprocess, tempfile
from pathlib import Path
from triton import knobs
from steplab.kernels.activation import RowWeights
from steplab.kernels.grouped_mm import _epilogue as launch

half, full, index = ((lambda *s, d=d: torch.empty(*s, dtype=d))
                     for d in (torch.bfloat16, torch.float32, torch.int32))
weights = RowWeights(full(256), torch.arange(256).int())
launch.product_gelu(half(256, 768), half(8, 3072, 768), index(8), weights)
launch.product_slope(half(256, 768), half(8, 768, 3072), index(8), half(256, 3072), weights)
for kernel, tiling in zip(kernels[1::2], (launch.FORWARD, launch.BACKWARD), strict=True):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " STACK:0 " in usage, usage  # no spilled registers
    registers = int(re.search(r"REG:(\\d+)", usage)[1])
    assert tiling.programs * tiling.warps * 32 * registers <= 65536, usage
    assert tiling.programs * kernel.metadata.shared <= 227 * 1024, kernel.metadata
    assert "wgmma" in kernel.asm["ptx"]
    # A thread reads back what it has written itself: tile and part have one layout.
    wide = r"tt\\.(?:store|load) .*x256x!tt.ptr<bf16>, (#\\w+)>"
    assert len(set(re.findall(wide, kernel.asm["ttgir"]))) == 1
launch.find_blocks(index(255), 4096, 128)
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES) == "5 kernels"


GPU_CASE = Case(tokens=1000, width=640, inner=512, experts=8, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("offsets", GROUPS.values(), ids=GROUPS)
def test_gpu_products_equal_those_apart(offsets, weighted):
    check_products(41 * 100, 640, 512, [100 * end for end in offsets], weighted, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_experts_are_as_exact_as_the_loop(routing):
    case = replace(GPU_CASE, routing=routing)
    inputs, experts_TK, d_out = make(case, "cuda")
    peer = results("loop", case, inputs, experts_TK, d_out)
    exact, exact_d_out = double(inputs, d_out)
    truth = results("loop", case, exact, experts_TK, exact_d_out)
    actual = results("epilogue", case, inputs, experts_TK, d_out)
    assert_results(actual, peer, truth, str(case))
    for a, b in zip(actual, results("epilogue", case, inputs, experts_TK, d_out), strict=True):
        assert torch.equal(a, b), "the same inputs gave other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_gpu_network_is_as_exact_as_the_definition(weighted):
    inputs, _, d_out = make(GPU_CASE, "cuda")
    peer = one_expert("reference", GPU_CASE, inputs, d_out, weighted)
    exact, exact_d_out = double(inputs, d_out)
    truth = one_expert("reference", GPU_CASE, exact, exact_d_out, weighted)
    actual = one_expert("epilogue", GPU_CASE, inputs, d_out, weighted)
    assert_results(actual, peer, truth, str(GPU_CASE), FEED_FORWARD[: 5 if weighted else 4])
