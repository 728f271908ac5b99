"""Small parameters that are updated together: the bits of one launch for each, in few launches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steplab.kernels import adamw as op
from steplab.kernels.adamw import Hyperparameters, ParameterState
from steplab.modules.optimizer import OnePassAdamW
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu
from tests.kernels.update_cases import (
    RULE,
    check_changes_are_kept,
    check_update,
    update_among_others,
)

pytest.importorskip("triton")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Size, dtypes of parameter and gradient, and whether the parameter lies at an odd address and the
# gradient has strides. In the interpreter up to 200 elements are small, and 4 make a batch.
WEIGHTS = st.tuples(
    st.integers(0, 260),
    st.sampled_from([(FP32, FP32), (FP32, BF16), (BF16, BF16), (FP16, FP32)]),
    st.booleans(),
    st.booleans(),
)


def state(size, dtypes, odd=False, strided=False, seed=0, device="cpu"):
    """Return a parameter of this size in the middle of its training."""
    generator = torch.Generator().manual_seed(seed)
    exact, grad, avg, sq = (torch.randn(size, generator=generator).to(device) for _ in range(4))
    narrow, grad = exact.to(dtypes[0]), (1e-2 * grad).to(dtypes[1])
    if odd:
        narrow = torch.cat([narrow[:0].new_zeros(1), narrow])[1:]
    if strided:
        grad = torch.stack([grad, -grad], 1)[:, 0]
    step = torch.tensor(1.0 + seed % 5, device=device)
    master = exact if narrow.dtype != FP32 else None
    return ParameterState(narrow, master, grad, avg, 1e-4 * sq**2, step)


def assert_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name, a, b in zip(one._fields, one, other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), f"{name} of {one.param.shape}"


def check_same_bits(specs, clipped, rule=RULE, device="cpu"):
    """Compare the update of all with an update for each."""
    together, apart = (
        [state(*spec, seed=i, device=device) for i, spec in enumerate(specs)] for _ in range(2)
    )
    before = [weight.exp_avg.clone() for weight in together]
    lr = torch.tensor(1e-2, dtype=torch.float64, device=device)
    coefficient = torch.tensor(0.37, device=device) if clipped else None
    op.update_all("triton_update", together, rule, lr, coefficient)
    for weight in apart:
        op.update("triton_update", weight, rule, lr, coefficient)
    assert_same_bits(together, apart)
    for weight, start in zip(together, before, strict=True):
        assert (weight.exp_avg != start).all()


def groups_of(params):
    """Return three groups with different rules, each with parameters of all kinds."""
    return [
        {"params": params[0::3], "lr": 1e-2},
        {"params": params[1::3], "weight_decay": 0.0, "betas": (0.8, 0.95)},
        {"params": params[2::3], "eps": 1e-6, "lr": 3e-3},
    ]


def trained(specs, one_by_one, device="cpu"):
    """Return all tensors of an optimizer after steps in which some gradients are missing."""
    starts = [state(*spec, seed=i, device=device).param for i, spec in enumerate(specs)]
    params = [nn.Parameter(start) for start in starts]
    optimizer = OnePassAdamW(groups_of(params))
    optimizer.impl = "triton_update"
    with pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr(op, "update_all", lambda impl, weights, *rule: [
                op.update(impl, weight, *rule) for weight in weights
            ])  # fmt: skip
        for number in range(3):
            for i, (p, spec) in enumerate(zip(params, specs, strict=True)):
                if (i + number) % 4:
                    p.grad = state(*spec, seed=10 * i + number, device=device).grad.to(p.dtype)
            if number:
                optimizer.clip(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.ran == "triton_update"
    return [[p.detach(), *optimizer.state[p].values()] for p in params]


def check_groups(specs, device="cpu"):
    found, expected = (trained(specs, one_by_one, device) for one_by_one in (False, True))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Interpreted:
    """Up to 200 elements are small; 4 of them are a batch, and 64 elements a block."""

    @settings(max_examples=15)
    @given(st.lists(WEIGHTS, max_size=12), st.booleans())
    def test_any_parameters_get_the_bits_of_a_launch_for_each(self, specs, clipped):
        check_same_bits(specs, clipped)

    @pytest.mark.parametrize("rule", [Hyperparameters(0.0, 0.5, 1e-3, 0.0), (0, 0.99, 1, 0)])
    def test_rules_at_the_border(self, rule):
        check_same_bits([(n, (BF16, BF16)) for n in (1, 64, 65)], False, Hyperparameters(*rule))

    def test_every_parameter_has_its_own_group_step_and_gradient(self):
        dtypes = [(FP32, FP32), (BF16, BF16)]
        check_groups([(size, dtypes[size % 2]) for size in (1, 2, 3, 64, 65, 128, 150, 199, 250)])

    @pytest.mark.parametrize("clipped", [False, True])
    @pytest.mark.parametrize(("param", "grad"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
    @pytest.mark.parametrize("size", [1, 150])
    def test_the_update_equals_its_definition(self, param, grad, size, clipped):
        check_update("triton_update", param, grad, size, clipped, update=update_among_others)

    @pytest.mark.parametrize("size", [1, 150, 260])
    def test_what_was_written_into_a_rounded_parameter_is_trained_on(self, size):
        check_changes_are_kept("triton_update", size)

    def test_how_many_launches_it_takes(self, monkeypatch):
        from steplab.kernels.adamw import triton_update

        alone, together = [], []
        monkeypatch.setattr(triton_update, "update", lambda w, *rule: alone.append(w))
        monkeypatch.setattr(triton_update, "update_together", lambda w, *rule: together.append(w))
        kinds = [(FP32, FP32), (BF16, BF16), (BF16, FP32)]
        weights = [state(size, kind) for kind in kinds for size in (0, 1, 2, 3, 64, 200, 201)]
        weights += [state(7, (FP32, FP32), odd=True)]
        triton_update.update_all(weights, RULE, torch.tensor(1e-2), None)
        assert [len(batch) for batch in together] == [4, 1] * 3
        assert [w.param.numel() for w in alone] == [0, 201] * 3 + [7]
        for batch in together:
            assert len({(w.param.dtype, w.grad.dtype, w.master is None) for w in batch}) == 1


LAUNCHES = """
from steplab.kernels.adamw import Hyperparameters, ParameterState, triton_update

