"""Sketches: a few thousand numbers that stand for a tensor when distances are asked for.

Gradients of a large model in fp64 fill gigabytes; two processes that compare them need only the
distance. A sketch is linear, so sketch(a) - sketch(b) = sketch(a - b), and the norm of a sketch is
an unbiased estimate of the tensor's (its square, exactly so), off by some per cent.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Numbers kept. Tensors up to this size are kept whole; of larger ones the norm of a difference is
# estimated with a relative deviation of about 1 / sqrt(2 * 4096) = 1.1 %.
SIZE = 4096
_SEED = 20_011


def sketch(tensor: Tensor) -> Tensor:
    """Return at most SIZE numbers in fp64 on the CPU for a tensor of any shape and dtype.

    Larger tensors get random signs, the same in every process on the same device, and are folded
    to SIZE numbers by adding.
    """
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    if flat.numel() <= SIZE:
        return flat.to("cpu", torch.float64, copy=True)
    source = torch.Generator(flat.device).manual_seed(_SEED)
    folded = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    # In pieces: signs and fp64 copies of a large tensor at once would take ten times its memory.
    for piece in flat.split(SIZE * 4096):
        signs = torch.randint(0, 2, piece.shape, generator=source, device=piece.device)
        signed = piece.double() * (2 * signs - 1)
        short = -len(signed) % SIZE
        folded += torch.nn.functional.pad(signed, (0, short)).view(-1, SIZE).sum(0)
    return folded.cpu()


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference of two sketches; infinity where one is not finite."""
    if a.shape != b.shape or not bool((torch.isfinite(a) & torch.isfinite(b)).all()):
        return float("inf")
    return float((a - b).norm())
