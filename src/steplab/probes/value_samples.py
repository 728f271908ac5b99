"""What a tensor holds, by a few thousand of its elements: zeros, masked scores, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

SAMPLED = 4096  # elements
SAMPLED_ROWS = 256
EMPTY_ROWS = 0.6  # of the rows; a capacity of twice the fair share leaves half of them empty
LEAST_CHOICES = 64  # of a torch.where: a few samples may all be of one kind by chance
LEAST_SCORES = 256  # queries and keys of an attention whose mask is worth a look
MASKED_SCORE = -1e4  # and below; fp16 ends at -6.5e4, bf16 and fp32 are masked with -1e9 or -inf
SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax")
MASKS = ("attn_mask", "attn_bias")
# The layers that take frames, and which of their arguments these are.
CONVOLUTION = "aten::convolution"
FRAME_LAYERS = {
    "aten::addmm": 1,
    "aten::mm": 0,
    CONVOLUTION: 0,
    "aten::_cudnn_rnn": 0,
    "aten::mkldnn_rnn_layer": 0,
}
LEAST_FRAMES, LEAST_MELS, LEAST_RUN = 64, 8, 4
LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")


def zero_shares(tensor: Tensor) -> tuple[float, float]:
    """Return the share of zeros, and that of rows or columns of zeros, at random places."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        places = _places(tensor)
        zeros = float((tensor[places] == 0).float().mean())
        if zeros < EMPTY_ROWS:
            return zeros, 0.0
        *batch, row, column = (place[:SAMPLED_ROWS] for place in places)
        rows = (tensor[(*batch, row)] == 0).all(-1)
        columns = (tensor.transpose(-2, -1)[(*batch, column)] == 0).all(-1)
        return zeros, max(float(rows.float().mean()), float(columns.float().mean()))


def masked_share(func: OpOverload, args: Any, kwargs: Any) -> float:
    """Return the share of the scores of an attention that its mask leaves out; 0 if it has none.

    A fused attention is given the mask, a softmax the scores behind it.
    """
    scores = args[0] if func._schema.name in SOFTMAXES else _mask_of(func, args, kwargs)
    if scores is None or scores.dim() < 2 or min(scores.shape[-2:]) < LEAST_SCORES:
        return 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        sample = scores[_places(scores)]
        masked = ~sample if sample.dtype == torch.bool else sample <= MASKED_SCORE
        return float(masked.float().mean())


def hides_keys_to_come(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a fused attention's mask hides the keys behind each query, and nothing else.

    By samples, and by both sides of the diagonal.
    """
    mask = _mask_of(func, args, kwargs)
    if mask is None or mask.dim() < 2 or mask.shape[-2] != mask.shape[-1]:
        return False
    if mask.shape[-1] < LEAST_SCORES:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        *batch, query, key = _places(mask)
        for other in (key, query, (query + 1) % mask.shape[-1]):
            sample, later = mask[(*batch, query, other)], other > query
            hidden = ~sample if sample.dtype == torch.bool else sample <= MASKED_SCORE
            shown = sample if sample.dtype == torch.bool else sample == 0
            if not bool(torch.where(later, hidden, shown).all()):
                return False
    return True


def ignored_share(name: str, args: Any) -> float:
    """Return the share of the class numbers that a loss is told to ignore; 0 for what is none."""
    if name not in LOSSES:
        return 0.0
    targets, ignored = args[1], args[4]
    if targets.numel() < LEAST_CHOICES:
        return 0.0
    with torch.no_grad():
        return float((targets == ignored).float().mean())


def untaken_input(func: OpOverload, args: Any) -> Tensor | None:
    """Return the input of a torch.where of which it takes no element; None: it takes of both."""
    if func._schema.name != "aten::where" or len(args) != 3:
        return None
    condition, chosen, other = args
    if condition.numel() < LEAST_CHOICES:
        return None
    with torch.no_grad():
        untaken = other if bool(condition.all()) else chosen if not bool(condition.any()) else None
    return untaken if isinstance(untaken, Tensor) else None


def padded_share(ids_BT: Tensor) -> float:
    """Return the share of tokens that repeat the last one of their row up to its end."""
    repeated = (ids_BT == ids_BT[:, -1:]).flip(1).cumprod(1)[:, 1:]
    return float(repeated.float().mean())


def empty_frames(name: str, args: Any) -> float:
    """Return the share of the rows of data that a layer takes and that are padding: zeros in runs.

    Of what depends on no weight, in a forward pass; rows here and there that are zero are masked.
    """
    place = FRAME_LAYERS.get(name)
    x = args[place] if place is not None else None
    if x is None or x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
        return 0.0
    if torch._C._current_autograd_node() is not None:
        return 0.0
    if name == CONVOLUTION:
        if x.dim() != 3:  # pictures may well have a black border
            return 0.0
        x = x.mT
    if x.numel() < LEAST_FRAMES * LEAST_MELS or x.shape[-1] < LEAST_MELS:
        return 0.0
    with torch.no_grad():
        empty = ~x.any(-1)  # (N,), (B, T) or (T, B)
        rows, runs = int(empty.sum()), max(map(_runs, (empty, empty.movedim(0, -1))))
    # A recurrent layer begins with a state of zeros, and with nothing else.
    is_padding = runs * LEAST_RUN <= rows < empty.numel()
    return rows / empty.numel() if is_padding else 0.0


def _runs(empty: Tensor) -> int:
    """Return how often True begins, going through all in order."""
    flat = empty.reshape(-1)
    return int((flat[1:] & ~flat[:-1]).sum()) + int(flat[0])


Sampled = tuple[Tensor, tuple[Tensor, ...], Tensor]  # of what, where, and what was there


def samples(tensors: Sequence[Tensor]) -> list[Sampled]:
    """Return what is at random places of some tensors."""
    if not tensors:  # of nearly all operators: keeping the generators' state takes longer than they
        return []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return [(one, places := _places(one), one[places]) for one in tensors]


def unmoved_share(before: list[Sampled]) -> float:
    """Return the share of the elements that are in tensors of which no sampled one has changed."""
    with torch.no_grad():
        stay = [bool((one[places] == was).all()) for one, places, was in before]
    sizes = [one.numel() for one, _, _ in before]
    return sum(n for n, same in zip(sizes, stay, strict=True) if same) / max(sum(sizes), 1)


def _mask_of(func: OpOverload, args: Any, kwargs: Any) -> Tensor | None:
    if "scaled_dot_product" not in func._schema.name or "backward" in func._schema.name:
        return None
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in MASKS:
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            return given if isinstance(given, Tensor) else None
    return None


def _places(tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.randint(size, (SAMPLED,)).to(tensor.device) for size in tensor.shape)
