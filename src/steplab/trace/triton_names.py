"""Inductor's kernels tell in their names what was fused: triton_red_fused_add_mean_rsqrt_3.

poi: pointwise, red and per: reductions, tem: a template (matrix product, attention), for: many
small tensors at once, as optimizers have them. The same for cpp_fused_... on a CPU.
"""

from __future__ import annotations

import re

_NAME = re.compile(r"(?:triton_(?P<kind>poi|red|per|tem|mm|for|spl)|cpp)_fused_(?P<ops>\w*?)_?\d*")
_MOVES = frozenset(
    "clone copy to view transpose permute t cat stack expand slice split unsqueeze squeeze select "
    "constant pad nd reshape unsafe as strided contiguous".split()
)
# The first that is found decides.
_INSIDE = (
    (r"layer_norm|rms_norm|group_norm|batch_norm", "normalisation"),
    (r"softmax|logsumexp|nll_loss|cross_entropy", "softmax"),
    (r"embedding", "embedding"),
    (r"sort|topk|scatter|gather|index_put|index_add|nonzero", "sort and index"),
)


def category_of_triton(kernel: str) -> str | None:
    """Return the category of an Inductor kernel; "matmul " for a product; None: not Inductor's."""
    parts = _NAME.fullmatch(kernel)
    if parts is None:
        return None
    kind, ops = parts["kind"], parts["ops"]
    if kind in ("tem", "mm"):
        return "attention triton" if re.search("attention", ops) else "matmul "
    if kind == "for":
        return "optimizer"
    for pattern, category in _INSIDE:
        if re.search(pattern, ops):
            return category
    if kind in ("red", "per", "spl"):
        # A mean of squares under a root is a norm that was written out.
        return "normalisation" if "rsqrt" in ops else "reduction"
    words = {word for word in ops.split("_") if word}
    return "copy" if words and words <= _MOVES else "elementwise"
