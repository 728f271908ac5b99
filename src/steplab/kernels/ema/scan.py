"""ComplexEMA as a scan in Triton: any length, states in fp32, coefficients from fp64."""

# B batch, L steps of time, D channels, N modes of each
from __future__ import annotations

from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_batch, refuse_device
from steplab.kernels.ema import _scan_op
from steplab.kernels.ema._parameters import Parameters

MOST_MODES = 32  # twice as many would spill their states from registers at every step
NEEDS_GPU = True


def refuse(x_BLD: Tensor, parameters: Parameters) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_BLD) or refuse_batch(x_BLD)
    if reason:
        return reason
    if x_BLD.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {x_BLD.dtype}"
    if parameters.alpha_DN.shape[1] > MOST_MODES:
        return f"needs at most {MOST_MODES} modes, not {parameters.alpha_DN.shape[1]}"
    return ""


ema = _scan_op.run
