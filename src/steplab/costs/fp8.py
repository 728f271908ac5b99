"""What products in fp8 save, and what rounding their factors costs, by rates that were measured."""

from __future__ import annotations

from steplab.hardware.catalog import Card

# Shares of the dense peaks that products of a width of 768 to 3,072 reach on an H200: 714 of 989
# TFLOP/s in bf16, 1,130 to 1,230 of 1,979 in fp8.
BF16_SHARE, FP8_SHARE = 0.72, 0.6
BANDWIDTH_SHARE = 0.85
H200 = (989.4, 1978.9, 4800.0)  # TFLOP/s in bf16 and fp8, GB/s: for cards that are not known


# torchao's Linear: forward, dx and dw. A number is read for the largest of its tensor, read again
# and written, and once more for the product that wants it transposed. Measured: 66.8 ms for the
# inputs, outputs and gradients of the 336 Linears of gpt xl at 16,384 tokens, which is 9.4 bytes
# for each input and output of a layer at the bandwidth above.
PRODUCTS, CAST_BYTES = 3, 9.4


def gain(inputs: int, outputs: int, card: Card | None) -> float:
    """Return the time that fp8 saves in the products of a Linear, over that of its casts.

    Both grow with the rows, so these do not matter; the cast of the weight is left out. 0 for a
    card without fp8.
    """
    rates = _rates(card)
    if rates is None:
        return 0.0
    bf16_rate, fp8_rate, bandwidth = rates
    saved = 1 / bf16_rate - 1 / fp8_rate  # ps per FLOP
    products = PRODUCTS * 2 * inputs * outputs * saved * 1e-12
    casts = CAST_BYTES * (inputs + outputs) / (bandwidth * 1e9)
    return products / casts


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
