"""The precision of matrix products for a while: what a block changes, it puts back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def configure_precision(
    allow_tf32: bool | None = None, allow_bf16_reduced_precision_reduction: bool | None = None
) -> Iterator[None]:
    """Let fp32 products use TF32, or sums of split bf16 products be rounded to bf16; None: as is.

    TF32 keeps 10 bits of each factor. The other setting concerns products whose long axis is split
    over several thread blocks: their partial sums are added in bf16 or in fp32.
    """
    matmul = torch.backends.cuda.matmul
    kept = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    try:
        if allow_tf32 is not None:
            torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = allow_tf32
        if allow_bf16_reduced_precision_reduction is not None:
            matmul.allow_bf16_reduced_precision_reduction = allow_bf16_reduced_precision_reduction
        yield
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cudnn.allow_tf32 = kept[1]
        matmul.allow_bf16_reduced_precision_reduction = kept[2]
