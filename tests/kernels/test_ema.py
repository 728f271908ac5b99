"""The ComplexEMA in plain torch: the definition, and the one by Fourier transforms."""

import math

import pytest
import torch

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import ema as op
from steplab.kernels.ema import EMAParameters, coefficients, fft
from tests.kernels.ema_cases import Case, check, make, results

# log2(n) butterflies of rounding each, three transforms: small beside the 1e-5 that is asked for.
FFT_SLACK = 1e-6


def single(alpha: float, delta: float, theta: float, gamma: complex, omega: float) -> EMAParameters:
    """One channel with one mode."""
    stored = [[alpha]], [[delta]], [theta], [[[gamma.real, gamma.imag]]], [omega]
    return EMAParameters(*(torch.tensor(x, dtype=torch.float64) for x in stored))


@pytest.mark.parametrize("impl", ["sequential", "fft", "fft_table"])
def test_an_impulse_decays(impl):
    """p = 0.5, rho = 0.75 and an angle of nearly 0: 0.5 * 0.75^t."""
    parameters = single(0.0, 0.0, -60.0, 1 + 0j, 0.0)
    x = torch.zeros(1, 12, 1, dtype=torch.float64)
    x[0, 0] = 1.0
    y, _ = op.ema(impl, x, parameters)
    expected = 0.5 * 0.75 ** torch.arange(12, dtype=torch.float64)
    torch.testing.assert_close(y[0, :, 0], expected, rtol=1e-12, atol=1e-12)


def test_the_angle_turns_the_state():
    """rho nearly 1 and a quarter turn per step: y repeats 1, 0, -1, 0."""
    quarter = math.log(0.25 / 0.75)
    parameters = single(-40.0, -40.0, quarter, complex(1 / 4.248354255291589e-18), 0.0)
    x = torch.zeros(1, 8, 1, dtype=torch.float64)
    x[0, 0] = 1.0
    y, last = op.ema("sequential", x, parameters, None, True)
    expected = torch.tensor([1.0, 0.0, -1.0, 0.0] * 2, dtype=torch.float64)
    torch.testing.assert_close(y[0, :, 0], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        last[0, :, 0, 0], torch.tensor([0.0, -1.0]).double(), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("impl", ["sequential", "fft"])
def test_nothing_remembered_stays_finite(impl):
    """rho is exactly 0 here; 0 to the power of 0 is 1, and so the input passes once."""
    inputs = make(Case(width=1, modes=1))
    parameters = inputs.parameters._replace(
        alpha_DN=torch.full((1, 1), 800.0), delta_DN=torch.full((1, 1), 800.0)
    )
    x = inputs.x.clone().requires_grad_()
    leaves = [p.clone().requires_grad_() for p in parameters]
    y, last = op.ema(impl, x, EMAParameters(*leaves), None, True)
    gamma, omega = parameters.gamma_DN2[0, 0, 0], parameters.omega_D[0]
    torch.testing.assert_close(y, x * (gamma + omega))
    (y.sum() + last.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in (x, *leaves))


def test_states_never_grow():
    """|q| < 1; where what a step forgets is below 1e-16, the nearest fp64 number is 1."""
    alpha, delta = (100 * torch.randn(50, 4) for _ in range(2))
    parameters = EMAParameters(
        alpha, delta, 50 * torch.randn(50), torch.randn(50, 4, 2), alpha[:, 0]
    )
    rho = coefficients(parameters).rho_DN
    assert bool((rho >= 0).all() and (rho <= 1).all())
    for memory in (0.0, -4.0, -16.0):
        assert bool(
            (coefficients(make(Case(width=50, memory=memory)).parameters).q_DN.abs() < 1).all()
        )
    x = torch.zeros(1, 1000, 50, dtype=torch.float64)
    x[:, 0] = 1.0
    last = op.ema("sequential", x, parameters, None, True)[1]
    assert float(last.square().sum(1).max()) <= 1 + 1e-9


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 200])
@pytest.mark.parametrize("state", [False, True])
def test_fft_equals_the_definition(length, state):
    case = Case(2, length, 3, 3, state=state, last=True)
    check("fft", case, slack=FFT_SLACK)


