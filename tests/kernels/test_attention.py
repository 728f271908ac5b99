"""Every implementation against the definition in fp64, forward and gradients."""

import pytest
import torch

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import attention as op
from steplab.kernels.dispatch import impls, load, ops
from steplab.testing.tolerance import assert_as_good_as

CPU_IMPLS = ["math", "flash"]
GPU_IMPLS = ["math", "flash", "efficient", "cudnn"]


def make_inputs(dtype, device, shape=(2, 3, 37, 16), keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    B, H, T, D = shape
    lengths = (T, keys or T, keys or T)
    tensors = [torch.randn(B, H, n, D, generator=generator, dtype=torch.float64) for n in lengths]
    return [t.to(device, dtype).requires_grad_() for t in tensors]


def outputs_and_gradients(impl, inputs, causal):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = op.attention(impl, *inputs, causal)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    gradients = torch.autograd.grad((out * weights.view_as(out)).sum(), inputs)
    return [out.detach(), *gradients]


def check_against_definition(impl, dtype, device, causal, shape):
    inputs = make_inputs(dtype, device, shape)
    truth = outputs_and_gradients("reference", [t.double() for t in inputs], causal)
    peer = outputs_and_gradients("reference", inputs, causal)
    actual = outputs_and_gradients(impl, inputs, causal)
    for name, *triple in zip(("out", "dq", "dk", "dv"), actual, peer, truth, strict=True):
        assert_as_good_as(*triple, name=f"{impl} {name}")


def test_a_dense_mask_equals_the_definition_and_is_causal_only():
    inputs = [torch.randn(2, 3, 17, 8) for _ in range(3)]
    truth = outputs_and_gradients("reference", [t.double() for t in inputs], True)
    for mine, exact in zip(outputs_and_gradients("dense_mask", inputs, True), truth, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-5)
    with pytest.raises(Unsupported, match="is causal"):
        op.choose("dense_mask", *inputs, False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_cpu_equals_the_definition(impl, dtype, causal):
    check_against_definition(impl, dtype, "cpu", causal, (2, 3, 37, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", GPU_IMPLS)
@pytest.mark.parametrize("shape", [(2, 3, 64, 64), (1, 2, 200, 80)])
def test_gpu_equals_the_definition(impl, causal, shape):
    check_against_definition(impl, torch.bfloat16, "cuda", causal, shape)


@pytest.mark.gpu
def test_gpu_fp32_takes_the_efficient_kernel():
    inputs = make_inputs(torch.float32, "cuda", (2, 3, 64, 64))
    assert op.choose("auto", *inputs, True) == "efficient"
    with pytest.raises(Unsupported, match="fp16 or bf16"):
        op.choose("flash", *inputs, True)


@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (1, 6)])
def test_the_definition_is_causal_from_the_last_key(T, S):
    """Query i sees keys up to i + S - T: computed here one query at a time."""
    q, k, v = make_inputs(torch.float64, "cpu", (1, 1, T, 4), keys=S)
    out = op.attention("reference", q, k, v, True)
    for i in range(T):
        last = i + S - T + 1
        weights = torch.softmax(q[0, 0, i] @ k[0, 0, :last].T / 2.0, -1)
        torch.testing.assert_close(out[0, 0, i], weights @ v[0, 0, :last])


def test_definition_passes_gradcheck():
    inputs = make_inputs(torch.float64, "cpu", (1, 2, 5, 4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: op.attention("reference", q, k, v, True), inputs
    )


def test_a_row_does_not_depend_on_its_neighbors_in_the_batch():
    q, k, v = make_inputs(torch.float32, "cpu", (4, 2, 16, 8))
    whole = op.attention("flash", q, k, v, True)
    alone = op.attention("flash", q[2:3], k[2:3], v[2:3], True)
    assert torch.equal(whole[2:3], alone)


def test_asked_for_and_impossible_is_refused_with_the_reason():
    inputs = make_inputs(torch.float32, "cpu")
    for impl in ("cudnn", "efficient"):
        with pytest.raises(Unsupported, match="needs"):
            op.choose(impl, *inputs, True)
    with pytest.raises(Unsupported, match="as many queries as keys"):
        op.choose("flash", *make_inputs(torch.float32, "cpu", (1, 1, 3, 8), keys=5), True)


def test_auto_chooses_what_accepts_the_inputs():
    assert op.choose("auto", *make_inputs(torch.float32, "cpu"), True) == "flash"
    uneven = make_inputs(torch.float32, "cpu", (1, 1, 3, 8), keys=5)
    assert op.choose("auto", *uneven, True) == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_for_a_gpu_can_be_traced(dtype, monkeypatch):
    """Fake CUDA tensors: whatever `auto` asks on a GPU must not break the graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from steplab.modules.attention import Attention

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(op.IMPLS["cudnn"], "HAS_CUDNN", True)
    module = Attention()
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 8, 64, device="cuda", dtype=dtype)
        torch.compile(module, backend="eager", fullgraph=True)(q, q, q)
    assert module.ran == ("cudnn" if dtype == torch.bfloat16 else "efficient")


def test_narrow_heads_go_to_triton_where_there_is_much_to_do(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def first(device, *shape):
        with FakeTensorMode():
            q = torch.empty(shape, device=device, dtype=torch.bfloat16)
            return op._preference(op.AttentionInputs(q, q, q, True))[0]

    assert first("cuda", 4, 12, 4096, 32) == first("cuda", 16, 12, 4096, 16) == "triton_flash"
    assert first("cuda", 4, 12, 4096, 64) == first("cuda", 1, 12, 4096, 32) == "cudnn"
    assert first("cpu", 4, 12, 4096, 32) == "cudnn"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert first("cuda", 4, 12, 4096, 32) == "cudnn"  # not measured there


def test_every_file_is_an_implementation():
    assert "attention" in ops()
    for name in impls("attention"):
        module = load("attention", name)
        assert callable(module.attention)
        # Only the definition takes everything.
        assert hasattr(module, "refuse") is (name != "reference")
    with pytest.raises(UserError, match="Did you mean 'flash'"):
        load("attention", "falsh")
    with pytest.raises(UserError, match="no op"):
        impls("atention")
