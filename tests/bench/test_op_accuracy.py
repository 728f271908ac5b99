import math

import pytest
import torch

from steplab.bench.op_accuracy import AccuracyCheck, accuracy_table, check_accuracy


def deviation(actual, peer, truth, **options):
    (found,) = check_accuracy({"out": actual}, {"out": peer}, {"out": truth}, **options)
    return found


@pytest.fixture
def truth():
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_errors_are_relative_to_the_norm_of_the_truth(truth):
    found = deviation(truth * 1.001, truth * 1.002, truth)
    assert found.error == pytest.approx(1e-3)
    assert found.budget == pytest.approx(4e-3)  # twice the peer's; fp64 rounds nothing
    assert found.worst_tile == pytest.approx(1 / 8, rel=0.02)  # a quarter of half the peer's
    assert found.of_budget == pytest.approx(0.25)


def test_one_rounding_is_always_allowed(truth):
    found = deviation(truth.float(), truth, truth)
    assert 0 < found.error == found.budget and found.of_budget == pytest.approx(1)


@pytest.mark.parametrize("shape", [(4000, 8), (32000,), (40, 100, 8)])
def test_one_wrong_row_among_thousands_is_found(truth, shape):
    truth = truth.reshape(shape)
    peer = truth.to(torch.bfloat16)
    wrong = peer.clone()
    wrong.view(-1, 8)[1234] *= -1
    found = deviation(wrong, peer, truth)
    assert found.worst_tile > 10
    hidden = deviation(wrong, truth + 0.02, truth)  # a peer so poor that the whole looks right
    assert hidden.error < hidden.budget and hidden.of_budget > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_results_that_are_not_finite_are_wrong(truth, value):
    broken = truth.clone()
    broken[7, 3] = value
    assert deviation(broken, truth * 1.1, truth).of_budget == math.inf


def test_pieces_add_up(truth):
    whole = deviation(truth * 1.001, truth.float(), truth)
    parts = AccuracyCheck("out")
    for piece in truth.split(1600):
        parts.add(piece * 1.001, piece.float(), piece)
    assert parts.result().error == pytest.approx(whole.error)
    assert parts.result().of_budget == pytest.approx(whole.of_budget)


def test_a_single_value_is_allowed_some_roundings():
    one = torch.tensor(2.5)
    eps = torch.finfo(torch.float32).eps
    assert deviation(one * (1 + 4 * eps), one, one.double()).of_budget < 1
    assert deviation(one * (1 + 40 * eps), one, one.double()).of_budget > 1


def test_slack_is_a_share_of_the_truth(truth):
    assert deviation(truth * 1.01, truth, truth).of_budget > 1
    assert deviation(truth * 1.01, truth, truth, slack=0.02).of_budget == pytest.approx(0.5)


def test_a_long_sum_has_slack_in_its_own_tile_only():
    truth = torch.cat([torch.full((16, 4), 100.0), torch.full((16, 4), 1.0)]).double()

    def share(actual):
        comparison = AccuracyCheck("out")
        comparison.add(actual, truth, truth, sum_slack=0.02)
        return comparison.result().worst_tile

    assert share(truth * 1.01) == pytest.approx(0.5)
    truth_of_small = truth.clone()
    truth_of_small[16:] += 1.0  # small beside the first tile, wrong by all of its own
    assert share(truth_of_small) > 1


def test_a_row_of_few_terms_has_less_slack_than_one_of_many(truth):
    share = torch.full((4000, 1), 0.02)
    share[:2000] /= 10
    comparison = AccuracyCheck("out")
    comparison.add(truth * 1.01, truth, truth, share)
    found = comparison.result()
    assert found.worst_tile == pytest.approx(5)  # 1 % where 0.2 % are allowed
    assert found.budget == pytest.approx(0.02 * (0.5 + 0.5 / 100) ** 0.5, rel=0.02)


def test_zero_of_zero_is_right():
    nothing = torch.zeros(100, 4)
    assert deviation(nothing, nothing, nothing.double()).of_budget == 0


def test_results_of_another_shape_are_refused(truth):
    with pytest.raises(ValueError, match="out is"):
        deviation(truth[:5], truth, truth)


def test_the_record_says_what_was_checked(truth):
    table = accuracy_table([deviation(truth, truth, truth)], "2 of 9 heads")
    assert table.title == "against fp64: 2 of 9 heads" and table.rows[0][0] == "out"
