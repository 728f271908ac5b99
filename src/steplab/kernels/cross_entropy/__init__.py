"""A linear head and the cross-entropy of its logits, as one op.

Every implementation offers `mean(x, weight, targets, ignore)`, `per_token(...)` with the same
arguments and, unless it takes everything, `refuse(x, weight)`. `reference` holds the logits of all
tokens. The others never do: they go over the tokens in chunks of a fixed size. Their `mean`
computes the gradients of each chunk while its logits are there, so head and loss take three matrix
products, forward and backward together. `per_token` cannot, since the gradient of every token's
loss is known only in the backward: it computes the logits again, in chunks of the vocabulary.
`triton_lean` does so for the mean too, and needs the least memory.

The weight may be in fp32 beside inputs in 16 bits: products then run in the dtype of the inputs,
and the weight's gradient is fp32. Losses are in fp32 or better.

A target equal to `ignore` has the loss 0 and no gradient; `mean` divides by the number of others.
Where all are ignored the mean is NaN, as torch's is, and the gradients are 0.
"""

# T tokens, D width, V vocabulary
from __future__ import annotations

from typing import Literal

from torch import Tensor

from steplab.core.errors import UserError
from steplab.kernels.dispatch import AUTO, load_all, select

Reduction = Literal["mean", "none"]
IGNORE_INDEX = -100  # torch's own default

IMPLS = load_all("cross_entropy")

PREFERENCE = ("triton_chunked", "chunked")  # where the logits are large
# Smaller logits cost a GPU little memory, and would make few chunks: whole they launch less.
LARGE_LOGITS = 256 * 2**20


def choose(impl: str, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> str:
    """Return the implementation to run. `auto` takes chunks on a GPU, where the logits are large.

    On a CPU it is always the reference: memory is plentiful there, and a whole product is faster.
    """
    _check(x_TD, weight_VD, targets_T)
    if impl == AUTO:
        large = x_TD.shape[0] * weight_VD.shape[0] * x_TD.element_size() > LARGE_LOGITS
        if not large or x_TD.device.type != "cuda":
            return "reference"
    return select("cross_entropy", IMPLS, PREFERENCE, impl, x_TD, weight_VD)


def cross_entropy(
    impl: str,
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    reduction: Reduction = "mean",
    ignore: int = IGNORE_INDEX,
) -> Tensor:
    """Return the mean loss, or (T) losses, by exactly the implementation named (not `auto`)."""
    module = IMPLS[impl]
    run = module.mean if reduction == "mean" else module.per_token
    loss: Tensor = run(x_TD, weight_VD, targets_T, ignore)
    return loss


def _check(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> None:
    fits = x_TD.ndim == weight_VD.ndim == 2 and x_TD.shape[1] == weight_VD.shape[1]
    if not fits or targets_T.shape != x_TD.shape[:1] or x_TD.shape[0] == 0:
        raise UserError(
            f"The loss needs inputs (T, D), a weight (V, D) and T targets, not "
            f"{tuple(x_TD.shape)}, {tuple(weight_VD.shape)} and {tuple(targets_T.shape)}.",
            "Flatten batch and time into one axis of at least one token.",
        )
