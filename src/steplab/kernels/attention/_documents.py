"""Documents packed into one sequence: where each one begins and ends.

A document is a run of equal ids. So ids may come in any order, and no order has to be checked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_of(documents_BS: Tensor) -> Tensor:
    """Return (B, S): the running number of the document that each position belongs to."""
    is_new_BS = documents_BS[:, 1:] != documents_BS[:, :-1]
    return torch.nn.functional.pad(is_new_BS.cumsum(1), (1, 0))


def document_bounds(documents_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, S) int32 each: the first position of a position's document, and one past its last.

    Both never decrease along a sequence. No value is read on the host.
    """
    S = documents_BS.shape[1]
    position_S = torch.arange(S, dtype=torch.int32, device=documents_BS.device)
    is_new_BS = torch.nn.functional.pad(
        documents_BS[:, 1:] != documents_BS[:, :-1], (1, 1), value=1
    )
    first_BS = torch.where(is_new_BS[:, :-1], position_S, 0).cummax(1).values
    past_BS = torch.where(is_new_BS[:, 1:], position_S + 1, S).flip(1).cummin(1).values.flip(1)
    return first_BS, past_BS.contiguous()
