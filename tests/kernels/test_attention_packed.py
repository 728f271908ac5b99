"""Attention of views of one tensor: one gradient, as exact as three, whatever the layout."""

# B batch, H heads, T tokens, D head width
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported
from steplab.kernels import attention as op
from steplab.kernels.attention._packed import cover_once, packed_attention, place_in
from tests.kernels.attention_cases import cancellation
from tests.kernels.mismatch import assert_results
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu

B, H, T, D = 2, 2, 37, 16

# By name: the shape of the tensor, and its views.
LAYOUTS = {
    "split": (
        (B, T, 3 * H * D),
        lambda x: [p.view(B, T, H, D).transpose(1, 2) for p in x.split(H * D, 2)],
    ),
    "unbind": ((B, T, 3, H, D), lambda x: x.transpose(1, 3).unbind(2)),
    "interleaved by head": ((B, T, H, 3, D), lambda x: x.transpose(1, 2).unbind(3)),
    "rows": (
        (B * T, 3 * H * D),
        lambda x: x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0),
    ),
    "grouped heads": (
        (B, T, (4 + 2 + 2) * D),
        lambda x: x.view(B, T, -1, D).transpose(1, 2).split([4, 2, 2], 1),
    ),
    "stacked": ((3, B, H, T, D), lambda x: x.unbind(0)),
}


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def compare(packed, views, causal, tiny=False):
    """Compare values and gradients with the definition in fp64, and bits with `triton_flash`."""
    q, k, v = views(packed)
    d_out = normal(*q.shape, seed=1).to(q)

    def results(attend, source):
        source = source.detach().requires_grad_()
        out = attend(source)
        (gradient,) = torch.autograd.grad(out, source, d_out.to(source))
        return [out.detach(), *views(gradient.contiguous())]

    def by(name):
        return lambda x: op.attention(name, *views(x), causal)

    ours = results(lambda x: packed_attention(x, *views(x), causal), packed)
    assert ours[0].transpose(1, 2).is_contiguous()
    three = results(by("triton_flash"), packed)
    assert all(torch.equal(a, b) for a, b in zip(ours, three, strict=True))
    peer, truth = results(by("reference"), packed), results(by("reference"), packed.double())
    floors = cancellation(q, k, v, d_out) if tiny else (0.0,) * 4
    assert_results(ours, peer, truth, f"packed, causal={causal}", floors)