@pytest.mark.parametrize("length", [4096, 4099])
@pytest.mark.parametrize("impl", ["fft", "fft_table"])
def test_long_sequences(impl, length):
    """1e-5 is asked for."""
    inputs = make(Case(length=length, modes=4))
    short = op.ema(impl, inputs.x, inputs.parameters)[0]
    truth = op.ema("sequential", inputs.x.double(), inputs.double().parameters)[0]
    assert float((short - truth).abs().max()) <= 1e-5


def test_long_sequences_at_a_long_memory():
    """3000 steps are remembered: coefficients from fp64 keep outputs, states and gradients."""
    case = Case(length=4096, modes=4, memory=-4.0, state=True, last=True)
    check("fft", case, slack=FFT_SLACK)
    inputs, wide = make(case), make(case).double()
    found = op.ema("fft", inputs.x, inputs.parameters, inputs.state)[0]
    truth = op.ema("sequential", wide.x, wide.parameters, wide.state)[0]
    assert float((found - truth).abs().max()) <= 1e-5


@pytest.mark.parametrize("place", [0, 5, 19])
def test_the_definition_sees_no_future(place):
    """A NaN leaves every earlier step as it was, to the bit."""
    inputs = make(Case())
    spoiled = inputs.x.clone()
    spoiled[:, place] = torch.nan
    clean = op.ema("sequential", inputs.x, inputs.parameters)[0]
    found = op.ema("sequential", spoiled, inputs.parameters)[0]
    assert torch.equal(found[:, :place], clean[:, :place])
    assert bool(found[:, place:].isnan().all())


def test_the_kernel_is_built_from_two_short_tables():
    parameters = make(Case(width=3, modes=4, memory=-4.0)).parameters
    found = coefficients(parameters)
    kernel = fft.expand(found, found.read_DN, 300)
    direct = (found.read_DN[..., None] * found.powers(torch.arange(300))).sum(1).real
    torch.testing.assert_close(kernel, direct, rtol=1e-11, atol=1e-13)
    coarse, fine = fft.tables(found, 300)
    assert coarse.shape == (3, 4, 5) and fine.shape == (3, 4, 64)


@pytest.mark.parametrize("cut", [1, 7, 32, 63])
@pytest.mark.parametrize("impl", ["sequential", "fft"])
def test_two_pieces_equal_one(impl, cut):
    inputs = make(Case(batch=2, length=64, width=3)).double()
    whole, last = op.ema(impl, inputs.x, inputs.parameters, None, True)
    left, state = op.ema(impl, inputs.x[:, :cut], inputs.parameters, None, True)
    right, end = op.ema(impl, inputs.x[:, cut:], inputs.parameters, state, True)
    torch.testing.assert_close(torch.cat([left, right], 1), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(end, last, rtol=1e-9, atol=1e-9)


def test_gradients_of_the_definition_by_differences():
    inputs = make(Case(length=5, width=2, state=True, last=True)).double()
    leaves = [t.requires_grad_() for t in (inputs.x, *inputs.parameters, inputs.state)]
    torch.autograd.gradcheck(
        lambda x, *p: op.ema("sequential", x, EMAParameters(*p[:5]), p[5], True), leaves
    )


def test_sixteen_bits_in_and_out():
    inputs = make(Case(length=40, dtype=torch.bfloat16))
    for impl in ("sequential", "fft"):
        assert op.ema(impl, inputs.x, inputs.parameters)[0].dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results("fft", inputs)
    outside = results("fft", inputs)
    assert all(torch.equal(inside[name], outside[name]) for name in outside)


def test_an_empty_sequence_gives_its_state_back():
    inputs = make(Case(state=True))
    y, last = op.ema("fft", inputs.x[:, :0], inputs.parameters, inputs.state, True)
    assert y.shape == (1, 0, 4)
    assert torch.equal(last, inputs.state)


def test_choosing():
    inputs = make(Case(length=40))
    assert op.choose("auto", inputs.x[:, :32], inputs.parameters) == "sequential"
    assert op.choose("auto", inputs.x, inputs.parameters) == "fft"
    assert op.choose("sequential", inputs.x, inputs.parameters) == "sequential"
    with pytest.raises(UserError, match=r"shape \(1, 2, 3, 4\), not \(1, 2, 2, 4\)"):
        op.choose("auto", inputs.x, inputs.parameters, torch.zeros(1, 2, 3, 4))
    with pytest.raises(Unsupported, match="has no states"):
        op.ema("fft_table", inputs.x, inputs.parameters, None, True)
