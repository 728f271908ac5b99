from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from steplab.trace.reading.decode import NO_TIME, nanoseconds

DECIMALS = st.integers(-(10**18), 10**18).map(lambda ns: str(Decimal(ns) / 1000))
WHOLE = st.integers(-(10**15), 10**15).map(str)
EXPONENTS = st.floats(-1e12, 1e12, allow_nan=False).map(repr)


@given(st.lists(DECIMALS, max_size=5) | st.lists(WHOLE) | st.lists(DECIMALS | WHOLE | EXPONENTS))
def test_exactly_what_the_text_says(texts: list[str]) -> None:
    read = nanoseconds([Raw(text.encode()) for text in texts])
    assert read.tolist() == [round(Decimal(text) * 1000) for text in texts]


@pytest.mark.parametrize("text", ["null", "true", '"soon"', "[]", "1e400", "99999999999999999999"])
def test_what_is_no_time(text: str) -> None:
    assert nanoseconds([Raw(b"1.5"), Raw(text.encode())]).tolist() == [1500, NO_TIME]
    assert nanoseconds([Raw(text.encode())]).tolist() == [NO_TIME]
