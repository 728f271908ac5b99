"""A tensor times a number that lies on the device, by whole cache lines.

torch's product of bf16 and fp32 has no such accesses: 0.22 ms for gradients of 50,257 x 768 and
16,384 x 768 on an H200, where memory needs 0.05.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels._triton_rounding import narrow

BLOCK = 1024 if INTERPRETED else 4096


@triton.jit
def scaled_kernel(x, factor, out, numel, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Write x times the one element of `factor`, multiplied in fp32."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + index, mask=index < numel).to(tl.float32) * tl.load(factor)
    tl.store(out + index, narrow(product, out.dtype.element_ty, UPCAST), mask=index < numel)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return a contiguous `x` times a scalar tensor in fp32, in the dtype of `x`."""
    out = torch.empty_like(x)
    with on_device_of(x):
        scaled_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            *(x, factor, out, x.numel()), BLOCK=BLOCK, UPCAST=INTERPRETED, num_warps=8
        )
    return out
