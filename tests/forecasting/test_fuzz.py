"""Whatever numbers come in: finite forecasts in order, or one sentence; never a warning."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steplab.core.errors import SteplabError
from steplab.forecasting.forecaster import Forecaster
from tests.forecasting.models import model

ANY = st.floats(allow_nan=True, allow_infinity=True)
# The random weights multiply a jump by 3e17 within 47 points, and by about as much in 47 more.
NEAR_OVERFLOW = 1e308 / 1e40
SOME = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, 3.5, float("nan")])


@pytest.fixture(scope="module")
def forecaster():
    return Forecaster(model(quantiles="0.1,0.9"), warn=lambda text: None)


@given(
    st.lists(st.lists(st.one_of(SOME, ANY), max_size=90), min_size=1, max_size=4),
    st.integers(1, 90),
    st.sampled_from(["largest", "next-larger"]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_finite_or_one_sentence(forecaster, series, horizon, head):
    contexts = [np.array(one) for one in series]
    try:
        found = forecaster.predict(contexts, horizon, head=head)
    except SteplabError as error:
        assert "\n" not in str(error)
        unknown = any(not np.isfinite(one[-80:]).any() for one in contexts)
        huge = any(np.nanmax(np.abs(one), initial=0) > NEAR_OVERFLOW for one in contexts)
        assert unknown or huge or "no known point" in str(error)
        return
    assert found.mean_BH.shape == (len(series), horizon)
    assert np.isfinite(found.mean_BH).all() and np.isfinite(found.quantiles_BHQ).all()
    assert (np.diff(found.quantiles_BHQ, axis=-1) >= 0).all()
