"""The optimizer against torch's AdamW, and 16-bit weights against fp32 ones."""

import copy
import io

import pytest
import torch
from torch import nn

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import adamw as op
from steplab.modules.optimizer import (
    MASTER,
    ExtendedOptimizer,
    OnePassAdamW,
    clear_moments,
    clip_gradients,
    full_weights,
    master_weight,
    moments,
    optimizer_label,
    set_master_weights,
)
from tests.kernels.update_cases import check_changes_are_kept, check_update

BF16 = torch.bfloat16


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


def groups(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95)}]


def pair():
    """Two equal models, one with torch's optimizer and one with ours."""
    models = net(), net()
    theirs, replaced = (torch.optim.AdamW(groups(m), lr=1e-2, foreach=False) for m in models)
    return (models[0], theirs), (models[1], OnePassAdamW.from_adamw(replaced))


def steps(model, optimizer, count, clip=None, first=0):
    """Train on a fixed stream of random data; `clip(optimizer, parameters)` comes before a step."""
    dtype = next(model.parameters()).dtype
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 12, generator=generator).to(dtype)
        y = torch.randn(8, 3, generator=generator)
        ((model(x).float() - y) ** 2).mean().backward()
        if clip is not None:
            clip(optimizer, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("param", [torch.float32, BF16])
@pytest.mark.parametrize("clipped", [False, True])
def test_the_definition_against_fp64(param, clipped):
    check_update("reference", param, param, 40, clipped)


def test_what_was_written_into_a_rounded_parameter_is_trained_on():
    check_changes_are_kept("reference", 40)


def test_the_update_is_torchs():
    (theirs, adamw), (ours, own) = pair()
    torch.testing.assert_close(steps(ours, own, 20), steps(theirs, adamw, 20), rtol=1e-6, atol=1e-8)
    if not torch.cuda.is_available():
        assert own.ran == "reference"
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(own.state[q][key], adamw.state[p][key], rtol=1e-5, atol=0)


def test_both_parts_of_complex_parameters_are_updated_as_torch_does():
    """The imaginary parts were updated by the squares of complex gradients, without a word."""
    torch.manual_seed(1)
    start, grads = torch.randn(2, 6, dtype=torch.cfloat), torch.randn(3, 2, 6, dtype=torch.cfloat)
    real = torch.randn(5)
    made = []
    for kind in (
        torch.optim.AdamW,
        lambda p, lr: OnePassAdamW.from_adamw(torch.optim.AdamW(p, lr)),
    ):
        params = [nn.Parameter(start.clone()), nn.Parameter(real.clone())]
        optimizer = kind(params, 0.1)
        for grad in grads:
            params[0].grad, params[1].grad = grad.clone(), grad.real[0, :5].clone()
            clip_gradients(optimizer, params, 0.5)
            optimizer.step()
        made.append([*params, optimizer.state[params[0]]["exp_avg_sq"]])
    torch.testing.assert_close(made[1], made[0], rtol=1e-6, atol=1e-7)


def test_the_first_bias_corrections_are_exact():
    """With beta2 0.999 in fp32, 1 - beta2 would be off by 6e-5."""
    p = nn.Parameter(torch.tensor([0.0]))
    optimizer = OnePassAdamW([p], lr=1e-3, weight_decay=0.0)
    p.grad = torch.tensor([0.5])
    optimizer.step()
    assert p.item() == pytest.approx(-1e-3, rel=1e-6)


def test_a_rate_that_is_set_to_a_number_is_taken():
    p = nn.Parameter(torch.tensor([0.0]))
    optimizer = OnePassAdamW([p], lr=1.0, weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 1e-3
    p.grad = torch.tensor([0.5])
    optimizer.step()
    assert p.item() == pytest.approx(-1e-3, rel=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("kind", ["lambda", "cosine", "by hand"])
def test_schedules_work_as_with_torch(kind):
    found = []
    for model, optimizer in pair():
        scheduler = {
            "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
            "by hand": lambda o: None,
        }[kind](optimizer)
        rates = []
        for number in range(5):
            if scheduler is None:
                from steplab.train.loop import set_learning_rate

                set_learning_rate(optimizer, 1e-2 / (number + 1))
            weights = steps(model, optimizer, 1, first=number)
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            if scheduler is not None:
                scheduler.step()
        found.append((weights, torch.tensor(rates, dtype=torch.float64)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("most", [1e-2, 1e3])
def test_clipping_is_torchs_without_a_pass_of_its_own(most):
    (theirs, adamw), (ours, own) = pair()
    norms = []

    def torchs(optimizer, parameters):
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, most))

    def in_the_update(optimizer, parameters):
        before = [p.grad.clone() for p in parameters]
        assert torch.equal(optimizer.clip(parameters, most), norms.pop(0))
        assert all(torch.equal(p.grad, g) for p, g in zip(parameters, before, strict=True))

    expected = steps(theirs, adamw, 6, torchs)
    torch.testing.assert_close(steps(ours, own, 6, in_the_update), expected, rtol=1e-6, atol=1e-8)


def test_a_coefficient_counts_for_one_step():
    model = net()
    optimizer = OnePassAdamW(model.parameters())
    steps(model, optimizer, 1, lambda o, parameters: o.clip(parameters, 1e-6))
    assert optimizer.coefficient is None


def test_norms_of_16_bit_gradients_are_summed_in_fp32():
    p = nn.Parameter(torch.zeros(1000, dtype=BF16))
    p.grad = torch.full((1000,), 0.1, dtype=BF16)
    norm = OnePassAdamW([p]).clip([p], 1.0)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(p.grad.double().norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_state_dicts_come_back_bit_for_bit(dtype, through_a_file):
    model = net(dtype)
    optimizer = OnePassAdamW(groups(model), lr=1e-2)
    steps(model, optimizer, 3)
    twin = copy.deepcopy(model)
    other = OnePassAdamW(groups(twin), lr=1.0)
    saved = optimizer.state_dict()
    if through_a_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (MASTER in other.state[q]) == (dtype == BF16)
        for key, value in optimizer.state[p].items():
            restored = other.state[q][key]
            assert torch.equal(value, restored) and value.dtype == restored.dtype
            assert value.data_ptr() != restored.data_ptr()
    after = [steps(*one, 3, first=3) for one in ((model, optimizer), (twin, other))]
    assert torch.equal(*after)


def test_copies_of_the_optimizer_work():
    model = net()
    optimizer = OnePassAdamW(model.parameters())
    steps(model, optimizer, 1)
    assert copy.deepcopy(optimizer).impl == "auto"


def test_a_16_bit_parameter_is_the_rounded_copy_of_its_weights():
    model = net(BF16)
    start = [p.detach().float() for p in model.parameters()]
    optimizer = OnePassAdamW(model.parameters(), lr=1e-4)
    steps(model, optimizer, 4)
    for p, before in zip(model.parameters(), start, strict=True):
        master = optimizer.state[p][MASTER]
        assert master.dtype == torch.float32 and torch.equal(p, master.to(BF16))
        assert not torch.equal(master, before)


def test_full_weights_are_the_parameters_for_a_while():
    model = net(BF16)
    optimizer = OnePassAdamW(model.parameters())
    steps(model, optimizer, 2)
    places = [p.data_ptr() for p in model.parameters()]
    with full_weights(optimizer):
        assert all(p.dtype == torch.float32 for p in model.parameters())
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    for p, place in zip(model.parameters(), places, strict=True):
        assert p.dtype == BF16 and p.data_ptr() == place, "a captured graph reads the same memory"
        assert torch.equal(p, optimizer.state[p][MASTER].to(BF16))
    with pytest.raises(KeyError), full_weights(optimizer):
        raise KeyError
    assert all(p.dtype == BF16 for p in model.parameters())
    steps(model, optimizer, 1)


def test_torchs_optimizers_offer_nothing_and_are_served_as_torch_does():
    (theirs, adamw), (_, own) = pair()
    assert isinstance(own, ExtendedOptimizer) and not isinstance(adamw, ExtendedOptimizer)
    assert optimizer_label(adamw) == "" and optimizer_label(own) == "one-pass"
    weights = list(theirs.parameters())
    for p in weights:
        p.grad = torch.ones_like(p)
    norm = clip_gradients(adamw, weights, 1e-2)
    assert norm > 1
    assert float(torch.nn.utils.get_total_norm([p.grad for p in weights])) == pytest.approx(1e-2)
    with full_weights(adamw), full_weights(None):
        assert [p.data_ptr() for p in theirs.parameters()] == [p.data_ptr() for p in weights]
    assert master_weight(adamw, weights[0]) is None and master_weight(None, weights[0]) is None
    with pytest.raises(UserError, match="keeps them in fp32"):
        set_master_weights(adamw, {weights[0]: weights[0].data})


def test_sparse_gradients_are_clipped_by_the_norm_of_dense_ones():
    ids = torch.tensor([[1, 1, 2], [3, 4, 1]])  # row 1 thrice: three entries that add up
    norms, clipped = [], []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(10, 3, mode="sum", sparse=is_sparse), nn.Linear(3, 1))
        net(ids).square().sum().backward()
        optimizer = torch.optim.SGD(net.parameters())
        norms.append(clip_gradients(optimizer, net.parameters(), 0.01))
        clipped.append([p.grad.to_dense() for p in net.parameters()])
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*clipped)
    assert float(norms[0]) > 0.01


def test_moments_are_the_state_without_the_fp32_weights():
    model = net(BF16)
    optimizer = OnePassAdamW(model.parameters())
    originals = {p: p.detach().float() for p in model.parameters()}
    set_master_weights(optimizer, originals)
    steps(model, optimizer, 1, lambda o, parameters: clip_gradients(o, parameters, 1.0))
    assert optimizer_label(optimizer).startswith("one-pass ")
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for _, state in moments(optimizer))
    clear_moments(optimizer)
    for p, original in originals.items():
        assert set(optimizer.state[p]) == {MASTER} and master_weight(optimizer, p) is original


def test_parameters_without_a_gradient_are_left_alone():
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OnePassAdamW([used, unused])
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3)) and not optimizer.state[unused]
    assert float(optimizer.state[used]["step"]) == 1
    optimizer.zero_grad()
    optimizer.step()
    assert float(optimizer.state[used]["step"]) == 1


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_it_cannot_do_is_told():
    model = net()
    with pytest.raises(Unsupported, match="trained by SGD"):
        OnePassAdamW.from_adamw(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(Unsupported, match="without amsgrad"):
        OnePassAdamW.from_adamw(torch.optim.AdamW(model.parameters(), amsgrad=True))
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = OnePassAdamW([p])
    p.grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (4, 2))
    with pytest.raises(Unsupported, match="sparse"):
        optimizer.step()
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
            op.choose("triton_update", [p])


