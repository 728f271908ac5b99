"""How far a tensor may be from the truth, by how far honest peers are."""

import pytest
import torch

from steplab.verify.budgets import WHOLE, disagreement, errors_of
from steplab.verify.numerics import NumericsSnapshot

NAMES = ("matrix", "words")


def snapshot(off: float, dtype="fp32", terms=256, roundoff=2.0**-24) -> NumericsSnapshot:
    """Updates and weights of norm 1 and 100, the updates `off` from those of `snapshot(0)`."""
    torch.manual_seed(0)
    base = {name: torch.randn(64, dtype=torch.float64) for name in NAMES}
    base = {name: tensor / tensor.norm() for name, tensor in base.items()}
    turned = {
        name: tensor.roll(1) - (tensor.roll(1) @ tensor) * tensor for name, tensor in base.items()
    }
    update = {n: base[n] + off * turned[n] / turned[n].norm() for n in NAMES}
    weights = {n: 100 * base[n] for n in NAMES}
    return NumericsSnapshot(
        {"update": update, "weights": weights}, dict.fromkeys(NAMES, roundoff), dtype, terms
    )


def budgets(off: float, terms: int = 256) -> dict[str, float]:
    peers = [snapshot(off, terms=terms)]
    errors = errors_of("update", snapshot(off, terms=terms), peers, snapshot(0.0, terms=terms))
    return {error.name: error.budget for error in errors}


def test_sums_in_another_order_explain_small_errors_only():
    """256 terms: sqrt(256 / 8) times the error of sums; 28 % are not made by sums."""
    assert budgets(1e-3)[WHOLE] == pytest.approx(2 * 5.657e-3, rel=0.01)
    assert budgets(0.28)[WHOLE] == pytest.approx(2 * 0.28, rel=0.01)
    assert budgets(0.02)[WHOLE] == pytest.approx(2 / 32, rel=0.01)


def test_a_tensor_is_judged_more_narrowly_where_it_would_pass_whatever_it_held():
    assert budgets(0.1)["matrix"] == pytest.approx(4 * 0.1, rel=0.01)
    assert budgets(0.28)["matrix"] == pytest.approx(2 * 0.28, rel=0.01)
    peers, truth = [snapshot(0.28)], snapshot(0.0)
    wrong = errors_of("update", snapshot(0.9), peers, truth)
    assert all(error.excess > 1 for error in wrong)
    assert budgets(0.6)["matrix"] > 1  # such peers cannot tell


def test_weights_that_are_kept_in_bf16_explain_what_their_updates_lose():
    """Weights of norm 100 in bf16 lose 0.2 of an update of norm 1."""
    truth, rounded = snapshot(0.0, "bf16"), snapshot(0.01, "bf16")
    own = snapshot(0.25, "bf16")
    assert disagreement("update", [rounded, own], truth, "bf16").excess > 1
    stored = snapshot(0.25, "bf16", roundoff=2.0**-9)
    assert disagreement("update", [rounded, stored], truth, "bf16") is None
