"""MFU and HFU: work over (time x dense peak of the dtype that ran)."""

from __future__ import annotations

from dataclasses import replace

from steplab.core import Figures, Work, units
from steplab.hardware.catalog import Card, find_card, sparse_peak_owner, tensor_peak_name


def choose_peak(
    device_name: str, dtype: str, asked_tflops: float | None
) -> tuple[float | None, str, str]:
    """Return (dense TFLOP/s or None, where it comes from, warning).

    A peak given by the user wins, unless it is a card's sparse peak: then half of it, the dense
    peak, is used and the warning says so. A tensor-core peak given for fp32 is used as asked,
    with a warning.
    """
    card = find_card(device_name)
    if asked_tflops is not None:
        return _asked_peak(asked_tflops, dtype, card)
    if card is None:
        return None, f"{device_name} is not in the catalog", ""
    if card.peak(dtype) is None:
        return None, f"the {card.name} has no {dtype} matrix units", ""
    return card.peak(dtype), f"dense {dtype} peak of the {card.name}, {card.provenance(dtype)}", ""


def _asked_peak(tflops: float, dtype: str, present: Card | None) -> tuple[float | None, str, str]:
    owner = sparse_peak_owner(tflops, dtype, present)
    if owner is not None:
        dense = owner.peak(dtype)
        warning = (
            f"{tflops:g} TFLOP/s is the sparse {dtype} peak of the {owner.name}; "
            f"the dense peak {dense:g} is used."
        )
        return dense, f"dense {dtype} peak of the {owner.name}, {owner.provenance(dtype)}", warning
    other = tensor_peak_name(tflops, present) if dtype == "fp32" else ""
    warning = f"{tflops:g} TFLOP/s is the {other}, but the products ran in fp32." if other else ""
    return tflops, "given by the user", warning


def utilization(
    work: Work, step_ms: float, device_name: str, dtype: str, asked_tflops: float | None = None
) -> Figures:
    """Return MFU, PaLM MFU and HFU as fractions. Above 100 % is marked as a measurement error."""
    peak, source, warning = choose_peak(device_name, dtype, asked_tflops)

    def share(flops: float | None) -> float | None:
        if flops is None or peak is None or not step_ms > 0:
            return None
        return flops / (step_ms * 1e-3 * peak * 1e12)

    figures = Figures(
        mfu=share(work.model),
        mfu_palm=share(work.palm),
        hfu=share(work.hardware),
        peak_tflops=peak,
        peak_source=source,
        warning=warning,
    )
    impossible = [v for v in (figures.mfu, figures.hfu) if v is not None and v > 1]
    if not impossible:
        return figures
    error = (
        f"measurement error: {units.percent(max(impossible))} of the peak is not possible; "
        "the peak, the dtype or the FLOP count is wrong."
    )
    return replace(figures, warning=f"{warning} {error}".strip())
