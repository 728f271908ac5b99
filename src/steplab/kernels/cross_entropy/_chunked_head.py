"""The head, one chunk of tokens at a time: logits out, their gradients in.

How many tokens make a chunk depends on shapes alone, so the same step always does the same work,
and nothing is read on the host.
"""

# T tokens, C tokens of one chunk, D width, V vocabulary
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from steplab.kernels.cross_entropy._products import add_product, round_up, wide

# At most so many. Fewer are faster (8: 7.4 ms, 12: 8.2, 16: 8.4 at 16,384 x 768 x 50,257 on an
# H200, each with rows that took 0.5 ms longer than today's), and with 12 the memory stays below a
# tenth of what whole logits take.
CHUNKS = 12
LEAST_BYTES, MOST_BYTES = 64 * 2**20, 256 * 2**20
WHOLE_ROWS = 128  # of a tile of a product
# cuBLAS takes its fast kernels where matrices begin and end at multiples of 16 bytes.
ALIGNED = 8
ROW_STEP = 64  # elements: rows of the buffer begin at multiples of a cache line


def chunk_rows(tokens: int, row_bytes: int) -> int:
    """Return the tokens of one chunk, the logits of each of which take `row_bytes`."""
    wished = round_up(max(-(-tokens // CHUNKS), LEAST_BYTES // row_bytes), WHOLE_ROWS)
    fitting = max(WHOLE_ROWS, MOST_BYTES // row_bytes // WHOLE_ROWS * WHOLE_ROWS)
    return min(wished, fitting, tokens)


class ChunkedHead:
    """Holds the logits of one chunk, and the gradients of inputs and weight as they grow."""

    def __init__(
        self, x_TD: Tensor, weight_VD: Tensor, need_dx: bool = False, need_dw: bool = False
    ) -> None:
        (T, D), V = x_TD.shape, weight_VD.shape[0]
        self.x_TD, self.weight_VD = x_TD, weight_VD.to(x_TD.dtype)
        columns = round_up(V, ROW_STEP)
        self.rows = chunk_rows(T, columns * x_TD.element_size())
        self.buffer_CV = x_TD.new_empty(self.rows, columns)
        self.need_dx, self.need_dw = need_dx, need_dw
        sums = wide(x_TD.dtype)
        self.dx_TD = x_TD.new_empty(x_TD.shape if need_dx else 0)
        self.dx_CD = x_TD.new_empty((self.rows, D) if need_dx else 0, dtype=sums)
        self.dw_VD = x_TD.new_empty(weight_VD.shape if need_dw else 0, dtype=sums)
        whole = V // ALIGNED * ALIGNED
        self.parts = [part for part in (slice(0, whole), slice(whole, V)) if _length(part)]

    def chunks(self) -> Iterator[slice]:
        """Yield the tokens of each chunk; the last one may have fewer."""
        tokens = self.x_TD.shape[0]
        for start in range(0, tokens, self.rows):
            yield slice(start, min(start + self.rows, tokens))

    def logits(self, chunk: slice) -> Tensor:
        """Return the (C, V) logits of a chunk: a view that the next chunk overwrites."""
        logits_CV = self._logits(chunk)
        for part in self.parts:
            torch.mm(self.x_TD[chunk], self.weight_VD[part].T, out=logits_CV[:, part])
        return logits_CV

    def collect(self, chunk: slice) -> None:
        """Take the gradients of a chunk's logits, which now stand in their place."""
        dlogits_CV = self._logits(chunk)
        if self.need_dx:
            # cuBLAS may split this long sum; with fp32 results it does not add halves in 16 bits.
            dx_CD = self.dx_CD[: _length(chunk)]
            for part in self.parts:
                add_product(dx_CD, dlogits_CV[:, part], self.weight_VD[part], part.start == 0)
            self.dx_TD[chunk].copy_(dx_CD)
        if self.need_dw:
            for part in self.parts:
                dw_VD = self.dw_VD[part]
                add_product(dw_VD, dlogits_CV[:, part].T, self.x_TD[chunk], chunk.start == 0)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return dx in the inputs' dtype and dw in `dtype`, empty where not needed."""
        del self.buffer_CV, self.dx_CD  # before memory for another dw is taken
        return self.dx_TD, self.dw_VD.to(dtype)

    def _logits(self, chunk: slice) -> Tensor:
        return self.buffer_CV[: _length(chunk), : self.weight_VD.shape[0]]


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)
