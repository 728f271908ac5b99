"""How much of a batch is padding, where one of its tensors surely tells.

Others only hint at it: labels with an `ignore_index` leave out prompts too, and a token that is
repeated up to the end of its row may count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# As Hugging Face and torch name them: 1 for a token there, True for padding here.
ATTENTION_MASK, KEY_PADDING_MASK = "attention_mask", "key_padding_mask"
LENGTHS = re.compile(r"(length|len)s?$")


def padding_of(batches: Sequence[Any]) -> tuple[float, str]:
    """Return the share of positions that are padding, and the name of the tensor that tells.

    That is a mask (B, T), or the lengths (B,) of the sequences of another tensor (B, T, ...); 0.0
    and "" where a batch has neither.
    """
    named = [batch for batch in batches if isinstance(batch, Mapping)]
    told = [one for one in map(_told, named) if one is not None]
    if not told:
        return 0.0, ""
    return sum(filled for filled, _, _ in told) / sum(size for _, size, _ in told), told[0][2]


def _told(batch: Mapping[Any, Any]) -> tuple[int, int, str] | None:
    """Return how many positions are padding, of how many, and by which tensor."""
    tensors = {str(key): value for key, value in batch.items() if isinstance(value, Tensor)}
    for name, mask in tensors.items():
        if mask.dim() != 2:
            continue
        if name == ATTENTION_MASK:
            return int((mask == 0).sum()), mask.numel(), name
        if name.endswith(KEY_PADDING_MASK) and mask.dtype == torch.bool:
            return int(mask.sum()), mask.numel(), name
    for name, lengths in tensors.items():
        if LENGTHS.search(name) and lengths.dim() == 1 and not lengths.is_floating_point():
            size = len(lengths) * _padded_to(lengths, tensors.values())
            if size:
                return size - int(lengths.sum()), size, name
    return None


def _padded_to(lengths: Tensor, tensors: Iterable[Tensor]) -> int:
    """Return T of the tensor (B, T, ...) whose sequences have these lengths; 0: not told."""
    longest = int(lengths.max()) if len(lengths) else 0
    shapes = [tensor.shape for tensor in tensors if tensor.dim() > 1]
    widths = {shape[1] for shape in shapes if shape[0] == len(lengths) and shape[1] >= longest}
    if longest in widths:  # padded to the longest of the batch
        return longest
    return widths.pop() if len(widths) == 1 else 0
