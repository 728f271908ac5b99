import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.forecasting.contexts import read_contexts, scale_context, usable_part
from steplab.forecasting.inference import length_batches

NAN, INF = float("nan"), float("inf")
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@pytest.mark.parametrize(
    "context",
    [
        [1, 2, 3],
        (1.0, 2.0, 3.0),
        np.array([1, 2, 3], np.int16),
        np.array([[1.0, 2.0, 3.0]]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        [np.array([1.0, 2.0, 3.0])],
        [[1, 2, 3]],
        [torch.tensor([1, 2, 3])],
    ],
)
def test_every_form_of_one_series(context):
    (found,) = read_contexts(context)
    assert found.tolist() == [1, 2, 3] and found.dtype == np.float64


def test_ragged_lists_rows_and_missing_points():
    assert [len(one) for one in read_contexts([[1], np.arange(4), torch.arange(2)])] == [1, 4, 2]
    assert len(read_contexts(np.zeros((5, 3)))) == 5
    assert np.isnan(read_contexts([1.0, None, 3.0])[0][1])


def test_the_givers_array_is_not_changed():
    given_array = np.array([1.0, NAN, 3.0])
    (found,) = read_contexts(given_array)
    found[0] = 9
    scale_context(found)
    assert given_array[0] == 1 and np.isnan(given_array[1])


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ([], "no series"),
        (np.zeros((0, 4)), "no series"),
        (np.zeros((2, 2, 2)), "3 dimensions"),
        (np.float64(3), "0 dimensions"),
        ([np.zeros((2, 2))], "Series 0 has 2 dimensions"),
        (["a", "b"], "holds <U1"),
        ([[1], "ab"], "Series 1"),
        ([[1], [[2], [3, 4]]], "Series 1 does not hold numbers only"),
        (np.array([1j]), "complex"),
        (np.array([True]), "bool"),
        (np.array(["2024-01-01"], "datetime64[D]"), "datetime64"),
    ],
)
def test_what_is_no_series_is_one_sentence(context, said):
    with pytest.raises(UserError, match=said):
        read_contexts(context)


def test_missing_points_in_front_are_left_out_and_the_last_ones_kept():
    series = np.array([1, 2, NAN, INF, 5, NAN, 7, NAN])
    assert usable_part(series, 5, "x").tolist()[:1] == [5]
    assert len(usable_part(series, 5, "x")) == 4
    assert len(usable_part(series, 100, "x")) == 8
    with pytest.raises(UserError, match="Series 'x' has no known point among its last 1"):
        usable_part(series, 1, repr("x"))
    for nothing in ([], [NAN, -INF]):
        with pytest.raises(UserError, match="Series 0 has no known point"):
            usable_part(np.array(nothing), 5, "0")


def test_missing_points_are_interpolated_or_carried_on():
    scaled = scale_context(np.array([1.0, NAN, INF, 4.0, NAN]))
    np.testing.assert_allclose(scaled.undo(scaled.values), [1, 2, 3, 4, 4])
    # Of the known points 1 and 4: filled ones have no weight.
    np.testing.assert_allclose(scaled.undo(np.array([0.0, 1.0])), [2.5, 4.0])


@given(st.lists(NUMBERS, min_size=2, max_size=40))
def test_scaling_is_a_z_score_with_ddof_0(numbers):
    series = np.array(numbers)
    scaled = scale_context(series)
    if series.min() == series.max():
        assert (scaled.values == 0).all() and (
            scaled.undo(np.array([3.0, -7.0])) == series[0]
        ).all()
        return
    np.testing.assert_allclose(scaled.undo(scaled.values), series, rtol=1e-9, atol=1e-9)
    unit = series / abs(series).max()  # numpy's own squares are 0 below 1e-162
    if unit.std() > 1e-9:
        plain = (unit - unit.mean()) / unit.std()
        np.testing.assert_allclose(scaled.values, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unit", [1e-320, 1e-200, 1.0, 1e150, 1e307])
def test_no_unit_is_too_small_or_too_large(unit):
    scaled = scale_context(np.array([1.0, 2.0, 4.0]) * unit)
    assert np.isfinite(scaled.values).all() and scaled.values.std() == pytest.approx(1, rel=1e-3)
    assert scaled.undo(scaled.values)[2] == pytest.approx(4 * unit, rel=1e-3)


def test_a_large_offset_does_not_drown_the_signal():
    wave = np.sin(np.arange(50))
    near, far = scale_context(wave), scale_context(wave + 1e9)
    np.testing.assert_allclose(far.values, near.values, atol=1e-5)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 200)
)
def test_batches_hold_every_series_once_within_the_limits(lengths, most_series, most_points):
    found = list(length_batches(lengths, most_series, most_points))
    assert sorted(np.concatenate(found)) == list(range(len(lengths)))
    for numbers in found:
        longest = max(lengths[number] for number in numbers)
        assert len(numbers) <= most_series
        assert len(numbers) == 1 or len(numbers) * longest <= most_points
    in_order = [lengths[number] for numbers in found for number in numbers]
    assert in_order == sorted(in_order)
