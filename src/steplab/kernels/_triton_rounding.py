"""How a kernel rounds what it stores."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return fp32 `x` rounded to `dtype`, to nearest even.

    UPCAST: Triton's interpreter cuts to bf16 instead of rounding, so the bits are rounded first.
    """
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
