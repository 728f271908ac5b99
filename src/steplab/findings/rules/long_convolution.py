"""A long filter is applied by multiplying it with every window of the signal.

What it sees: a convolution in one dimension whose kernel has 512 taps or more.
Why it costs: every sample of the result sums as many products as the filter has taps. By Fourier
transforms it is some hundred operations a sample, however long the filter is.
Remedy: `torch.fft.rfft` of signal and filter, padded to the length of both, their product, and
`irfft`; `torchaudio.functional.fftconvolve` does that.
When it is wrong: the convolution takes large steps, so that few samples are computed.
"""

from __future__ import annotations

import math

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.05
LEAST_TAPS = 512
# Of signal, filter and result, each 2.5 n log2(n) operations on real numbers.
TRANSFORMS = 3 * 2.5
SLOWER = 2  # per operation than the sums of a convolution: a transform is bound by memory
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"


def check(case: Case) -> Finding | None:
    """Compare long convolutions with what transforms would take."""
    rows = case.rows
    if rows is None:
        return None
    long = [call for call in rows.calls if _taps(call) >= LEAST_TAPS]
    forward = [call for call in long if call.name == FORWARD]
    if not forward:
        return None
    mask = rows.with_gradients(rows.within(long.__contains__))
    spent = case.cost_ms(mask)
    gain = spent * (1 - max(map(_by_transforms, forward)))
    if not gain > SHARE * case.step_ms:
        return None
    taps = max(map(_taps, forward))
    return Claim(
        rule="long_convolution",
        claim=f"a filter of {taps:,} taps is multiplied with every window: "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="convolve by Fourier transforms: torch.fft.rfft of signal and filter, padded to the "
        "length of both, their product, and torch.fft.irfft (torchaudio.functional.fftconvolve)",
        stake_ms=spent,
        why="each sample sums as many products as there are taps; transforms take some hundred "
        "operations",
        gain_ms=gain,
        work=mask,
    )


def _taps(call: OpCall) -> int:
    """Return the length of the kernel of a convolution in one dimension; 0 for anything else."""
    if call.name not in (FORWARD, BACKWARD):
        return 0
    kernel = call.tensor(1 if call.name == FORWARD else 2)
    return kernel.dims[2] if kernel is not None and len(kernel.dims) == 3 else 0


def _by_transforms(call: OpCall) -> float:
    """Return the time by transforms over that of a convolution, at most 1, for one channel."""
    signal, taps, steps = call.tensor(0), _taps(call), call.integers(3) or (1,)
    if signal is None or not signal.dims or not steps[0]:
        return 1.0
    samples = max(1, (signal.dims[-1] - taps) // steps[0] + 1)
    points = signal.dims[-1] + taps
    by_transforms = SLOWER * TRANSFORMS * points * math.log2(points)
    return min(1.0, by_transforms / (2 * samples * taps))


RULE = check
