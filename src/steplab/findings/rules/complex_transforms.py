"""Fourier transforms of real numbers as if they were complex.

What it sees: `fft` of real tensors, and an `ifft` of which the real part is taken, and everything
that is done with complex numbers between them, forward and backward.
Why it costs: the spectrum of real numbers says everything twice; it is transformed, multiplied and
kept whole.
Remedy: `torch.fft.rfft` and `irfft`.
When it is wrong: the spectrum is multiplied by weights that are not the same for a frequency and
its opposite; then half of it says something else.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.05
SAVED = 0.5  # half of the frequencies
FORWARD = ("aten::fft_fft", "aten::fft_fft2", "aten::fft_fftn")
BACK = ("aten::fft_ifft", "aten::fft_ifft2", "aten::fft_ifftn")
REAL_PART = ("aten::real", "aten::view_as_real")


def check(case: Case) -> Finding | None:
    """Add up the work on complex numbers that come from real ones and become real again."""
    rows = case.rows
    if rows is None:
        return None
    names = {call.name for call in rows.calls}
    transforms = rows.within(lambda call: call.name in FORWARD and not _is_complex(call))
    if not transforms.any() or names.isdisjoint(BACK) or names.isdisjoint(REAL_PART):
        return None
    back = rows.within(lambda call: call.name in BACK)
    mask = rows.with_gradients(transforms | back | rows.called(_is_complex))
    spent = case.cost_ms(mask)
    if not SAVED * spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="complex_transforms",
        claim="real numbers are transformed as complex ones: "
        f"{units.milliseconds(spent)} a step on whole spectra",
        evidence=(*rows.hot_lines(transforms, 2), *rows.hot_lines(mask & ~transforms)),
        remedy="torch.fft.rfft and torch.fft.irfft(..., n=length), which keep half of the spectrum",
        stake_ms=spent,
        why="the other half of a real signal's spectrum is its mirror image",
        gain_ms=SAVED * spent,
        work=mask,
    )


def _is_complex(call: OpCall) -> bool:
    return any(tensor and tensor.dtype.startswith("c10::complex") for tensor in call.tensors)


RULE = check