def state(size, dtype):
    master, *moments = (torch.empty(size) for _ in range(3))
    param, grad = (torch.empty(size, dtype=dtype) for _ in range(2))
    return ParameterState(param, None if dtype == master.dtype else master, grad, *moments,
                          torch.zeros(()))

rate, clip = torch.zeros((), dtype=torch.float64), torch.ones(())
for dtype in (torch.float32, torch.bfloat16):
    for sizes in ([768] * 70, [1, 16, 3] * 22 + [65536] * 4):
        weights = [state(size, dtype) for size in sizes]
        triton_update.update_all(weights, Hyperparameters(0.9, 0.95, 1e-8, 0.1), rate, clip)
for kernel in kernels:
    assert kernel.metadata.name == "small_adamw_kernel"
    assert ".local" not in kernel.asm["ptx"] and kernel.metadata.shared == 0
print(len(kernels), "launches of", len(set(kernels)), "kernels")
"""


@needs_no_gpu
def test_few_kernels_compile_for_hopper_whatever_the_sizes():
    """70 are 64 and 6, with a master and without."""
    assert compile_for_hopper(LAUNCHES) == "8 launches of 4 kernels"


GPU_SPECS = [
    (size, kind)
    for kind in [(FP32, FP32), (FP32, BF16), (BF16, BF16)]
    for size in [1, 2, 3, 511, 512, 513, 768, 3072, 65_536, 65_537] * 7
]


@pytest.mark.gpu
@pytest.mark.parametrize("clipped", [False, True])
def test_gpu_small_parameters_get_the_bits_of_a_launch_for_each(clipped):
    check_same_bits(GPU_SPECS, clipped, device="cuda")
    check_same_bits(
        [(77, (BF16, BF16), i % 2, i % 3 == 0) for i in range(9)], clipped, device="cuda"
    )


@pytest.mark.gpu
def test_gpu_every_parameter_has_its_own_group_step_and_gradient():
    check_groups(GPU_SPECS[::3], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("param", "grad"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize("size", [1, 768, 50_001])
def test_gpu_update_equals_its_definition(param, grad, size):
    check_update("triton_update", param, grad, size, True, "cuda", update_among_others)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 768, 70_001])
def test_gpu_what_was_written_into_a_rounded_parameter_is_trained_on(size):
    check_changes_are_kept("triton_update", size, "cuda")


@pytest.mark.gpu
def test_gpu_a_captured_update_of_150_parameters_is_three_launches():
    found = []
    for captured in (False, True):
        params = [
            nn.Parameter(state(768, (BF16, BF16), seed=i, device="cuda").param) for i in range(150)
        ]
        optimizer = OnePassAdamW(params, lr=1e-2)
        static = torch.randn(
            150, 768, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
        )

        def step(params=params, optimizer=optimizer, static=static):
            for p, row in zip(params, static, strict=True):
                p.grad = row.to(BF16)  # in the graph's memory
            optimizer.step()

        step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        with torch.profiler.profile() as seen:
            for rate in (1e-2, 3e-3):
                optimizer.param_groups[0]["lr"].fill_(rate)
                static.neg_()
                graph.replay() if captured else step()
            torch.cuda.synchronize()
        launches = [e for e in seen.events() if e.name == "small_adamw_kernel"]
        assert len(launches) == 2 * 3
        found.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
