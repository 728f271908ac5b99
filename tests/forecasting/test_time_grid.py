import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.forecasting.time_grid import choose_grids, future_times, on_grid

NAN = float("nan")
FREQS = ["h", "15min", "s", "D", "W-WED", "MS", "ME", "QS", "QE", "YE", "B", "2D", "3h", "YS"]


def days(*texts):
    return np.array(texts, "datetime64[us]")


@given(
    st.sampled_from(FREQS),
    st.datetimes(pd.Timestamp("1999-01-01"), pd.Timestamp("2030-01-01")),
    st.integers(13, 30),
    st.integers(1, 40),
)
@settings(max_examples=60)
def test_times_go_on_as_pandas_goes_on(freq, start, points, horizon):
    """13 points: enough to tell business days from days and quarters from whole years."""
    whole = pd.date_range(start.replace(microsecond=0), periods=points + horizon, freq=freq)
    times = whole.to_numpy()
    (grid,) = choose_grids([times[:points]], ["a"], None)
    np.testing.assert_array_equal(future_times(times[:points], grid, horizon), times[points:])
    np.testing.assert_array_equal(future_times(times[:points], freq, horizon), times[points:])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (days("2024-01-31", "2024-03-31", "2024-05-31"), ["2024-07-31", "2024-09-30"]),
        (days("2024-01-01", "2024-03-01", "2024-05-01"), ["2024-07-01", "2024-09-01"]),
        (days("2023-11-30", "2023-12-30", "2024-01-30"), ["2024-02-29", "2024-03-30"]),
        (days("2024-01-31T12", "2024-02-29T12"), ["2024-03-31T12", "2024-04-30T12"]),
    ],
)
def test_ends_of_months(times, expected):
    (grid,) = choose_grids([times], ["a"], None)
    np.testing.assert_array_equal(future_times(times, grid, 2), days(*expected))


def test_counts_go_on():
    times = np.array([10, 12, 14, 18])
    (grid,) = choose_grids([times], ["a"], None)
    assert future_times(times, grid, 3).tolist() == [20, 22, 24]
    np.testing.assert_array_equal(
        on_grid(times, np.array([1.0, 2, 3, 5]), grid, 100, "a"), [1, 2, 3, NAN, 5]
    )


@pytest.mark.parametrize("freq", [None, "D"])
def test_rows_that_are_missing_become_missing_points(freq):
    times = days("2024-01-01", "2024-01-02", "2024-01-03", "2024-01-06", "2024-01-07")
    values = np.array([1.0, 2, 3, 6, 7])
    (grid,) = choose_grids([times], ["a"], freq)
    found = on_grid(times, values, grid, 100, "a")
    np.testing.assert_array_equal(found, [1, 2, 3, NAN, NAN, 6, 7])
    np.testing.assert_array_equal(on_grid(times, values, grid, 3, "a"), [6, 7])
    np.testing.assert_array_equal(on_grid(times, values, grid, 5, "a"), [3, NAN, NAN, 6, 7])


@pytest.mark.parametrize("freq", ["MS", "ME", "B", "h"])
def test_gaps_in_every_kind_of_step(freq):
    whole = pd.date_range("2023-01-02", periods=30, freq=freq).to_numpy()
    kept = np.delete(np.arange(30), [7, 20, 21])
    (grid,) = choose_grids([whole[kept]], ["a"], None)
    found = on_grid(whole[kept], kept.astype(float), grid, 30, "a")
    assert np.flatnonzero(np.isnan(found)).tolist() == [7, 20, 21]
    assert found[22:].tolist() == list(range(22, 30))


def test_a_gap_of_years_costs_no_memory():
    times = days("1700-01-01", *(f"2024-01-01T00:00:{s:02d}" for s in range(60)))
    (grid,) = choose_grids([times], ["a"], None)
    assert on_grid(times, np.arange(61.0), grid, 80, "a").tolist() == list(range(1, 61))
    weekly = days("2024-01-01", "2024-01-08")
    (grid,) = choose_grids([weekly], ["a"], None)
    assert (future_times(weekly, grid, 20_000)[-1] > days("2400-01-01")).all()


def test_one_row_takes_the_step_of_the_others():
    hourly = pd.date_range("2024-01-01", periods=5, freq="h").to_numpy()
    one = days("2024-01-01")
    grids = choose_grids([hourly, one], ["a", "b"], None)
    assert (
        future_times(one, grids[1], 2).tolist() == days("2024-01-01T01", "2024-01-01T02").tolist()
    )
    assert future_times(np.array([4]), choose_grids([np.array([4])], ["a"], None)[0], 1) == [5]
    daily = pd.date_range("2024-01-01", periods=5, freq="D").to_numpy()
    for others in ([], [hourly, daily]):
        with pytest.raises(
            UserError, match=r"'x' has one row, so its step in time is unknown\. Give"
        ):
            choose_grids([*others, one], [*range(len(others)), "x"], None)


@pytest.mark.parametrize(
    ("times", "freq", "said"),
    [
        (days("2024-01-01", "2024-01-02", "2024-01-07T03"), None, "'a' have no even step"),
        (days("2024-01-01", "2024-01-02T05"), "D", "row at 2024-01-01, which is not on the grid"),
        (days("2024-01-01", "2024-01-02"), "often", "'often' is not a pandas frequency"),
        (np.array([1, 2]), "D", "are counts, which have no frequency"),
    ],
)
def test_uneven_times_are_one_sentence(times, freq, said):
    with pytest.raises(UserError, match=said):
        (grid,) = choose_grids([times], ["a"], freq)
        on_grid(times, np.zeros(len(times)), grid, 100, "a")
