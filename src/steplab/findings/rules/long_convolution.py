"""A long filter is applied by multiplying it with every window of the signal.

What it sees: a convolution in one dimension whose kernel has 512 taps or more; or fixed filters of
one channel that are half as many as their taps or more: the sines and cosines of a spectrogram.
Why it costs: every sample of the result sums as many products as the filter has taps. By Fourier
transforms it is some hundred operations a sample, however long the filter is.
Remedy: `torch.fft.rfft` of signal and filter, padded to the length of both, their product, and
`irfft`; `torchaudio.functional.fftconvolve` does that; `torch.stft` for a spectrogram.
When it is wrong: the convolution takes large steps, so that few samples are computed; the fixed
filters are no sines.
"""

from __future__ import annotations

import math

from steplab.core import Finding, units
from steplab.costs.op_call import Dims, OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Rows

SHARE = 0.05
LEAST_TAPS, LEAST_FRAME = 512, 128
# Of signal, filter and result, each 2.5 n log2(n) operations on real numbers.
TRANSFORMS = 3 * 2.5
SLOWER = 2  # per operation than the sums of a convolution: a transform is bound by memory
OUTPUT_MASK = 10  # which gradients a backward gives: of the input, the weight and the bias
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"


def check(case: Case) -> Finding | None:
    """Compare convolutions with what transforms would take."""
    if case.rows is None:
        return None
    return _long(case, case.rows) or _spectrogram(case, case.rows)


def _long(case: Case, rows: Rows) -> Finding | None:
    """Judge filters that are long."""
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


def _spectrogram(case: Case, rows: Rows) -> Finding | None:
    """Judge fixed filters that are as many as a Fourier transform has frequencies."""
    learned = {_kernel(call) for call in rows.calls if _makes_weight_gradient(call)}
    banks = [call for call in rows.calls if _is_bank(call) and _kernel(call) not in learned]
    if not banks:
        return None
    mask = rows.with_gradients(rows.within(banks.__contains__))
    spent = case.cost_ms(mask)
    filters, _, taps = max(map(_kernel, banks))
    # A transform for each window, in place of a product of all filters with it.
    gain = spent * (1 - min(1.0, SLOWER * TRANSFORMS / 3 * math.log2(taps) / (2 * filters)))
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="long_convolution",
        claim=f"{filters:,} fixed filters of {taps:,} taps are multiplied with every window: "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy="if these are sines and cosines: torch.stft, or torch.fft.rfft of the windows "
        "(signal.unfold(-1, taps, hop))",
        stake_ms=spent,
        why="a Fourier transform gives all frequencies of a window in some operations for each",
        gain_ms=gain,
        work=mask,
    )


def _is_bank(call: OpCall) -> bool:
    if call.name != FORWARD or _taps(call) < LEAST_FRAME:
        return False
    filters, channels, taps = _kernel(call)
    return channels == 1 and filters >= taps / 2


def _makes_weight_gradient(call: OpCall) -> bool:
    return call.name == BACKWARD and call.truths(OUTPUT_MASK)[1:2] != (False,)


def _kernel(call: OpCall) -> Dims:
    kernel = call.tensor(1 if call.name == FORWARD else 2)
    return kernel.dims if kernel is not None else ()


def _taps(call: OpCall) -> int:
    """Return the length of the kernel of a convolution in one dimension; 0 for anything else."""
    if call.name not in (FORWARD, BACKWARD):
        return 0
    kernel = _kernel(call)
    return kernel[2] if len(kernel) == 3 else 0


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