def test_small_updates_add_up_in_fp32_and_are_lost_in_16_bits():
    """Weights near 1 in bf16 are 2^-7 apart, and a step of AdamW moves them by about 1e-4."""

    def train(dtype, make):
        torch.manual_seed(0)
        start = (1 + 0.2 * torch.rand(64)).to(BF16).float()
        weight = nn.Parameter(start.to(dtype, copy=True))
        target = start + 0.01
        optimizer = make([weight], lr=1e-4, weight_decay=0.0)
        for number in range(50):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(number))
            # The product in fp32, so that the weights' dtype alone makes a difference.
            ((x @ (weight.float() - target)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        exact = optimizer.state[weight].get(MASTER, weight)
        return exact.detach().float() - start

    full = train(torch.float32, torch.optim.AdamW)
    kept, naive = train(BF16, OnePassAdamW), train(BF16, torch.optim.AdamW)
    assert float(naive.abs().max()) == 0, "every update was rounded away"
    assert full.abs().mean() > 3e-3
    assert (kept - full).norm() < 0.05 * full.norm()


@pytest.mark.gpu
def test_gpu_steps_read_nothing_on_the_host():
    model = net(BF16).cuda()
    optimizer = OnePassAdamW(groups(model), lr=1e-2)
    x = torch.randn(8, 12, device="cuda", dtype=BF16)
    for number in range(3):
        model(x).float().square().mean().backward()
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            optimizer.clip(list(model.parameters()), 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert optimizer.ran == "triton_update"


@pytest.mark.gpu
def test_gpu_steps_can_be_captured_and_follow_the_rate():
    torch.manual_seed(0)
    start, grad = torch.randn(5000, device="cuda"), torch.randn(5000, device="cuda")
    found = []
    for captured in (False, True):
        p = nn.Parameter(start.to(BF16))
        optimizer = OnePassAdamW([p], lr=1e-2)
        p.grad = grad.to(BF16)

        def step(p=p, optimizer=optimizer):
            optimizer.clip([p], 1.0)
            optimizer.step()

        step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for rate in (1e-2, 3e-3, 1e-3):
            optimizer.param_groups[0]["lr"].fill_(rate)
            graph.replay() if captured else step()
        found.append((p.detach(), optimizer.state[p][MASTER], optimizer.state[p]["step"]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
