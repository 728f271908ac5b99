"""What products in fp8 save, and what rounding their factors costs, by rates that were measured."""

from __future__ import annotations

import math

from steplab.hardware.catalog import Card

# On an H200, three products of a Linear in fp8 saved 8.2 ns a token at 768 x 3072 (65,536 tokens)
# and 8.1 us in the 336 Linears of gpt xl (1600 x 1600 and 1600 x 6400). Both are what products save
# that reach these shares of the dense peaks, less ROW_SHORTFALL bytes for each input and output of
# a layer: narrow products do not reach them.
BF16_SHARE, FP8_SHARE = 0.7, 0.79
ROW_SHORTFALL = 3.4
# Rounding by torchao in gpt xl took 26 ms with 4,096 tokens and 76 with 16,384: a number of a row
# is read for the largest of its tensor, read again, written, and once more for the product that
# wants it transposed; so is a weight, in the forward and in the backward.
ROW_CASTS, WEIGHT_CASTS = 9.4, 19.4  # bytes
PRODUCTS = 3  # forward, dx and dw
BANDWIDTH_SHARE = 0.85
H200 = (989.4, 1978.9, 4800.0)  # TFLOP/s in bf16 and fp8, GB/s: for cards that are not known


def gain(inputs: int, outputs: int, tokens: int, card: Card | None) -> float:
    """Return the time that fp8 saves in the products of a Linear, over what it costs.

    All but the cast of the weight grows with the tokens of a micro-batch. 0 of these: nobody knows
    how many, and many are assumed. 0 is returned for a card without fp8.
    """
    rates = _rates(card)
    if rates is None:
        return 0.0
    bf16_rate, fp8_rate, bandwidth = rates
    # Each for one token, in ps.
    saved = PRODUCTS * 2 * inputs * outputs * (1 / bf16_rate - 1 / fp8_rate)
    rows = (ROW_SHORTFALL + ROW_CASTS) * (inputs + outputs) / bandwidth * 1e3
    weight = WEIGHT_CASTS * inputs * outputs / bandwidth * 1e3 / (tokens or math.inf)
    return saved / (rows + weight)


def saved_share(card: Card | None) -> float:
    """Return the share of a bf16 product's time that the same product in fp8 saves at best."""
    rates = _rates(card)
    return 1 - rates[0] / rates[1] if rates else 0.0


def _rates(card: Card | None) -> tuple[float, float, float] | None:
    """Return TFLOP/s in bf16 and in fp8, and GB/s; None where the card has no fp8."""
    bf16, fp8, bandwidth = (
        (card.peak("bf16"), card.peak("fp8"), card.bandwidth_gbs) if card else H200
    )
    if not bf16 or not fp8:
        return None
    return BF16_SHARE * bf16, FP8_SHARE * fp8, BANDWIDTH_SHARE * bandwidth
