"""Utilisation: work over (time x dense peak of the dtype that ran)."""

from __future__ import annotations

from steplab import units
from steplab.hardware.catalog import find_card, sparse_peak_owner
from steplab.record.work import Figures, Work


def choose_peak(
    device_name: str, dtype: str, asked_tflops: float | None
) -> tuple[float | None, str, str]:
    """Return (dense TFLOP/s or None, where it comes from, warning).

    A peak given by the user wins, unless it is a card's sparse peak: then half of it, the dense
    peak, is used and the warning says so.
    """
    if asked_tflops is not None:
        owner = sparse_peak_owner(asked_tflops, dtype)
        if owner is None:
            return asked_tflops, "given by the user", ""
        dense = owner.peak(dtype)
        warning = (
            f"{asked_tflops:g} TFLOP/s is the sparse {dtype} peak of the {owner.name}; "
            f"the dense peak {dense:g} is used."
        )
        return dense, f"dense {dtype} peak of the {owner.name}, {owner.source}", warning
    card = find_card(device_name)
    if card is None:
        return None, f"{device_name} is not in the catalog", ""
    if card.peak(dtype) is None:
        return None, f"the {card.name} has no {dtype} matrix units", ""
    return card.peak(dtype), f"dense {dtype} peak of the {card.name}, {card.source}", ""


def utilisation(
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
    return Figures(
        figures.mfu, figures.mfu_palm, figures.hfu, peak, source, f"{warning} {error}".strip()
    )
