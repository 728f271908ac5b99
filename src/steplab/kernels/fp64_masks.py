"""fp32 masks beside fp64 queries, which torch's attention on a CPU misreads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = F.scaled_dot_product_attention  # the gate puts another function in its place


class Fp64Masks(TorchFunctionMode):
    """While it is entered, masks of fp64 attention are fp64 too: added to the scores as written.

    A mask that is made as fp32 stays so when a model is widened, and torch allows that. On a CPU
    without AVX-512 its fused kernel then returns wrong numbers without a word (torch 2.13: relative
    error 1.0 to 1.7 for a causal mask; the unfused one is right).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Widen the mask of an attention whose queries are fp64."""
        options = dict(kwargs or {})
        if func is ATTENTION:
            query = args[0] if args else options["query"]
            if query.dtype == torch.float64:
                args = (*args[:3], *map(_widened, args[3:4]), *args[4:])
                if "attn_mask" in options:
                    options["attn_mask"] = _widened(options["attn_mask"])
        return func(*args, **options)


def _widened(mask: Tensor | None) -> Tensor | None:
    return mask.double() if mask is not None and mask.is_floating_point() else mask
