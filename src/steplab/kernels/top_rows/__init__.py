"""Select the rows of each sequence that score highest: which they are, and where each row went.

Rows come in the order of their scores, equal ones in the order of the sequence; a NaN counts as the
highest score. Nothing here has a gradient.

Every implementation offers `top_rows(score, taken)` and, unless it takes everything,
`refuse(score)`.
"""

# B batch, S rows of a sequence, K rows taken
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import AUTO, load_all, select
from steplab.kernels.stream_norm import RowSelection

IMPLS = load_all("top_rows")
PREFERENCE = ("triton_rank", "reference")


def top_rows(score_BS: Tensor, taken: int) -> tuple[RowSelection, Tensor]:
    """Return the selection of the `taken` highest scores of each sequence, and the lowest (B)."""
    impl = select("top_rows", IMPLS, PREFERENCE, AUTO, score_BS)
    rows_BK, slots_BS, least_B = IMPLS[impl].top_rows(score_BS.detach(), taken)
    return RowSelection(rows_BK, slots_BS), least_B
