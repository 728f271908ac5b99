import math

import pytest

from steplab.costs import op_flops

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_pairs_equal_a_count_by_hand(queries, keys, causal):
    """A causal query sees the keys up to its own place, counted from the end."""
    seen = sum(
        1 for q in range(queries) for k in range(keys) if not causal or k <= q + keys - queries
    )
    assert op_flops.attention_pairs(queries, keys, causal) == seen


def test_attention_is_two_products_forward_and_four_or_five_backward():
    pairs, heads, d = 100.0, 3, 8
    product = 2 * pairs * heads * d
    assert op_flops.attention_forward(pairs, heads, d, d) == 2 * product
    assert op_flops.attention_backward(pairs, heads, d, d, recompute=False) == 4 * product
    assert op_flops.attention_backward(pairs, heads, d, d, recompute=True) == 5 * product


def test_others():
    assert op_flops.matmul(2, 3, 4) == 48
    assert op_flops.fft(8, 2, real=False) == 5 * 8 * math.log2(8) * 2
    assert op_flops.fft(8, 2, real=True) == op_flops.fft(8, 2, real=False) / 2
    assert op_flops.scan(7) == 7
