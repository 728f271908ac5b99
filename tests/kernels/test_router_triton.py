"""Router and gate of the shared expert in Triton: in its interpreter on CPU, and on a GPU."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from steplab.core.errors import Unsupported
from steplab.kernels import router as router_op
from tests.kernels.expert_checks import check_router, routed
from tests.kernels.triton_on_cpu import needs_no_gpu

pytest.importorskip("triton")


def router_leaves():
    """Return x, a weight of 4 experts and a gate, which want gradients."""
    drawn = torch.randn(5, 16).bfloat16(), torch.randn(4, 16), torch.randn(1, 16)
    return [tensor.requires_grad_() for tensor in drawn]


class Interpreted:
    """Small tiles here, so that short inputs have several."""

    @pytest.mark.parametrize(
        "shape", [(37, 8, 48, 2), (16, 3, 20, 1), (5, 20, 32, 4), (5, 16, 16, 2)]
    )
    def test_the_router_equals_the_definition(self, shape):
        check_router(*shape)

    @pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
    def test_weight_and_gate_may_be_in_bf16(self, dtypes):
        check_router(9, 4, 16, 2, dtypes=dtypes)

    def test_the_gate_is_no_expert(self):
        """However large its logit, the others' bits are as with a small one."""
        x, weight = torch.ones(3, 16).bfloat16(), torch.rand(6, 16)
        small, large = (
            router_op.router("triton_router", x, weight, torch.full((1, 16), value), 6)
            for value in (0.0, 50.0)
        )
        assert all(torch.equal(a, b) for a, b in zip(small[:3], large[:3], strict=True))
        assert (small[3] == 0.5).all() and (large[3] == 1).all()

    def test_of_equal_probabilities_the_first_is_chosen_first(self):
        x, weight, gate = torch.ones(3, 16).bfloat16(), torch.zeros(6, 16), torch.ones(1, 16)
        weight[4] = 1.0
        probabilities, weights, experts, _ = router_op.router("triton_router", x, weight, gate, 3)
        assert experts.tolist() == [[4, 0, 1]] * 3
        assert torch.equal(weights, probabilities.gather(1, experts))

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
    def test_a_token_of_nan_still_has_experts(self):
        x = torch.full((3, 16), torch.nan).bfloat16()
        ones = torch.ones(6, 16)
        experts = router_op.router("triton_router", x, ones, ones[:1], 2)[2]
        assert ((experts >= 0) & (experts < 6)).all()

    def test_compiled_or_checkpointed_the_router_gives_the_same_bits(self):
        leaves = torch.randn(20, 32).bfloat16(), torch.randn(6, 32), torch.randn(1, 32)
        slopes = torch.randn(20, 6), torch.randn(20, 2), torch.randn(20, 1)

        def run(x, weight, gate):
            return router_op.router(router_op.choose("auto", x, weight), x, weight, gate, 2)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        checkpointed = partial(checkpoint, run, use_reentrant=False)
        expected = routed(run, leaves, slopes)
        for form in (compiled, checkpointed):
            found = routed(form, leaves, slopes)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_the_routers_flops_are_counted(self):
        from steplab.probes.work import FlopCounter

        leaves = router_leaves()
        with FlopCounter(visible=True) as forward:
            weights = router_op.router("triton_router", *leaves, 2)[1]
        with FlopCounter(visible=True) as backward:
            weights.sum().backward()
        assert forward.matrix == 2 * 5 * 16 * (4 + 1) and backward.matrix == 2 * forward.matrix
        assert not forward.uncovered and not backward.uncovered

    def test_the_router_is_registered_as_torch_wants_it(self):
        torch.library.opcheck(torch.ops.steplab.router, (*router_leaves(), 2))


@needs_no_gpu
def test_without_a_gpu_the_router_is_refused():
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(3, 16)
    assert router_op.choose("auto", x, weight) == "reference"
    with pytest.raises(Unsupported, match="router 'triton_router' needs an NVIDIA GPU"):
        router_op.choose("triton_router", x, weight)


def test_the_routers_tile_has_255_experts_and_the_gate(monkeypatch):
    module = router_op.IMPLS["triton_router"]
    monkeypatch.setattr(module, "refuse_device", lambda x: "")
    x = torch.randn(4, 16).bfloat16()
    assert router_op.choose("auto", x, torch.randn(255, 16)) == "triton_router"
    with pytest.raises(Unsupported, match="needs at most 255 experts, not 256"):
        router_op.choose("triton_router", x, torch.randn(256, 16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1000, 8, 768, 2), (333, 64, 200, 4), (77, 255, 128, 8), (5, 3, 24, 1)]
)
def test_gpu_router_equals_the_definition(shape):
    check_router(*shape, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
def test_gpu_weight_and_gate_may_be_in_bf16(dtypes):
    check_router(1000, 8, 768, 2, "cuda", dtypes)


@pytest.mark.gpu
def test_gpu_a_token_of_nan_still_has_experts():
    x = torch.full((300, 64), torch.nan, device="cuda").bfloat16()
    weight = torch.ones(6, 64, device="cuda")
    experts = router_op.router("triton_router", x, weight, weight[:1], 2)[2]
    assert ((experts >= 0) & (experts < 6)).all()
