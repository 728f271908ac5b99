"""The precision that a layer computes in: by autocast, in fp32 always, or by torch's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype a matrix product of `x` runs in: autocast's where it is on.

    As in torch, autocast leaves fp64 alone.
    """
    if not _autocasts(x) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on the device of `x`, for a caller that casts by itself."""
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def _autocasts(x: Tensor) -> bool:
    # Autocast does not know the device of meta tensors.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


class Fp32Module(nn.Module):
    """A module whose parameters and buffers stay in fp32 when a model is cast to 16 bits."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return x.to(moved.device)  # not cast back from `moved`, which has been rounded
            return moved

        return super()._apply(keep, recurse)


def batch_norm_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights and biases of all modules that keep running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return {parameter for norm in norms for parameter in norm.parameters(recurse=False)}


@contextlib.contextmanager
def configure_precision(
    allow_tf32: bool | None = None, allow_bf16_reduced_precision_reduction: bool | None = None
) -> Iterator[None]:
    """Let fp32 products use TF32, or partial sums of bf16 products be rounded; None: as it is.

    TF32 keeps 10 bits of each factor. The other setting concerns products whose long axis is split
    over several thread blocks: their partial sums are added in bf16 or in fp32. On leaving, both
    are as they were. What is None is not even read: torch refuses to return a setting that was made
    by its newer names.
    """
    with contextlib.ExitStack() as stack:
        if allow_tf32 is not None:
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(_allow_tf32_in_cudnn, torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
            _allow_tf32_in_cudnn(allow_tf32)
        if allow_bf16_reduced_precision_reduction is not None:
            stack.callback(round_bf16_sums, *_reductions())
            round_bf16_sums(allow_bf16_reduced_precision_reduction)
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


def round_bf16_sums(may_round: bool, may_split: bool = True) -> None:
    """Let cuBLAS add the partial sums of split bf16 products in bf16, and split them at all."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (may_round, may_split)
