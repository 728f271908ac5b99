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
    over several thread blocks: their partial sums are added in bf16 or in fp32. What is None is not
    even read: torch refuses to tell a setting that was made by its newer names.
    """
    with contextlib.ExitStack() as stack:
        if allow_tf32 is not None:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(_allow_tf32_in_cudnn, torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
            _allow_tf32_in_cudnn(allow_tf32)
        if allow_bf16_reduced_precision_reduction is not None:
            stack.callback(_set_reductions, *_reductions())
            _set_reductions(allow_bf16_reduced_precision_reduction)
        yield


def _allow_tf32_in_cudnn(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


def _reductions() -> tuple[bool, bool]:
    """Return whether bf16 products may round partial sums, and whether they may be split at all."""
    matmul = torch.backends.cuda.matmul
    return (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )


def _set_reductions(may_round: bool, may_split: bool = True) -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (may_round, may_split)
