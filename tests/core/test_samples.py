import numpy as np
import pytest

from steplab.core import Samples

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

values = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50).map(tuple)


@given(values, st.floats(0, 100))
def test_views_equal_numpy(numbers, q):
    samples = Samples(numbers, "ms")
    assert samples.median == np.quantile(numbers, 0.5, method="lower")
    assert samples.percentile(q) == pytest.approx(np.percentile(numbers, q))
    assert samples.mean == pytest.approx(np.mean(numbers))
    if len(numbers) > 1:
        assert samples.std == pytest.approx(np.std(numbers, ddof=1), rel=1e-6, abs=1e-9)


def test_slow_values_are_marked_and_none_is_dropped():
    samples = Samples((10.0, 10.1, 9.9, 10.0, 10.2, 31.0), "ms")
    assert samples.slow_indices() == (5,)
    assert len(samples) == 6


def test_equal_values_have_no_outlier():
    assert Samples((5.0,) * 10, "ms").slow_indices() == ()


def test_no_values_is_nan_not_a_crash():
    empty = Samples((), "ms")
    assert np.isnan(empty.median) and np.isnan(empty.percentile(50)) and np.isnan(empty.spread)
