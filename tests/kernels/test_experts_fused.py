"""The fused layers' algebra on CPU, where torch stands in for the kernels; and all of it on a GPU.

The kernels themselves: test_expert_kernels.py.
"""

from dataclasses import replace

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.experts._rows import place_rows
from steplab.kernels.triton_runtime import refuse_gluon
from tests.kernels.expert_cases import (
    ROUTINGS,
    Case,
    Products,
    assert_results,
    double,
    make,
    one_expert,
    results,
)
from tests.kernels.triton_on_cpu import needs_no_gpu

FEED_FORWARD = ("out", "dx", "dw_in", "dw_out", "dweights")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_it_equals_the_loop_in_fp64(routing, activation):
    case = Case(routing, activation)
    arguments = make(case)
    expected = results("loop", case, *arguments)
    for a, b in zip(results("fused", case, *arguments), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("chosen", "experts"), [(1, 1), (1, 3), (3, 5)])
def test_any_number_of_experts_may_be_chosen(chosen, experts):
    case = Case(chosen=chosen, experts=experts, tokens=17)
    arguments = make(case)
    expected = results("loop", case, *arguments)
    for a, b in zip(results("fused", case, *arguments), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_in_bf16_it_is_as_exact_as_the_loop(routing):
    case = Case(routing, dtype=torch.bfloat16)
    inputs, experts_TK, d_out = make(case)
    peer = results("loop", case, inputs, experts_TK, d_out)
    exact, exact_d_out = double(inputs, d_out)
    truth = results("loop", case, exact, experts_TK, exact_d_out)
    assert_results(results("fused", case, inputs, experts_TK, d_out), peer, truth, str(case))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_fused_network_equals_the_definition_in_fp64(activation, weighted):
    case = Case(activation=activation)
    inputs, _, d_out = make(case)
    expected = one_expert("reference", case, inputs, d_out, weighted)
    actual = one_expert("fused", case, inputs, d_out, weighted)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def kept_shapes(function, *inputs):
    """Return the sorted shapes of all floating tensors that autograd keeps for the backward."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*leaves)
    assert out.requires_grad
    return sorted(tuple(t.shape) for t in kept.values() if t.is_floating_point())


def test_the_experts_keep_their_inputs_and_one_wide_tensor():
    case = Case()
    inputs, experts_TK, _ = make(case)

    def layer(x, weights, w_in, w_out):
        bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
        return experts_op.experts("fused", x, weights, experts_TK, bundle, Products())[0]

    z = (case.tokens * case.chosen, case.inner)
    assert kept_shapes(layer, *inputs) == sorted([z, *(tuple(t.shape) for t in inputs)])


def test_a_network_keeps_its_inputs_and_one_wide_tensor():
    x, _, w_in, w_out = make(Case())[0]
    inputs = [x, w_in[0], w_out[0]]
    network = feed_forward_op.IMPLS["fused"].feed_forward
    found = kept_shapes(lambda *leaves: network(*leaves, "gelu", None), *inputs)
    assert found == sorted([(40, 24), *(tuple(t.shape) for t in inputs)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_one_graph_with_the_same_bits(dtype):
    case = Case(dtype=dtype)
    inputs, experts_TK, d_out = make(case)

    def both(x, weights, w_in, w_out):
        bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
        out, _ = experts_op.experts("fused", x, weights, experts_TK, bundle, Products())
        shared = (w_in[0], w_out[0], "gelu", weights[:, :1])
        return out + feed_forward_op.feed_forward("fused", x, *shared)

    found = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, d_out)])
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().sum() > 0
        assert torch.equal(eager, compiled)


def test_the_ops_are_registered_as_torch_wants_them():
    (x, weights, w_in, w_out), experts_TK, _ = make(Case(tokens=6))
    leaves = [t.detach().requires_grad_() for t in (x, weights, w_in, w_out)]
    torch.library.opcheck(torch.ops.steplab.place_assignments, (experts_TK, 4))
    placed = place_rows(experts_TK, 4)
    torch.library.opcheck(torch.ops.steplab.fused_experts, (*leaves, *placed, "gelu", "loop"))
    one = [leaf[0].detach().requires_grad_() for leaf in leaves[2:]]
    gate = leaves[1][:, :1].detach().requires_grad_()
    torch.library.opcheck(torch.ops.steplab.fused_feed_forward, (leaves[0], *one, gate, "gelu"))
    torch.library.opcheck(torch.ops.steplab.fused_feed_forward, (leaves[0], *one, None, "gelu"))


@needs_no_gpu
def test_without_a_gpu_they_are_refused_and_auto_goes_on():
    (x, _, w_in, w_out), _, _ = make(Case(dtype=torch.bfloat16))
    bundle = experts_op.ExpertWeights(w_in, w_out, "gelu")
    assert experts_op.choose("auto", x, bundle) == "grouped"
    assert feed_forward_op.choose("auto", x, w_in[0], w_out[0]) == "reference"
    with pytest.raises(Unsupported, match="experts 'fused' needs an NVIDIA GPU"):
        experts_op.choose("fused", x, bundle)
    with pytest.raises(Unsupported, match="feed_forward 'fused' needs an NVIDIA GPU"):
        feed_forward_op.choose("fused", x, w_in[0], w_out[0])


# ---- on a GPU ----------------------------------------------------------------------------------

GPU_CASE = Case(tokens=1000, width=128, inner=192, experts=8, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_experts_are_as_exact_as_the_loop(routing, activation):
    case = replace(GPU_CASE, routing=routing, activation=activation)
    inputs, experts_TK, d_out = make(case, "cuda")
    peer = results("loop", case, inputs, experts_TK, d_out)
    exact, exact_d_out = double(inputs, d_out)
    truth = results("loop", case, exact, experts_TK, exact_d_out)
    actual = results("fused", case, inputs, experts_TK, d_out)
    assert_results(actual, peer, truth, str(case))
    for a, b in zip(actual, results("fused", case, inputs, experts_TK, d_out), strict=True):
        assert torch.equal(a, b), "the same inputs gave other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gpu_network_is_as_exact_as_the_definition(activation, weighted):
    case = replace(GPU_CASE, activation=activation)
    inputs, _, d_out = make(case, "cuda")
    peer = one_expert("reference", case, inputs, d_out, weighted)
    exact, exact_d_out = double(inputs, d_out)
    truth = one_expert("reference", case, exact, exact_d_out, weighted)
    names = FEED_FORWARD[: 5 if weighted else 4]
    actual = one_expert("fused", case, inputs, d_out, weighted)
    assert_results(actual, peer, truth, str(case), names)


def gpu_layer():
    """Return a mixture in bf16, its input and gradient, on a GPU."""
    from steplab.modules.experts import MixtureOfExperts

    torch.manual_seed(0)
    layer = MixtureOfExperts(128, 192, 256, 8, 2, "gelu").to("cuda", torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, d_out = torch.randn(2, 4, 500, 128, device="cuda", dtype=torch.bfloat16)
    return layer, x, d_out


def step(layer, x, d_out):
    """Return the output and the gradients of one forward and backward."""
    x = x.detach().requires_grad_()
    out, routing = layer(x)
    leaves = [x, *layer.parameters()]
    gradients = torch.autograd.grad((out, routing.importance_E[0]), leaves, (d_out, None))
    return [out.detach(), *gradients]  # a graph that is kept alive would keep its stream


@pytest.mark.gpu
def test_gpu_auto_takes_the_fused_kernels_and_waits_for_nobody():
    layer, x, d_out = gpu_layer()
    step(layer, x, d_out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ran = {module.op: module.ran for module in layer.modules() if hasattr(module, "op")}
    assert ran == {
        "router": "triton_router",
        "experts": "fused",  # its inner width has no whole tiles for the activation in the product
        "grouped_mm": "aten",
        "feed_forward": "fused" if refuse_gluon(x) else "in_product",
    }


@pytest.mark.gpu
def test_gpu_graph_replays_any_routing():
    """Captured once; replayed with other tokens, all to one expert too, it equals eager's bits."""
    layer, x, d_out = gpu_layer()
    static_x = x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer, static_x, d_out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, static_x, d_out)
    same = x[:1, :1].expand_as(x)  # one token everywhere: two experts get all rows
    for tokens in (x, x.flip(0, 1), -2 * x, same):
        static_x.copy_(tokens)
        graph.replay()
        found = [t.clone() for t in captured]
        expected = step(layer, static_x, d_out)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_gpu_compiles_to_one_graph():
    layer, x, d_out = gpu_layer()
    eager = step(layer, x, d_out)
    compiled = step(torch.compile(layer, fullgraph=True), x, d_out)
    for a, b in zip(eager, compiled, strict=True):
        # bf16 may round what Inductor fuses once less.
        error = (a - b).float().norm() / b.float().norm()
        assert error < 2e-2, float(error)
