"""Which windows are judged, and what is known about their series."""

import numpy as np
import pytest

from steplab.core import TrainSettings
from steplab.core.errors import UserError
from steplab.data.series import InMemorySeries
from steplab.data.synthetic import FAMILIES, HELD_OUT_FAMILIES, SyntheticSeries
from steplab.data.time_step import infer_time_step
from steplab.forecasting.evaluation.data import (
    EVALUATION_SEED,
    EvaluationData,
    generated_data,
    open_data,
    usual_period,
)
from steplab.forecasting.evaluation.windows import EvaluationPlan, rolling_windows
from steplab.train.data import OOD_SEED, VALIDATION_SEED


def source_of(*series):
    packed = InMemorySeries("some", [np.array(one, np.float32) for one in series])
    return EvaluationData(
        packed, lambda index: "ab"[index % 2], lambda index: 3 + index, "some periods"
    )


def windows(plan, *series):
    return list(rolling_windows(source_of(*series), plan))


def test_windows_touch_at_the_end_of_each_series():
    found = windows(EvaluationPlan(3, 2, 99), range(10), range(20, 31))
    assert [w.truth_H.tolist() for w in found] == [
        [4, 5, 6], [7, 8, 9], [25, 26, 27], [28, 29, 30]
    ]  # fmt: skip
    assert [w.context.tolist() for w in found[:2]] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert [w.group for w in found] == ["a", "a", "b", "b"]
    assert [w.scale for w in found] == [3, 3, 4, 4]  # the periods, on a line of slope 1
    assert found[3].naive_H.tolist() == [24, 25, 26]


def test_a_context_is_cut_but_seasonal_naive_sees_all():
    (window,) = windows(EvaluationPlan(3, 1, 2), range(10))
    assert window.context.tolist() == [5, 6]
    assert window.naive_H.tolist() == [4, 5, 6] and window.scale == 3


def test_a_short_series_has_fewer_windows_and_a_shorter_one_none():
    assert (
        len(windows(EvaluationPlan(3, 5, 99), range(9))) == 2
    )  # the first 3 points are only a past
    assert windows(EvaluationPlan(3, 5, 99), range(4)) == []  # one point is no pair
    assert len(windows(EvaluationPlan(3, 5, 99), range(5))) == 1


def test_windows_with_nothing_to_see_or_to_judge_are_left_out():
    nan = float("nan")
    assert windows(EvaluationPlan(2, 1, 99), [1, 2, 3, nan, nan]) == []
    assert windows(EvaluationPlan(2, 1, 2), [1, 2, nan, nan, 5, 6]) == []
    assert windows(EvaluationPlan(2, 1, 99), [nan, 2, nan, nan, 5, 6]) == []
    (window,) = windows(EvaluationPlan(2, 1, 3), [1, 2, nan, float("inf"), nan, 6])
    assert np.isnan(window.context[1:]).all()  # Inf is a missing point too


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_a_plan_of_nothing_is_refused(values):
    with pytest.raises(UserError, match="at least 1"):
        EvaluationPlan(*values)


# Generated series


def test_generated_series_know_family_and_true_period():
    source = generated_data()
    assert {source.group(i) for i in range(10)} == set(FAMILIES)
    assert source.unseen == set(HELD_OUT_FAMILIES)
    for index in range(30):
        true = source.series.period(index)
        assert source.period(index) == (1 if true is None else round(true))
    assert generated_data(5).period(0) == 5


def test_the_period_of_a_noiseless_season_is_the_true_one():
    source = generated_data()
    names = [source.group(i) for i in range(len(source.series))]
    for index in [i for i, name in enumerate(names) if name == "square_wave"][:8]:
        points = source.series.read(index, 0, 1024).astype(float)
        points -= points.mean()
        spectrum = np.abs(np.fft.rfft(points)) ** 2
        found = 1024 / np.argmax(spectrum)
        assert source.period(index) == pytest.approx(found, rel=0.06, abs=0.6)


def test_no_series_of_the_evaluation_is_trained_on():
    seed = TrainSettings().seed
    judged = generated_data().series
    families = tuple(FAMILIES)
    for other in (seed, seed + VALIDATION_SEED, seed + OOD_SEED):
        assert other != EVALUATION_SEED
        trained = SyntheticSeries(20, 1024, other, families)
        for index in range(20):
            assert (trained.read(index, 0, 1024) != judged.read(index, 0, 1024)).any()


# Files


def test_a_file_of_arrays_has_period_1_unless_given(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(2, 6))
    source = open_data(tmp_path / "x.npy")
    assert (source.period(1), source.group(1)) == (1, "x.npy")
    assert "none was given" in source.period_text
    assert open_data(tmp_path / "x.npy", 4).period(0) == 4


def test_each_dataset_of_a_folder_is_a_group(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12.0).reshape(2, 6))
    np.save(tmp_path / "b.npy", np.arange(6.0))
    source = open_data(tmp_path)
    names = [source.group(index) for index in range(3)]
    assert names[0] == names[1] and names[0].endswith("a.npy") and names[2].endswith("b.npy")


def test_a_frame_has_the_usual_period_of_its_step(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    times = pandas.date_range("2024-01-01", periods=30, freq="h")
    frame = pandas.DataFrame({"unique_id": "s", "ds": times, "y": np.arange(30.0)})
    frame.to_csv(tmp_path / "x.csv", index=False)
    source = open_data(tmp_path / "x.csv")
    assert source.period(0) == 24 and "24 for 1 hour" in source.period_text
    assert open_data(tmp_path / "x.csv", 7).period(0) == 7


@pytest.mark.parametrize(
    ("unit", "count", "period"),
    [("h", 1, 24), ("h", 6, 4), ("h", 5, 1), ("D", 1, 1), ("D", 7, 1), ("m", 1, 1440),
     ("m", 15, 96), ("s", 1, 3600), ("ms", 100, 1)],
)  # fmt: skip
def test_usual_periods(unit, count, period):
    start = np.datetime64("2024-01-03T00:00:00.000")
    times = start + np.arange(5) * np.timedelta64(count, unit)
    assert usual_period(infer_time_step(times)) == period


def test_usual_periods_of_months_and_counts():
    months = np.arange("2020-01", "2023-01", dtype="datetime64[M]").astype("datetime64[s]")
    assert usual_period(infer_time_step(months)) == 12
    assert usual_period(infer_time_step(months[::3])) == 4
    assert usual_period(infer_time_step(np.arange(9))) == 1
    assert usual_period(None) == 1
