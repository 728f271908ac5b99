"""Linear head and cross-entropy: hidden states, the head's weight and targets in, loss out."""

# T tokens (of the whole batch), D width, V vocabulary
from __future__ import annotations

from torch import Tensor, nn

from steplab.kernels import cross_entropy as cross_entropy_op
from steplab.kernels.cross_entropy import IGNORE_INDEX, Reduction
from steplab.kernels.dispatch import AUTO
from steplab.modules.precision import matmul_dtype, without_autocast


class LinearCrossEntropy(nn.Module):
    """Cross-entropy of `x weight^T`; the weight is the head's (or the embedding's), not its own.

    `reduction` "mean" gives a scalar, "none" a loss for every token. Targets equal to `ignore` are
    left out.
    """

    op = "cross_entropy"

    def __init__(self, reduction: Reduction = "mean", ignore: int = IGNORE_INDEX) -> None:
        super().__init__()
        self.reduction: Reduction = reduction
        self.ignore = ignore
        self.impl = AUTO
        self.ran = ""

    def forward(self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss, or one per token in the shape of `targets_BT`, in fp32 or better.

        There may be any number of leading axes. Under autocast the products run in its dtype.
        """
        x_TD, targets_T = x_BTD.flatten(0, -2).to(matmul_dtype(x_BTD)), targets_BT.flatten()
        self.ran = cross_entropy_op.choose(self.impl, x_TD, weight_VD, targets_T)
        # The weight is cast inside the op, so that a gradient summed in fp32 stays in fp32.
        with without_autocast(x_TD):
            loss = cross_entropy_op.cross_entropy(
                self.ran, x_TD, weight_VD, targets_T, self.reduction, self.ignore
            )
        return loss if self.reduction == "mean" else loss.view(targets_BT.shape)
