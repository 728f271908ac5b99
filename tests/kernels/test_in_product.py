"""Products with an activation inside: compiled for sm_90 ahead of time, and on a GPU against fp64.

Gluon has no interpreter, so what the kernels compute is only seen on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import activation as activation_op
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.activation import _in_product as in_product
from steplab.kernels.grouped_mm import product
from steplab.kernels.triton_runtime import HAS_GLUON, refuse_gluon
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

FEED_FORWARD = ("out", "dx", "dw_in", "dw_out", "dweights")
GPU_CASE = Case(tokens=1000, width=640, inner=512, experts=8, dtype=torch.bfloat16)
ROWS = 131_072
ACTIVATIONS = {"gelu": 1, "swiglu": 2}  # how many times the inner width z has
# Ends of groups: as a router fills them; empty ones, one row, one more and one less than a tile.
GROUPS = {
    "skewed": [37_449, 56_174, 74_898, 93_623, 112_347, 121_710, 126_391, ROWS],
    "awkward": [0, 1, 130, 257, 40_257, 40_257, 40_557, ROWS],
    "last only": [0] * 7 + [ROWS],
}

LAUNCHES = """
import re, subprocess, tempfile
from pathlib import Path
from triton import knobs
from steplab.kernels.activation import RowWeights
from steplab.kernels.activation import _in_product as launch

half, full, index = ((lambda *s, d=d: torch.empty(*s, dtype=d))
                     for d in (torch.bfloat16, torch.float32, torch.int32))
rows, groups = RowWeights(full(256), torch.arange(256).int()), index(8)
for name, wide in (("gelu", 3072), ("swiglu", 6144)):
    inside = launch.IN_PRODUCT[name]
    for weights, offsets in ((rows, groups), (None, groups), (RowWeights(full(256)), None)):
        E = 1 if offsets is None else 8
        x, w_in, w_out, z = half(256, 768), half(E, wide, 768), half(E, 768, 3072), half(256, wide)
        launch.forward_in_product(x, w_in, offsets, inside, weights)
        launch.backward_in_product(x, w_out, offsets, z, inside, weights)
    launch.backward_in_product(x, w_out, None, z, inside, None, half(256, 3072))  # h was kept
products = [kernel for kernel in kernels if kernel.metadata.name == "matmul_activation_kernel"]
for kernel in products:
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert "st.global.v4.b32" in ptx and "stmatrix" in ptx
    assert kernel.metadata.shared <= 227 * 1024, kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # No more than the few addresses that are needed once for each tile.
    assert int(re.search(r" STACK:(\\d+) ", usage)[1]) <= 64, usage
