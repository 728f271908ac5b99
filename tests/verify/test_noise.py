"""Nothing is left to chance while numerics are compared."""

import pytest
import torch

from steplab.verify.curves import check_curves
from steplab.verify.noise import fills_at_random, fixed_noise


def standard_normal(dtype):
    return torch.distributions.Normal(torch.zeros(33, dtype=dtype), torch.ones(33, dtype=dtype))


SHARES = torch.linspace(0, 1, 33)
DRAWS = {
    "rand": lambda dtype: torch.rand(64, 33, dtype=dtype),
    "rand of a list": lambda dtype: torch.rand([64, 33], dtype=dtype),
    "rand of a size": lambda dtype: torch.rand(size=(64, 33), dtype=dtype),
    "randn": lambda dtype: torch.randn(64, 33, dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(torch.ones(64, 33, dtype=dtype)),
    "randn_like": lambda dtype: torch.randn_like(torch.ones(64, 33), dtype=dtype),
    "normal of tensors": lambda dtype: torch.normal(torch.zeros(64, 33, dtype=dtype), 2.0),
    "normal of numbers": lambda dtype: torch.normal(0.0, 2.0, (64, 33), dtype=dtype),
    "a distribution": lambda dtype: standard_normal(dtype).rsample((64,)),
    "a sample of it": lambda dtype: standard_normal(dtype).sample((64,)),
    "normal_": lambda dtype: torch.empty(64, 33, dtype=dtype).normal_(1.0, 2.0),
    "uniform_": lambda dtype: torch.empty(64, 33, dtype=dtype).uniform_(-1, to=1),
    "exponential_": lambda dtype: torch.empty(64, 33, dtype=dtype).exponential_(2.0),
    "bernoulli_": lambda dtype: torch.empty(64, 33, dtype=dtype).bernoulli_(0.25),
    "bernoulli_ of shares": lambda dtype: torch.empty(64, 33, dtype=dtype).bernoulli_(SHARES),
    "bernoulli": lambda dtype: torch.bernoulli(torch.full((64, 33), 0.5, dtype=dtype)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_dtype_gets_the_same_numbers_rounded(name):
    before = torch.get_rng_state()
    with fixed_noise():
        wide = DRAWS[name](torch.float64)
        again = DRAWS[name](torch.float64)
        narrow = [DRAWS[name](dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert torch.equal(torch.get_rng_state(), before)
    assert wide.shape == (64, 33) and torch.equal(wide, again)
    for drawn in narrow:
        assert torch.equal(drawn, wide.to(drawn.dtype))
    assert not torch.equal(DRAWS[name](torch.float64), wide)  # chance is back


@pytest.mark.parametrize(
    "draw, mean, spread",
    [
        (lambda x: torch.rand_like(x), 0.5, 1 / 12),
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: x.uniform_(1, 3), 2.0, 1 / 3),
        (lambda x: x.normal_(1.0, 2.0), 1.0, 4.0),
        (lambda x: x.exponential_(0.5), 2.0, 4.0),
        (lambda x: x.bernoulli_(0.2), 0.2, 0.16),
    ],
)
def test_they_look_like_noise(draw, mean, spread):
    with fixed_noise():
        drawn = draw(torch.empty(4096, dtype=torch.float64))
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.05 * spread**0.5)
    assert float(drawn.var()) == pytest.approx(spread, rel=0.1)
    for apart in (1, 2, 16, 64):
        together = torch.stack([drawn[apart:], drawn[:-apart]])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.06


def test_compiled_code_gets_them_too_and_draws_again_afterwards():
    def noisy(x):
        return x + torch.randn_like(x) + torch.empty_like(x).normal_(0, 2.0)

    compiled, x = torch.compile(noisy, backend="aot_eager", fullgraph=True), torch.ones(8)
    with fixed_noise():
        assert torch.equal(compiled(x), noisy(x))
    assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.parametrize("name", ["randn", "normal_", "uniform_", "exponential_", "bernoulli_"])
def test_methods_that_fill_a_tensor_are_seen(name):
    assert fills_at_random(lambda: DRAWS[name](torch.float32)) == name.endswith("_")


@pytest.mark.slow
def test_a_model_that_fills_no_tensor_is_compiled_as_it_is(tiny_spec, tmp_path):
    """Dynamo cannot trace `Tensor.unflatten` through a mode of torch functions."""
    spec = tiny_spec("compile=blocks")
    checks = check_curves(spec, tmp_path)
    assert checks and all(check.passed for check in checks), checks
