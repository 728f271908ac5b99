import json

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from steplab.core.errors import UserError
from steplab.data.formats.frames import Columns, read_frame
from steplab.forecasting.forecaster import Forecaster
from steplab.forecasting.histories import read_histories
from steplab.forecasting.long_table import level_name, write_forecasts
from steplab.forecasting.prediction import Prediction
from tests.forecasting.models import model

NIXTLA, CHRONOS = ("unique_id", "ds", "y"), ("item_id", "timestamp", "target")


def walk(points, seed):
    return np.cumsum(np.random.default_rng(seed).normal(size=points))


def frame(names=NIXTLA, lengths=(20, 33), freq="D"):
    parts = []
    for index, points in enumerate(lengths):
        times = pd.date_range("2024-01-01", periods=points, freq=freq)
        columns = ([f"s{index}"] * points, times, walk(points, index))
        parts.append(pd.DataFrame(dict(zip(names, columns, strict=True))))
    return pd.concat(parts)


@pytest.fixture(scope="module")
def forecaster():
    return Forecaster(model(quantiles="0.1,0.5,0.9"))


def test_a_frame_comes_back_in_its_own_names(forecaster):
    found = forecaster.predict_df(frame(), 6)
    names = ["steplab", "steplab-lo-80", "steplab-median", "steplab-hi-80"]
    assert list(found) == ["unique_id", "ds", *names]
    assert found.unique_id.tolist() == ["s0"] * 6 + ["s1"] * 6
    assert found.ds[0] == pd.Timestamp("2024-01-21") and found.ds[11] == pd.Timestamp("2024-02-08")
    expected = forecaster.predict([walk(20, 0), walk(33, 1)], 6)
    np.testing.assert_allclose(found.steplab, expected.mean_BH.ravel())
    np.testing.assert_allclose(found["steplab-hi-80"], expected.quantiles_BHQ[..., 2].ravel())

    other = forecaster.predict_df(frame(CHRONOS), 6, quantiles=[0.9])
    assert list(other) == ["item_id", "timestamp", "target_name", "predictions", "0.9"]
    assert set(other.target_name) == {"target"}
    np.testing.assert_allclose(other.predictions, found.steplab)


def test_names_of_columns_can_be_given_in_part(forecaster):
    own = frame(("shop", "ds", "sold"))
    found = forecaster.predict_df(own, 2, id_column="shop", target="sold")
    assert list(found)[:4] == ["shop", "ds", "target_name", "predictions"]
    with pytest.raises(UserError, match="no column 'ds', 'y'"):
        forecaster.predict_df(frame(("shop", "day", "sold")), 2, id_column="shop")
    twice = pd.concat([own, own])  # the first complaint is the one that counts
    with pytest.raises(UserError, match="two points"):
        forecaster.predict_df(twice, 2, id_column="shop", target="sold")


def test_rows_in_any_order_and_ids_of_any_type(forecaster):
    mixed = frame().sample(frac=1, random_state=0).assign(unique_id=lambda t: t.unique_id.str[1:])
    mixed["unique_id"] = mixed.unique_id.astype(int)
    found = forecaster.predict_df(mixed, 3).set_index(["unique_id", "ds"]).sort_index()
    plain = forecaster.predict_df(frame(), 3).assign(unique_id=lambda t: t.unique_id.str[1:])
    plain = plain.astype({"unique_id": int}).set_index(["unique_id", "ds"]).sort_index()
    pd.testing.assert_frame_equal(found, plain)


def test_gaps_in_time_are_missing_points_with_a_warning():
    warnings = []
    forecaster = Forecaster(model(), warn=warnings.append)
    holed = frame(lengths=(30,)).drop(index=[10, 11])
    found = forecaster.predict_df(holed, 4)
    values = walk(30, 0)
    values[10:12] = np.nan
    np.testing.assert_allclose(found.steplab, forecaster.predict(values, 4).mean_BH[0])
    (note,) = warnings
    assert "2 points are missing in the contexts of 1 of 1 series (first: 's0')" in note


def test_a_frequency_can_be_given(forecaster):
    one = pd.DataFrame({"unique_id": ["a"], "ds": ["2024-01-31"], "y": [5.0]})
    with pytest.raises(UserError, match="--freq"):
        forecaster.predict_df(one, 2)
    found = forecaster.predict_df(one, 2, freq="ME")
    assert found.ds.dt.strftime("%Y-%m-%d").tolist() == ["2024-02-29", "2024-03-31"]
    assert (found.steplab == 5).all()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("names", [NIXTLA, CHRONOS])
