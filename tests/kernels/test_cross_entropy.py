"""The loss without whole logits in plain torch, and the choice among implementations."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import cross_entropy as op
from steplab.kernels.cross_entropy import _chunks
from steplab.kernels.cross_entropy._chunks import ChunkedHead, add_product, chunk_rows, chunk_words
from steplab.modules.loss import LinearCrossEntropy
from tests.kernels.cross_entropy_cases import Case, check, in_small_chunks, make, results

BF16 = torch.bfloat16
NAME = "chunked"


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    in_small_chunks(monkeypatch)


@pytest.mark.parametrize(("dtype", "fills"), [(BF16, 0), (torch.float16, 1)])
def test_only_fp16_has_a_factor_that_waits_for_the_loss_scale(dtype, fills):
    x, weight = (torch.randn(n, 8, dtype=dtype).requires_grad_() for n in (6, 5))
    with profile() as seen:
        op.cross_entropy(NAME, x, weight, torch.arange(6) % 5).backward()
    names = [event.name for event in seen.events()]
    # The gradient of the loss by itself is a 1, too.
    assert names.count("aten::ones_like") == 1 + fills
    scaled = [event for event in seen.events() if event.name == "aten::mul"]
    assert len(scaled) == 2 + fills  # both gradients, and the factor by the gradient of the loss


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(tokens=300, vocabulary=101, ignored=0.2),
        Case(tokens=1, vocabulary=5),
        Case(tokens=9, vocabulary=1),
        Case(tokens=8, vocabulary=3),
        Case(tokens=200, vocabulary=203, ignored=0.3, dtype=BF16),
        Case(tokens=200, vocabulary=203, dtype=BF16, weight_dtype=torch.float32),
        Case(tokens=200, vocabulary=66, dtype=torch.float16),
        Case(tokens=130, vocabulary=66, size=40.0),
    ],
    ids=str,
)
def test_chunks_equal_the_definition(case, reduction):
    check(NAME, Case(**{**case.__dict__, "reduction": reduction}))


@settings(max_examples=25)
@given(
    st.integers(1, 70),
    st.integers(1, 24),
    st.integers(2, 90),
    st.sampled_from(["mean", "none"]),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 99),
)
def test_any_shape_equals_the_definition(tokens, width, vocabulary, reduction, ignored, seed):
    case = Case(tokens, width, vocabulary, reduction, ignored, seed=seed)
    if case.ignored and not bool((make(case)[2] != op.IGNORE_INDEX).any()):
        return  # a mean of nothing, which has a test of its own
    check(NAME, case)


def test_the_reference_is_torchs_own_loss():
    x, weight, targets, _ = make(Case(ignored=0.3))
    logits = F.linear(x, weight)
    for reduction in ("mean", "none"):
        own = op.cross_entropy("reference", x, weight, targets, reduction)
        assert torch.equal(own, F.cross_entropy(logits, targets, reduction=reduction))


@pytest.mark.parametrize("impl", ["reference", NAME])
def test_where_all_is_ignored_the_mean_is_nan_and_the_gradients_are_zero(impl):
    x, weight, targets, _ = make(Case(ignored=1.1))
    mean, *gradients = results(impl, x, weight, targets, torch.tensor(1.0), "mean")
    assert math.isnan(mean) and not any(bool(g.any()) for g in gradients)
    losses, *gradients = results(impl, x, weight, targets, torch.ones(len(x)), "none")
    assert not losses.any() and not any(bool(g.any()) for g in gradients)


def test_another_index_may_be_the_ignored_one():
    x, weight, targets, _ = make(Case())
    ours, torchs = (
        op.cross_entropy(NAME, x, weight, targets, ignore=int(targets[3])),
        F.cross_entropy(x @ weight.T, targets, ignore_index=int(targets[3])),
    )
    torch.testing.assert_close(ours, torchs)


def test_in_fp64_they_are_equal_but_for_the_order_of_sums():
    for reduction in ("mean", "none"):
        case = Case(tokens=100, ignored=0.2, reduction=reduction, dtype=torch.float64)
        ours, truth = (results(impl, *make(case), reduction) for impl in (NAME, "reference"))
        for one, other in zip(ours, truth, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_logits_may_be_huge():
    """Logits of tens of thousands: the softmax is 0 and 1, and nothing overflows."""
    x, weight, targets, d_loss = make(Case(size=2e4))
    found = results(NAME, x, weight, targets, d_loss, "mean")
    exact = results("reference", x.double(), weight.double(), targets, d_loss.double(), "mean")
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-3, atol=1e-3)


def test_the_mean_of_losses_per_token_is_the_mean_loss():
    case = Case(tokens=200, ignored=0.2, dtype=torch.float64)
    x, weight, targets, _ = make(case)
    share = torch.full((200,), 1 / int((targets != op.IGNORE_INDEX).sum()), dtype=torch.float64)
    mean, *gradients = results(NAME, x, weight, targets, torch.ones((), dtype=x.dtype), "mean")
    losses, *others = results(NAME, x, weight, targets, share, "none")
    torch.testing.assert_close((losses * share).sum(), mean)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_that_are_needed_are_computed(reduction, monkeypatch):
    x, weight, targets, d_loss = make(Case(tokens=20, reduction=reduction))
    whole = results(NAME, x, weight, targets, d_loss, reduction)
    calls = []
    for module in (_chunks, _chunks):
        monkeypatch.setattr(module, "add_product", lambda *args: calls.append(add_product(*args)))
    op.cross_entropy(NAME, x, weight, targets, reduction)
    with torch.no_grad():
        op.cross_entropy(NAME, x.requires_grad_(), weight, targets, reduction)
    assert calls == []
    results(NAME, x, weight, targets, d_loss, reduction)
    for_both = len(calls)
    for index, leaf in enumerate((x, weight)):
        calls.clear()
        x.requires_grad_(leaf is x)
        weight.requires_grad_(leaf is weight)
        loss = op.cross_entropy(NAME, x, weight, targets, reduction)
        (found,) = torch.autograd.grad(loss, leaf, d_loss)
        assert torch.equal(found, whole[1 + index]) and 2 * len(calls) == for_both


def test_a_backward_can_be_repeated():
    x, weight, targets, d_loss = make(Case())
    x.requires_grad_()
    loss = op.cross_entropy(NAME, x, weight, targets)
    once, again = (torch.autograd.grad(loss, x, d_loss, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_the_factor_of_the_backward_is_not_rounded_to_16_bits():
    x, weight, targets, _ = make(Case(tokens=200, dtype=BF16))
    (one,), (third,) = (
        results(NAME, x, weight, targets, torch.tensor(factor), "mean")[1:2]
        for factor in (1.0, 1 / 3)
    )
    # Both are rounded once. A third in bf16 is off by 0.13 %, which would shift all values alike.
    assert float((third.double() / one.double()).mean()) == pytest.approx(1 / 3, rel=5e-4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["reference", NAME])
def test_compiled_it_is_one_graph_with_the_same_bits(impl, reduction):
    x, weight, targets, d_loss = make(Case(tokens=40, reduction=reduction))
    eager = results(impl, x, weight, targets, d_loss, reduction)
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    module = LinearCrossEntropy(reduction)
    module.impl = impl
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    loss = run(*leaves, targets)
    compiled = [loss.detach(), *torch.autograd.grad(loss, leaves, d_loss)]
    assert module.ran == impl
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_the_ops_are_registered_as_torch_wants_them():
    x, weight, targets, d_loss = make(Case(tokens=10, reduction="none"))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    ops = torch.ops.steplab
    torch.library.opcheck(ops.chunked_cross_entropy_mean, (*leaves, targets, -100, True, True))
    torch.library.opcheck(ops.chunked_cross_entropy_tokens, (*leaves, targets, -100))
    norms = torch.randn(2, 10)
    known = (d_loss, x.detach(), weight.detach(), targets, norms, -100, True, False)
    torch.library.opcheck(ops.chunked_cross_entropy_tokens_backward, known)
    torch.library.opcheck(ops.scaled, (x.detach(), torch.tensor(2.0)))


def test_chunks_of_fp32_sums_beat_the_reference_in_the_weights_gradient():
    """16-bit inputs beside an fp32 weight: the sum over tokens is never rounded to 16 bits."""
    *inputs, d_loss = make(Case(tokens=300, dtype=BF16, weight_dtype=torch.float32))
    truth = results(
        "reference", *(x.double() for x in inputs[:2]), inputs[2], d_loss.double(), "mean"
    )
    errors = [
        float((results(impl, *inputs, d_loss, "mean")[2] - truth[2]).norm())
        for impl in (NAME, "reference")
    ]
    assert errors[0] < errors[1]


def test_chunks_fill_the_gpu_within_bounds(monkeypatch):
    monkeypatch.undo()
    row = 2 * 50_304
    assert chunk_rows(4096, row, 768) == 2816  # 22 x 6 tiles of (tokens, width): 132
    assert chunk_rows(16_384, row, 768) == 4096  # nanoGPT's and HYDRA's: 4 chunks
    assert chunk_rows(65_536, row, 4096) == 10_624  # 1 GiB
    assert chunk_rows(16_384, row, 0) == 1408  # without gradients: 12 chunks
    assert chunk_rows(100, row, 768) == 100
    assert chunk_rows(2048, row, 4096) == 2048
    assert chunk_rows(16_384, 2 * 1000, 8192) == 16_384  # 64 MiB would be more than there is
    assert chunk_rows(1_000_000, row, 64) * row <= _chunks.MAX_TOKEN_BYTES
    assert chunk_rows(16_384, 2**30, 64) == 128
    assert chunk_rows(16_384, 2 * 128_256, 2048) == 4096  # a Llama's: 4 chunks
    assert chunk_words(50_257, 2 * 16_384) == 1280
    assert chunk_words(50_257, 2 * 1024) == 16_384  # 32 MiB
    assert chunk_words(50_257, 2**30) == 128
    assert chunk_words(100, 2 * 16_384) == 128


def test_no_buffer_is_larger_than_a_chunk(monkeypatch):
    in_small_chunks(monkeypatch, 128)
    x, weight, *_ = make(Case(tokens=9000, width=8, vocabulary=203, dtype=BF16))
    head = ChunkedHead(x, weight, need_dx=True, need_dw=True)
    assert head.buffer_CV.shape == (2304, 256) and len(list(head.chunks())) == 4
    assert head.dx_TD.dtype == BF16 and head.dw_ND.dtype == torch.float32
    assert head.weight_ND.shape == (256, 8) and not head.weight_ND[203:].any()
    assert ChunkedHead(x, weight[:200]).weight_ND.shape == (200, 8), "no copy where it is aligned"


def test_auto_takes_the_definition_on_a_cpu_and_for_small_logits():
    x, weight, targets, _ = make(Case())
    assert op.choose("auto", x, weight, targets) == "reference"
    many = torch.empty(70_000, 1)
    assert op.choose("auto", many, torch.empty(1000, 1), many[:, 0].long()) == "reference"


def test_shapes_that_do_not_fit_are_refused():
    x, weight, targets, _ = make(Case())
    for inputs in (
        (x[None], weight, targets),
        (x, weight[:, 1:], targets),
        (x, weight, targets[1:]),
    ):
        with pytest.raises(UserError, match="needs inputs"):
            op.choose(NAME, *inputs)
    with pytest.raises(UserError, match="at least one token"):
        op.choose(NAME, x[:0], weight, targets[:0])


def test_without_a_gpu_the_triton_one_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    x, weight, targets, _ = make(Case())
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        op.choose("triton_chunked", x, weight, targets)