print(len(products), "of", len(kernels), "kernels")
"""


@needs_no_gpu
@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLUON, reason="needs a triton whose Gluon is known")
def test_the_kernels_compile_for_hopper():
    assert compile_for_hopper(LAUNCHES) == "14 of 18 kernels"


@needs_no_gpu
def test_what_it_cannot_take_is_refused_with_the_reason():
    x, w_in, w_out = (torch.empty(s).bfloat16() for s in ((4, 64), (2, 256, 64), (2, 64, 256)))
    bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
    with pytest.raises(Unsupported, match="experts 'in_product' needs an NVIDIA GPU"):
        experts_op.choose("in_product", x, bundle)
    with pytest.raises(Unsupported, match="feed_forward 'in_product' needs an NVIDIA GPU"):
        feed_forward_op.choose("in_product", x, w_in[0], w_out[0])
    assert in_product.refuse_layer(64, 192) == (
        "needs widths in multiples of 64 and inner ones of 256, not 64 and 192"
    )
    assert in_product.refuse_layer(64, 256) == ""


# ---- on a GPU ----------------------------------------------------------------------------------


def fits_here():
    """Skip where the kernels are not for this GPU."""
    reason = refuse_gluon(torch.empty(0, device="cuda"))
    if reason:
        pytest.skip(f"these kernels {'need' + reason.removeprefix('needs')}")


def draw(rows, width, inner, ends, device, activation="gelu"):
    """Return x, w_in, w_out, ends, z and the weights of rows that are in another order."""
    generator = torch.Generator(device).manual_seed(len(ends))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    source = torch.randperm(rows, generator=generator, device=device).int()
    weights = activation_op.RowWeights(torch.rand(rows, generator=generator, device=device), source)
    groups, wide = len(ends), ACTIVATIONS[activation] * inner
    w_in = (normal(groups, wide, width) * width**-0.5).bfloat16()
    w_out = (normal(groups, width, inner) * width**-0.5).bfloat16()
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    return normal(rows, width), w_in, w_out, offsets, normal(rows, wide), weights


def apart(activation, x, w_in, w_out, offsets, z, weights):
    """Return what both kernels compute, by products and passes of their own."""
    forward = product("loop", x, w_in.mT, offsets)
    h = activation_op.forward("reference", forward, activation, weights)
    dh = product("loop", x, w_out, offsets)
    return [forward, h, *activation_op.backward("reference", z, dh, activation, weights)]


def assert_equal_to_those_apart(activation, x, w_in, w_out, offsets, z, weights, one_group=False):
    inside, ends = in_product.IN_PRODUCT[activation], None if one_group else offsets

    def found():
        forward = in_product.forward_in_product(x, w_in, ends, inside, weights)
        return [*forward, *in_product.backward_in_product(x, w_out, ends, z, inside, weights)]

    actual = found()
    peer = apart(activation, x, w_in, w_out, offsets, z, weights)
    exact = weights and weights._replace(values_R=weights.values_R.double())
    doubles = (x.double(), w_in.double(), w_out.double(), offsets, z.double(), exact)
    truth = apart(activation, *doubles)
    names = ("z", "h", "dz", "h again", "dweights")
    for name, a, p, t in list(zip(names, actual, peer, truth, strict=True))[: 5 if weights else 4]:
        assert_as_good_as(a, p, t, f"{name} by {activation} of {offsets.tolist()}")
        # A few wrong numbers among 10^8 are seen by looking at each, not by a norm. Roundings are
        # 1 % of the largest number; a number of another row, as a race gave it, is off by most.
        assert (a - t).abs().max() < 0.1 * max(1.0, float(t.abs().max())), name
    kept = in_product.backward_in_product(x, w_out, ends, z, inside, weights, actual[3])
    assert all(a is b or torch.equal(a, b) for a, b in zip(kept, actual[2:], strict=True))
    for _ in range(3):
        for a, b in zip(actual, found(), strict=True):
            assert (a is None and b is None) or torch.equal(a, b), "the same inputs gave other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ends", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_products_of_the_flagship_equal_those_apart(activation, ends, weighted):
    fits_here()
    *inputs, weights = draw(ROWS, 768, 3072, ends, "cuda", activation)
    assert_equal_to_those_apart(activation, *inputs, weights if weighted else None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8192, 16_384, 1000, 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu_products_of_one_network_equal_those_apart(activation, rows, weighted):
    """Hydra's and nanoGPT's: one group, no offsets, weights in the order of the rows."""
    fits_here()
    *inputs, weights = draw(rows, 768, 2304, [rows], "cuda", activation)
    weights = weights._replace(source_R=None) if weighted else None
    assert_equal_to_those_apart(activation, *inputs, weights, one_group=True)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_experts_are_as_exact_as_the_loop(routing):
    fits_here()
    case = replace(GPU_CASE, routing=routing)
    inputs, experts_TK, d_out = make(case, "cuda")
    peer = results("loop", case, inputs, experts_TK, d_out)
    exact, exact_d_out = double(inputs, d_out)
    truth = results("loop", case, exact, experts_TK, exact_d_out)
    assert_results(results("in_product", case, inputs, experts_TK, d_out), peer, truth, str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["in_product", "in_product_kept"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gpu_network_is_as_exact_as_the_definition(weighted, impl):
    fits_here()
    inputs, _, d_out = make(GPU_CASE, "cuda")
    peer = one_expert("reference", GPU_CASE, inputs, d_out, weighted)
    exact, exact_d_out = double(inputs, d_out)
    truth = one_expert("reference", GPU_CASE, exact, exact_d_out, weighted)
    actual = one_expert(impl, GPU_CASE, inputs, d_out, weighted)
    assert_results(actual, peer, truth, str(GPU_CASE), FEED_FORWARD[: 5 if weighted else 4])


@pytest.mark.gpu
def test_gpu_no_rows_are_no_work():
    fits_here()
    x, w_in, w_out, offsets, z, weights = draw(0, 64, 256, [0, 0], "cuda")
    inside = in_product.IN_PRODUCT["gelu"]
    _, h = in_product.forward_in_product(x, w_in, offsets, inside, weights)
    assert h.shape == (0, 256)
    found = in_product.backward_in_product(x, w_out, offsets, z, inside, weights)
    assert found.dweights_R.shape == (0,)