@pytest.mark.slow
class Interpreted:
    @pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, True), (torch.bfloat16, False)])
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_it_equals_the_definition(self, name, dtype, causal):
        shape, views = LAYOUTS[name]
        compare(normal(*shape, dtype=dtype), views, causal)

    @settings(max_examples=5)
    @given(
        st.permutations(range(5)),
        st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 36), st.integers(1, 20)),
        st.booleans(),
    )
    def test_any_order_of_axes(self, order, sizes, causal):
        """Of 3, B, H, T and D in memory, so that not even rows are dense."""
        shape = (3, *sizes)
        back = [order.index(axis) for axis in range(5)]
        packed = normal(*(shape[axis] for axis in order))
        compare(packed, lambda x: x.permute(back).unbind(0), causal, tiny=True)

    def test_a_tensor_that_begins_inside_another(self):
        shape, views = LAYOUTS["split"]
        whole = normal(3, *shape)
        compare(whole[1], views, causal=True)

    def test_the_op_is_registered_as_torch_wants_it(self):
        shape, views = LAYOUTS["grouped heads"]
        x = normal(*shape).requires_grad_()
        places = [list(place_in(x, view)) for view in views(x)]
        torch.library.opcheck(torch.ops.steplab.packed_attention.default, (x, *places, True))

    def test_compiled_it_has_the_same_bits(self):
        shape, views = LAYOUTS["interleaved by head"]
        x = normal(*shape).requires_grad_()
        places = [list(place_in(x, view)) for view in views(x)]

        def attend(x):
            return torch.ops.steplab.packed_attention(x, *places, True)[0].square().sum()

        found = []
        for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            value = call(x)
            found.append([value, *torch.autograd.grad(value, x)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_a_second_derivative_is_an_error(self):
        shape, views = LAYOUTS["split"]
        x = normal(*shape).requires_grad_()
        value = packed_attention(x, *views(x), True).square().sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            slope.sum().backward()

    @pytest.mark.parametrize("autocast", [False, True])
    def test_a_language_model_is_replaced_by_the_kernels(self, autocast):
        from steplab.substitute.backend import SubstitutingBackend
        from tests.substitute.models import LanguageModel, language_batch, language_loss

        torch.manual_seed(0)
        model, batch, found = LanguageModel(), language_batch(), []
        backend = SubstitutingBackend(["packed_attention"]).before("aot_eager")
        compiled = torch.compile(language_loss, backend=backend, fullgraph=True)
        for call in (language_loss, compiled):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = call(model, batch)
            loss.backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        plain, ours = found
        assert (ours - plain).norm() < (1e-2 if autocast else 1e-6) * plain.norm()
        (one,) = backend.found
        assert one.what == "packed_attention triton_flash" and one.count == 2 and not one.reason


@settings(max_examples=60)
@given(st.data())
def test_covered_once_is_what_counting_says(data):
    """Slices of any start, step and length, of heads that may overlap."""
    sizes = [data.draw(st.integers(1, 3)) for _ in range(4)]
    elements = 3 * math.prod(sizes)
    places, count = [], torch.zeros(elements)
    for number in range(3):
        dense = (*sizes, *torch.empty(sizes).stride(), number * elements // 3)
        place = data.draw(
            st.sampled_from(
                [
                    dense,
                    (*dense[:8], data.draw(st.integers(0, elements))),
                    (*sizes, *(data.draw(st.integers(0, 9)) for _ in range(4)), dense[8]),
                    (*sizes, *(3 * step for step in dense[4:8]), number),
                ]
            )
        )
        places.append(place)
        last = place[8] + sum((n - 1) * s for n, s in zip(place[:4], place[4:8], strict=True))
        if last < elements:
            view = torch.arange(elements).as_strided(place[:4], place[4:8], place[8])
            count += torch.bincount(view.flatten(), minlength=elements)
        else:
            count += torch.nan
    assert cover_once(elements, tuple(places)) == bool((count == 1).all())


def test_what_is_not_covered_once_is_an_error():
    x = normal(B, T, 4, H, D)
    parts = [x[:, :, i].transpose(1, 2) for i in range(4)]
    for chosen in (parts[:3], [parts[0], parts[0], parts[1]]):
        with pytest.raises(Unsupported, match="exactly once"):
            packed_attention(x, *chosen, True)
    turned = x[:, :, :3].transpose(0, 1)
    with pytest.raises(Unsupported, match="exactly once"):
        packed_attention(turned, *(turned[:, :, i].permute(1, 2, 0, 3) for i in range(3)), True)


LAUNCHES = """
from steplab.kernels.attention import triton_flash as launch

def views(x):
    return tuple(x.permute(2, 0, 3, 1, 4).unbind(0))

packed = torch.empty(2, 256, 3, 12, 64, dtype=torch.bfloat16)
d_out = torch.empty(2, 256, 12, 64, dtype=torch.bfloat16).transpose(1, 2)
mask = (True, None, None)
out, lse = launch.launch_forward(*views(packed), *mask)
into = views(torch.empty_like(packed))
launch.launch_backward(d_out, *views(packed), out, lse, *mask, into=into)
for kernel in kernels:
    ptx = kernel.asm["ptx"]
    assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx, kernel.metadata.name
    assert "st.global.v4.b32" in ptx and ".local" not in ptx, kernel.metadata.name
print(len(kernels), "kernels")
"""


@needs_no_gpu
def test_gradients_are_written_sixteen_bytes_at_a_time():
    pytest.importorskip("triton")
    assert compile_for_hopper(LAUNCHES) == "3 kernels"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gpu_equals_the_definition(dtype, causal):
    """nanoGPT's layout and one of grouped heads, with a length that no tile divides."""
    for heads in ((12, 12, 12), (8, 2, 2)):
        packed = normal(2, 333, sum(heads) * 64, dtype=dtype, device="cuda")

        def views(x, heads=heads):
            parts = x.split([64 * n for n in heads], 2)
            pairs = zip(parts, heads, strict=True)
            return [p.view(2, 333, n, 64).transpose(1, 2) for p, n in pairs]

        compare(packed, views, causal)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="it is taken on Hopper only",
)
def test_gpu_a_compiled_projection_gets_one_gradient():
    """By Inductor, in bf16, and proved on the way."""
    from steplab.substitute.backend import SubstitutingBackend
    from tests.substitute.models import Attention

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Attention(256, 4).to("cuda", torch.bfloat16)
    x = normal(2, 300, 256, dtype=torch.bfloat16, device="cuda")
    backend = SubstitutingBackend(["packed_attention"])
    found = []
    for call in (model, torch.compile(model, backend=backend, fullgraph=True)):
        model.zero_grad()
        call(x).float().square().mean().backward()
        found.append(model.inner.weight.grad.float().clone())
    assert (found[1] - found[0]).norm() < 2e-2 * found[0].norm()
    (one,) = backend.found
    assert one.what == "packed_attention triton_flash", one.reason
