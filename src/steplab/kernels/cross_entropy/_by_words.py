"""The backward of losses per token, one chunk of the vocabulary at a time.

The norm of every token's softmax is known by then, so logits can be computed again for some words
and all tokens. The weight's gradient for these words is one product, and is complete; only that of
the inputs is added up, and is narrow.
"""

# T tokens, C words of one chunk, D width, V vocabulary
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steplab.kernels.cross_entropy._products import add_product, round_up, wide

# At most so many: 42 MB of logits at 16,384 tokens by 50,257 words, less than an H200's cache.
CHUNKS = 40
LEAST_BYTES, MOST_BYTES = 32 * 2**20, 256 * 2**20
WHOLE_WORDS = 128  # of a tile of a product

# (logits_TC, first word): turn logits into their gradients, in place
Gradient = Callable[[Tensor, int], None]


def chunk_words(vocabulary: int, column_bytes: int) -> int:
    """Return the words of one chunk, the logits of each of which take `column_bytes`."""
    wished = round_up(max(-(-vocabulary // CHUNKS), LEAST_BYTES // column_bytes), WHOLE_WORDS)
    fitting = max(WHOLE_WORDS, MOST_BYTES // column_bytes // WHOLE_WORDS * WHOLE_WORDS)
    return min(wished, fitting, round_up(vocabulary, WHOLE_WORDS))


def gradients(
    gradient: Gradient, x_TD: Tensor, weight_VD: Tensor, need_dx: bool, need_dw: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dw in the dtypes of x and weight; empty where not needed."""
    (T, D), V, sums = x_TD.shape, weight_VD.shape[0], wide(x_TD.dtype)
    narrow_VD = weight_VD.to(x_TD.dtype)
    words = chunk_words(V, T * x_TD.element_size())
    buffer_TC = x_TD.new_empty(T, words)
    dx_TD = x_TD.new_empty(x_TD.shape if need_dx else 0, dtype=sums)
    dw_VD = weight_VD.new_empty(weight_VD.shape if need_dw else 0)
    dw_CD = x_TD.new_empty((words, D) if need_dw else 0, dtype=sums)
    for first in range(0, V, words):
        chunk = slice(first, min(first + words, V))
        logits_TC = buffer_TC[:, : chunk.stop - first]
        torch.mm(x_TD, narrow_VD[chunk].T, out=logits_TC)
        gradient(logits_TC, first)
        if need_dx:
            add_product(dx_TD, logits_TC, narrow_VD[chunk], first == 0)
        if need_dw:
            # cuBLAS may split this long sum; with fp32 results it does not add halves in 16 bits.
            own_CD = dw_CD[: chunk.stop - first]
            add_product(own_CD, logits_TC.T, x_TD, True)
            dw_VD[chunk].copy_(own_CD)
    del buffer_TC, logits_TC
    return dx_TD.to(x_TD.dtype), dw_VD
