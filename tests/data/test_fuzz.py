"""Random damage: a set opens and reads, or says in a UserError why not."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.formats.time300b import write_time300b
from steplab.data.loader import Loader
from steplab.data.windows import Windows

from .stubs import write_raw

QUICK = settings(max_examples=150)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANY_JSON = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["sequence", "offset", "length", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def use(path: Path) -> None:
    """Do with a path all that training does."""
    try:
        series = open_series(path)
        for mode in ("series", "max", "none"):
            windows = Windows(series, 4, 3, mode)
            for index in {0, len(windows) // 2, len(windows) - 1}:
                values, mask = windows.read(index)
                assert np.isfinite(values).all() and mask.sum() >= 2 and not values[~mask].any()
    except UserError as error:
        assert str(error) and "\n" not in error.message


@given(ANY_JSON, st.sampled_from([".json", ".jsonl"]))
@QUICK
def test_any_json(data, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x{suffix}")
        path.write_text(json.dumps(data))
        use(path)


@given(st.binary(max_size=200), st.sampled_from([".json", ".jsonl", ".npy", ".npz"]))
@QUICK
def test_any_bytes(data, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"x{suffix}")
        path.write_bytes(data)
        use(path)


@given(
    st.sampled_from(["x.npy", "x.npz"]),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
    st.integers(0, 600),
)
@QUICK
def test_damaged_arrays(name, changes, kept):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        np.save(path, np.arange(40.0)) if name == "x.npy" else np.savez(path, a=np.arange(9.0))
        data = bytearray(path.read_bytes())
        for position, value in changes:
            data[position % len(data)] = value
        path.write_bytes(data[:kept] if kept < 300 else data)
        use(path)


@given(
    st.dictionaries(
        st.sampled_from(["num_sequences", "dtype", "files", "scales"]), ANY_JSON, max_size=2
    )
)
@QUICK
def test_any_meta(changes):
    parts = {"data-1-of-1.bin": np.arange(10, dtype=np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        use(write_raw(Path(folder), parts, [{"offset": 0, "length": 10}], **changes))


@given(
    st.lists(st.tuples(st.integers(-3, 40), st.integers(-3, 40)), max_size=5),
    st.sampled_from(["float32", "float64", "int16", "float16"]),
    st.integers(0, 100),
)
@example([(0, 20)], "float32", 79)
@QUICK
def test_any_offsets_lengths_and_file_sizes(places, dtype, kept):
    parts = {"data-1-of-1.bin": np.arange(20, dtype=np.float32)}
    scales = [{"offset": offset, "length": length} for offset, length in places]
    with tempfile.TemporaryDirectory() as folder:
        path = write_raw(Path(folder), parts, scales, dtype=dtype) / "data-1-of-1.bin"
        path.write_bytes(path.read_bytes()[:kept])
        use(Path(folder))


@given(st.lists(st.lists(st.floats(width=32), max_size=30), min_size=1, max_size=6))
@QUICK
def test_any_floats_train(series):
    with tempfile.TemporaryDirectory() as folder:
        write_time300b(Path(folder, "set"), series, 16)
        use(Path(folder))
        try:
            windows = Windows(open_series(Path(folder)), 5, 2)
            with Loader(windows, 1, 0, "cpu") as loader:
                for _ in range(3):
                    values_BT, mask_BT = next(loader)
                    assert values_BT.isfinite().all() and mask_BT.sum() >= 2
        except UserError as error:
            assert "2 points" in str(error) or "2 finite points" in str(error)
