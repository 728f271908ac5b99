import pytest

from steplab.core import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.milliseconds, 0.0123, "12.30 us"),
        (units.milliseconds, 12.3456, "12.35 ms"),
        (units.milliseconds, 1500, "1.500 s"),
        (units.milliseconds, 120_000, "2.000 min"),
        (units.milliseconds, None, "unknown"),
        (units.bytes_, 6.25 * 2**20, "6.25 MiB"),
        (units.bytes_, 12, "12 B"),
        (units.count, 538_130_793, "538,130,793"),
        (units.flops, 1.4166e9, "1.417 GFLOP"),
        (units.percent, 0.374, "37.4 %"),
        (units.percent, None, "unknown"),
        (units.ratio, 1.49, "1.49x"),
    ],
)
def test_text(function, value, text):
    assert function(value) == text


def test_one_is_not_plural():
    assert units.counted(1, "Run") == "1 Run"
    assert units.counted(0, "Run") == "0 Runs" and units.counted(1200, "Run") == "1,200 Runs"


@pytest.mark.parametrize(
    ("word", "size"),
    [("8GiB", 8 * 2**30), ("500MB", 5e8), ("1.5e9", 1.5e9), ("2g", 2e9), ("4 KiB", 4096)],
)
def test_a_number_of_bytes_is_read(word, size):
    assert units.read_bytes_count(word) == size


@pytest.mark.parametrize("word", ["", "GiB", "-1", "nan", "1e99", "4QB", "1.2.3", "0"])
def test_what_is_no_number_of_bytes_is_refused(word):
    with pytest.raises(ValueError):
        units.read_bytes_count(word)
