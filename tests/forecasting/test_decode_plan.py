import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.core.errors import Unsupported, UserError
from steplab.forecasting.decode import choose_heads, plan_passes

HEADS = (1, 8, 32, 64)


def points(horizon, heads=HEADS, patch=1, rule="largest"):
    return [head.points for head in choose_heads(horizon, heads, patch, rule)]


@pytest.mark.parametrize(
    ("horizon", "rule", "expected"),
    [
        (96, "largest", [64, 32]),
        (192, "largest", [64] * 3),
        (336, "largest", [64] * 5 + [8, 8]),
        (720, "largest", [64] * 11 + [8, 8]),
        (6, "largest", [1] * 6),
        (1, "largest", [1]),
        (6, "next-larger", [6]),
        (96, "next-larger", [64, 32]),
        (336, "next-larger", [64] * 5 + [16]),
        (65, "next-larger", [64, 1]),
    ],
)
def test_heads_of_known_horizons(horizon, rule, expected):
    assert points(horizon, rule=rule) == expected


def test_offsets_are_those_of_the_heads_whatever_their_order():
    chosen = choose_heads(73, (64, 1, 8), 1, "largest")
    assert [(head.offset, head.points) for head in chosen] == [(0, 64), (65, 8), (64, 1)]


def test_points_that_are_fed_back_make_whole_tokens():
    assert points(70, patch=8) == [64, 6]  # not 64 and six times 1: 8, cut to 6
    assert points(65, patch=8) == [64, 1]  # the last one is not fed back
    assert points(5, (8, 16), patch=4) == [5]
    with pytest.raises(Unsupported, match="at most 6 points"):
        points(7, (1, 6), patch=4)


@given(st.integers(1, 2000), st.sampled_from(["largest", "next-larger"]), st.integers(65, 4096))
def test_passes_cover_the_horizon_and_stay_inside_the_trained_positions(horizon, rule, trained):
    chosen = choose_heads(horizon, HEADS, 1, rule)
    passes = plan_passes(chosen, trained)
    assert [head for one in passes for head in one.heads] == list(chosen)
    assert sum(head.points for head in chosen) == horizon
    for one in passes:
        fed = sum(head.points for head in one.heads[:-1])
        assert one.context + fed == trained
        assert one.context >= trained // 2 or len(one.heads) == 1


@pytest.mark.parametrize("horizon", [0, -3])
def test_a_horizon_is_at_least_one_point(horizon):
    with pytest.raises(UserError, match="at least 1 point"):
        points(horizon)


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match="Did you mean 'largest'"):
        points(4, rule="larges")
