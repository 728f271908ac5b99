"""Look up rows of a table, times a number; in the backward each row gets the sum of its gradients.

Every implementation offers `embedding(weight, ids, scale)` and, unless it takes everything,
`refuse(weight, ids)`.
"""

# T ids, V rows of the table, D width
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import AUTO, load_all, select

IMPLS = load_all("embedding")
PREFERENCE = ("triton_sorted", "aten")


def embedding(weight_VD: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale times the rows of `ids`, (*ids.shape, D), in the dtype of the table."""
    impl = select("embedding", IMPLS, PREFERENCE, AUTO, weight_VD, ids)
    found_TD: Tensor = IMPLS[impl].embedding(weight_VD, ids.flatten(), scale)
    return found_TD.unflatten(0, ids.shape)
