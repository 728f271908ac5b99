import builtins
import importlib.util
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import Unsupported, UserError
from steplab.data.formats import open_series
from steplab.data.formats.frames import Columns, from_pandas, read_frame, to_pandas, write_frame
from steplab.data.time_step import TimeStep, count_gaps, infer_time_step
from steplab.data.windows import Windows


def long_frame(names=("unique_id", "ds", "y"), **more):
    times = [f"2024-01-0{day}" for day in (1, 2, 3)] * 2
    columns = (["a"] * 3 + ["b"] * 3, times, [1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
    return pd.DataFrame({**dict(zip(names, columns, strict=True)), **more})


def parquet_bytes(table):
    out = io.BytesIO()
    table.to_parquet(out, index=False)
    return out.getvalue()


QUICK = settings(max_examples=150)
PARQUET = parquet_bytes(long_frame())


def save(table, path):
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("names", [("unique_id", "ds", "y"), ("item_id", "timestamp", "target")])
def test_both_formats_and_both_schemes(tmp_path, names, suffix):
    table = long_frame(names).assign(**{names[1]: lambda t: pd.to_datetime(t[names[1]])})
    frame = read_frame(save(table, tmp_path / f"x{suffix}"))
    assert frame.columns == Columns(*names) and frame.ids == ("a", "b") and not frame.notes
    assert frame.time_steps == {"1 day": 2}
    assert [values.tolist() for values in frame.values] == [[1, 2, 3], [10, 20, 30]]
    assert all(values.dtype == np.float64 for values in frame.values)
    days = np.array(["2024-01-01", "2024-01-02", "2024-01-03"], "datetime64[D]")
    assert all((times == days).all() for times in frame.timestamps)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_is_written_is_read_back(tmp_path, suffix):
    table = long_frame(("item_id", "timestamp", "target"))
    table.loc[1, "target"] = np.nan
    first = from_pandas(table)
    write_frame(first, tmp_path / f"x{suffix}")
    second = read_frame(tmp_path / f"x{suffix}")
    assert second.ids == first.ids and second.columns == first.columns
    for a, b in zip(
        first.values + first.timestamps, second.values + second.timestamps, strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert [path.name for path in tmp_path.iterdir()] == [f"x{suffix}"]
    pd.testing.assert_frame_equal(to_pandas(first), to_pandas(second))


def test_rows_in_any_order_give_the_same_series(tmp_path):
    table = long_frame()
    mixed = read_frame(save(table.iloc[[4, 0, 5, 2, 1, 3]], tmp_path / "x.csv"))
    assert mixed.ids == ("b", "a")  # as they first appear
    assert [values.tolist() for values in mixed.values] == [[10, 20, 30], [1, 2, 3]]


def test_a_frame_opens_as_a_set_of_series(tmp_path):
    series = open_series(save(long_frame(price=1.0), tmp_path / "x.csv"))
    assert series.lengths.tolist() == [3, 3] and series.read(1, 1, 3).tolist() == [20, 30]
    assert series.read(0, 0, 1).dtype == np.float32
    assert any("ignored columns: price" in note for note in series.notes)
    assert len(Windows(series, 3, 3)) == 2


def test_ids_are_kept_as_they_are_written(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("unique_id,ds,y\n007,1,1\n007,2,\nNA,1,3\nNA,2,inf\n7,1,5\n")
    frame = read_frame(path)
    assert frame.ids == ("007", "NA", "7")
    assert frame.timestamps[0].dtype == np.int64
    assert np.isnan(frame.values[0][1]) and frame.values[1][1] == np.inf


def test_numbers_stay_numbers_as_ids_in_memory():
    table = long_frame().assign(unique_id=[2, 2, 2, 1, 1, 1])
    assert from_pandas(table).ids == (2, 1)
    assert from_pandas(table.assign(unique_id=table.unique_id.astype("category"))).ids == (2, 1)
    assert to_pandas(from_pandas(table)).unique_id.tolist() == [2, 2, 2, 1, 1, 1]


def test_own_names_of_columns(tmp_path):
    path = save(long_frame(("shop", "day", "sold"), rain=0), tmp_path / "x.csv")
    frame = read_frame(path, Columns("shop", "day", "sold"))
    assert frame.ids == ("a", "b") and "rain" in frame.notes[0]
    with pytest.raises(UserError, match=r"no column 'store'\. Its columns: 'shop', 'day', 'sold'"):
        read_frame(path, Columns("store", "day", "sold"))


def test_missing_rows_are_noted(tmp_path):
    times = pd.date_range("2024-01-01", periods=50, freq="h").delete([20, 21])
    table = pd.DataFrame({"unique_id": "s", "ds": times, "y": 1.0})
    (note,) = read_frame(save(table, tmp_path / "x.csv")).notes
    assert "2 rows are missing in 1 of 1 series (first: 's' after 2024-01-01T19:00)" in note


def test_times_with_a_zone_are_read_as_utc_with_a_note(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(
        "unique_id,ds,y\na,2024-03-31 00:00:00+01:00,1\na,2024-03-31 01:00:00+01:00,2\n"
        "a,2024-03-31 03:00:00+02:00,3\n"
    )
    frame = read_frame(path)
    assert frame.timestamps[0].tolist()[0].isoformat() == "2024-03-30T23:00:00"
    assert infer_time_step(frame.timestamps[0]) == TimeStep(3600 * 10**9, "ns")
    assert any("UTC" in note for note in frame.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("date,HUFL,OT\n2024-01-01,1,2\n", "has the columns 'date', 'HUFL', 'OT', not those of a"),
        ("a\n1\n", "has the columns 'a', not those"),
        ("unique_id,ds,y\n", "has no rows"),
        ("", "is empty"),
        ("\n\n", "is not a valid .csv file"),
        ("unique_id,ds,y\na,2024-01-01,1\na,2024-01-01,2\n", "series 'a' has two points at 2024-"),
        ("unique_id,ds,y\na,1,1\na,1,2\na,1,2\n", "two points at 1 (2 such rows in all)"),
        ("unique_id,ds,y\na,01/02/2024,1\n", "row 1: ds is '01/02/2024', not a time"),
        ("unique_id,ds,y\na,2024-01-01,1\na,,2\n", "row 2: ds is missing, not a time"),
        ("unique_id,ds,y\na,1.5,1\n", "row 1: ds is '1.5', not a time"),
        ("unique_id,ds,y\na,1,1\na,2,many\n", "row 2: y is 'many', not a number"),
        ("unique_id,ds,y\na,1,True\n", "holds true and false"),
        ("unique_id,ds,y\na,1,1,4,5\n", "is not a valid .csv file"),
        ("unique_id,ds,y\na,1,1\na,2,3,5\n", "Expected 3 fields in line 3, saw 4"),
        ("unique_id,ds,y\na,1\n\udcff", "is not a valid .csv file"),
    ],
)
def test_bad_frames_are_one_sentence(tmp_path, text, said):
    path = tmp_path / "x.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as error:
        open_series(path)
    assert said in str(error.value) and "\n" not in str(error.value) and str(path) in str(error)


def test_a_damaged_parquet_file(tmp_path):
    path = save(long_frame(), tmp_path / "x.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"is not a valid \.parquet file"):
        open_series(path)
    with pytest.raises(UserError, match="neither"):
        read_frame(tmp_path / "x.txt")
    with pytest.raises(UserError, match="Cannot write"):
        write_frame(from_pandas(long_frame()), path / "x.csv")


def test_without_pandas_the_extra_is_named(tmp_path, monkeypatch):
    path = save(long_frame(), tmp_path / "x.csv")
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pandas" else known(name)
    )
    monkeypatch.setattr(builtins, "__import__", _without_pandas(builtins.__import__))
    with pytest.raises(Unsupported, match=r"pandas must be installed.*steplab\[frames\]"):
        open_series(path)


def _without_pandas(real):
    def importing(name, *rest, **more):
        if name.split(".")[0] == "pandas":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    return importing


@pytest.mark.parametrize(
    ("freq", "text"),
    [
        ("h", "1 hour"), ("15min", "15 minutes"), ("D", "1 day"), ("2D", "2 days"),
        ("W", "1 week"), ("MS", "1 month"), ("ME", "1 month"), ("QE", "3 months"),
        ("YS", "1 year"), ("B", "1 business day"), ("10ms", "10 milliseconds"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_steps_are_found_with_and_without_gaps(freq, text, unit):
    if freq == "10ms" and unit == "s":
        pytest.skip("seconds hold no milliseconds")
    times = pd.date_range("2023-01-02", periods=40, freq=freq).to_numpy()
    times = times.astype(f"datetime64[{unit}]")
    step = infer_time_step(times)
    assert str(step) == text and count_gaps(times, step) == (0, None)
    gappy = np.delete(times, [3, 4, 30])
    assert str(infer_time_step(gappy)) == text
    assert count_gaps(gappy, step) == (3, times[2])


def test_times_without_a_step():
    assert infer_time_step(np.array([5])) is None
    assert infer_time_step(np.array([0, 3, 7, 12, 20])) is None
    odd = np.array(["2024-01-01", "2024-01-02T07", "2024-01-05", "2024-01-11"], "datetime64[s]")
    assert infer_time_step(odd) is None
    assert str(infer_time_step(np.array([0, 2, 4, 8]))) == "2 steps"
    assert count_gaps(np.array([0, 2, 4, 8]), TimeStep(2, "step")) == (1, 4)


@given(st.binary(max_size=120), st.sampled_from([".csv", ".parquet"]), st.booleans())
@QUICK
def test_any_bytes_open_or_say_why_not(data, suffix, headed):
    use(b"unique_id,ds,y\n" * headed + data, suffix)


CELL = st.sampled_from(
    [
        "a",
        "1",
        "",
        "NA",
        "2024-01-01",
        "2024-01-01T05:00+02:00",
        "1e999",
        "-3.5",
        "true",
        '"',
        "x\ny",
    ]
)


@given(st.lists(st.lists(CELL, min_size=2, max_size=4), max_size=6))
@QUICK
def test_any_cells_open_or_say_why_not(rows):
    lines = ["unique_id,ds,y", *(",".join(row) for row in rows)]
    use("\n".join(lines).encode(), ".csv")


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4))
@QUICK
def test_a_parquet_file_with_other_bytes_opens_or_says_why_not(changes):
    data = bytearray(PARQUET)
    for place, value in changes:
        data[place % len(data)] = value
    use(bytes(data), ".parquet")


def use(data, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x{suffix}")
        path.write_bytes(data)
        try:
            series = open_series(path)
            assert len(series) == len(series.lengths)
        except UserError as error:
            assert str(error) and "\n" not in str(error)