def test_files_in_and_out(tmp_path, forecaster, names, suffix):
    table = frame(names, freq="h")
    source, target = tmp_path / f"in{suffix}", tmp_path / "new" / f"out{suffix}"
    table.to_csv(source, index=False) if suffix == ".csv" else table.to_parquet(source)
    histories = read_histories(source, (None, None, None), None, 81)
    prediction = forecaster.predict(list(histories.values), 5)
    write_forecasts(target, histories, prediction, "model")
    point = "steplab" if names == NIXTLA else "predictions"
    back = read_frame(target, Columns(names[0], names[1], point))
    assert back.ids == ("s0", "s1")
    np.testing.assert_allclose(np.stack(back.values), prediction.mean_BH, rtol=1e-14)
    for times, original in zip(back.timestamps, (20, 33), strict=True):
        expected = pd.date_range("2024-01-01", periods=original + 5, freq="h")[-5:]
        np.testing.assert_array_equal(times, expected.to_numpy())
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".jsonl"])
def test_arrays_are_counted_on(tmp_path, forecaster, suffix):
    series = [walk(20, 0).astype(np.float32), walk(20, 1).astype(np.float32)]
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, np.stack(series))
    elif suffix == ".npz":
        np.savez(path, north=series[0], south=series[1])
    else:
        path.write_text("\n".join(json.dumps(one.tolist()) for one in series))
    histories = read_histories(path, (None, None, None), None, 81)
    prediction = forecaster.predict(list(histories.values), 5)
    np.testing.assert_allclose(prediction.mean_BH, forecaster.predict(series, 5).mean_BH)
    write_forecasts(tmp_path / "out.csv", histories, prediction, "model")
    back = pd.read_csv(tmp_path / "out.csv")
    names = ("north", "south") if suffix == ".npz" else (0, 1)
    assert back.unique_id.tolist() == [names[0]] * 5 + [names[1]] * 5
    assert back.ds.tolist() == [20, 21, 22, 23, 24] * 2
    write_forecasts(tmp_path / "out.json", histories, prediction, "model")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["horizon"] == 5 and document["point_model"] is False
    assert document["series"][1]["times"] == [20, 21, 22, 23, 24]
    assert document["series"][1]["quantiles"]["0.9"] == pytest.approx(
        prediction.quantiles_BHQ[1, :, 2].tolist()
    )


def test_no_id_is_a_formula_in_a_csv(tmp_path):
    """A spreadsheet computes what begins with =; .json and .parquet keep every letter."""
    ids, zeros = ("=1+1", "@x\x1b[31m", "-2", "plain"), np.zeros((4, 1), np.float32)
    np.savez(tmp_path / "x.npz", **dict.fromkeys(ids, np.arange(3.0)))
    histories = read_histories(tmp_path / "x.npz", (None, None, None), None, 81)
    prediction = Prediction(zeros)
    write_forecasts(tmp_path / "out.csv", histories, prediction, "model")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[1:] == ["'=1+1,3,0.0", "'@x?[31m,3,0.0", "-2,3,0.0", "plain,3,0.0"]
    write_forecasts(tmp_path / "out.json", histories, prediction, "model")
    series = json.loads((tmp_path / "out.json").read_text())["series"]
    assert [one["id"] for one in series] == list(ids)


def test_only_the_end_of_long_arrays_is_read(tmp_path, monkeypatch):
    from steplab.data.formats.arrays import ArraySeries

    np.save(tmp_path / "x.npy", np.arange(2000.0).reshape(2, 1000))
    read = []
    original = ArraySeries.read
    monkeypatch.setattr(
        ArraySeries,
        "read",
        lambda self, *place: read.append(place) or original(self, *place),
    )
    histories = read_histories(tmp_path / "x.npy", (None, None, None), None, 81)
    assert read == [(0, 919, 1000), (1, 919, 1000)]
    assert histories.future(1, 2).tolist() == [1000, 1001]


def test_arrays_have_no_columns(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(9))
    with pytest.raises(UserError, match="has no columns and no times"):
        read_histories(tmp_path / "x.npy", ("a", None, None), None, 80)


def test_names_of_quantiles():
    named = [level_name(Columns(*NIXTLA), level) for level in (0.1, 0.25, 0.5, 0.9, 0.975)]
    assert named == ["steplab-lo-80", "steplab-lo-50", "steplab-median", "steplab-hi-80",
                     "steplab-hi-95"]  # fmt: skip
    assert level_name(Columns(*CHRONOS), 0.1) == "0.1"


def test_unknown_formats_are_refused(tmp_path, forecaster):
    with pytest.raises(UserError, match=r"Use \.csv, \.parquet, \.json"):
        write_forecasts(tmp_path / "x.xlsx", None, None, "")
