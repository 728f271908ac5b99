"""The matrix products of a linear head in chunks, so that its logits never exist all at once.

`ChunkedHead` goes over the tokens: logits out, their gradients in. `gradients_by_vocabulary` is the
backward of losses per token. By then the norm of every softmax is known, so the logits of some
words can be computed again for all tokens at once: the weight's gradient of these words is one
product and complete, and only the narrow gradient of the inputs has to be added up.

The size of a chunk depends on shapes alone, so the same step always does the same work and nothing
is read on the host.
"""

# T tokens, D width, V vocabulary, N with words that fill it up, C tokens or words of one chunk;
# M, K, N of any product
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# A chunk of tokens has
# - as many as its narrowest product, (tokens, width), needs to have a tile for each of an H200's
#   multiprocessors: with fewer, cuBLAS splits the sum over the vocabulary and adds the parts. Loss
#   and gradients at 16,384 x 768 x 50,304 took 7.68 ms in chunks of 1,408 tokens, 6.50 of 2,816,
#   where this ends, and 6.24 of 8,192, in 212, 353 and 885 MiB.
# - a quarter of all or more: HYDRA's step of 16,384 tokens has 0.15 ms of kernels less in 4 chunks
#   than in 6, and no less in 2. Without gradients there is one product, and a twelfth is enough.
# - as many as the width or more, so that the fp32 gradient of the weight, which it reads and
#   writes, is at most twice its logits. (16,384 x 2048 x 128,256: 43.3 ms of 2,048, 42.0 of 4,096.)
# - logits that are neither too small to be worth a launch nor, where the vocabulary is long and the
#   width small, much larger than anything else in memory.
TILES = 132
TOKEN_CHUNKS, TOKEN_CHUNKS_OF_LOSS = 4, 12
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 64 * 2**20, 2**30
# The most chunks of the vocabulary: at 16,384 tokens by 50,257 words, 42 MB of logits each, which
# fit into an H200's cache.
VOCABULARY_CHUNKS = 40
MIN_VOCABULARY_BYTES, MAX_VOCABULARY_BYTES = 32 * 2**20, 256 * 2**20
# Chunks are multiples of a tile of a product.
TOKEN_TILE = 128
VOCABULARY_TILE = 128
# cuBLAS takes its fast kernels where matrices begin and end at multiples of 16 bytes.
ALIGNED = 8
ROW_STEP = 64  # elements: rows of the buffer begin at multiples of a cache line

# (logits_TC, first word): turn logits into their gradients, in place
Gradient = Callable[[Tensor, int], None]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, first: bool) -> None:
    """Add a b to `total_MN` in its wider dtype; the `first` product overwrites it."""
    beta = 0 if first else 1
    if a_MK.dtype == total_MN.dtype:
        torch.addmm(total_MN, a_MK, b_KN, beta=beta, out=total_MN)
    elif a_MK.is_cuda and torch.version.cuda is not None:
        narrow_in_wide_out = torch.ops.aten.addmm.dtype_out
        narrow_in_wide_out(total_MN, a_MK, b_KN, total_MN.dtype, beta=beta, out=total_MN)
    else:  # only CUDA has such a product
        a_MK, b_KN = a_MK.to(total_MN.dtype), b_KN.to(total_MN.dtype)
        torch.addmm(total_MN, a_MK, b_KN, beta=beta, out=total_MN)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def chunk_rows(tokens: int, row_bytes: int, width: int) -> int:
    """Return the tokens of one chunk, given the bytes that the logits of one token take.

    A `width` of 0: there are no gradients, hence no product as narrow as the width.
    """
    filling = TILES * TOKEN_TILE**2 // round_up(width, TOKEN_TILE) if width else 0
    most = TOKEN_CHUNKS if width else TOKEN_CHUNKS_OF_LOSS
    wanted = max(filling, -(-tokens // most), MIN_TOKEN_BYTES // row_bytes)
    fitting = max(TOKEN_TILE, MAX_TOKEN_BYTES // row_bytes // TOKEN_TILE * TOKEN_TILE)
    least = round_up(width, TOKEN_TILE)
    return min(max(least, min(round_up(wanted, TOKEN_TILE), fitting)), tokens)


class ChunkedHead:
    """Holds the logits of one chunk, and the gradients of inputs and weight as they grow."""

    def __init__(
        self, x_TD: Tensor, weight_VD: Tensor, need_dx: bool = False, need_dw: bool = False
    ) -> None:
        (T, D), V = x_TD.shape, weight_VD.shape[0]
        columns = round_up(V, ROW_STEP)
        # Words of zeros fill up a vocabulary that is no multiple of ALIGNED: products for the rest
        # by itself took four more kernels a chunk, 0.10 ms of HYDRA's step (50,257 words).
        words = columns if V % ALIGNED else V
        self.x_TD, self.vocabulary, self.weight_ND = x_TD, V, weight_VD.to(x_TD.dtype)
        if words > V:
            self.weight_ND = torch.cat([self.weight_ND, x_TD.new_zeros(words - V, D)])
        width = D if need_dx or need_dw else 0
        self.rows = chunk_rows(T, columns * x_TD.element_size(), width)
        self.buffer_CV = x_TD.new_empty(self.rows, columns)
        self.need_dx, self.need_dw = need_dx, need_dw
        sums = wide(x_TD.dtype)
        self.dx_TD = x_TD.new_empty(x_TD.shape if need_dx else 0)
        self.dx_CD = x_TD.new_empty((self.rows, D) if need_dx else 0, dtype=sums)
        self.dw_ND = x_TD.new_empty((words, D) if need_dw else 0, dtype=sums)

    def chunks(self) -> Iterator[slice]:
        """Yield the tokens of each chunk; the last one may have fewer."""
        tokens = self.x_TD.shape[0]
        for start in range(0, tokens, self.rows):
            yield slice(start, min(start + self.rows, tokens))

    def logits(self, chunk: slice) -> Tensor:
        """Return the (C, V) logits of a chunk: a view that the next chunk overwrites."""
        torch.mm(self.x_TD[chunk], self.weight_ND.T, out=self._logits(chunk))
        return self._logits(chunk)[:, : self.vocabulary]

    def collect(self, chunk: slice) -> None:
        """Take the gradients of a chunk's logits, which have been written over the logits.

        Those of words that fill up are zeros.
        """
        dlogits_CN = self._logits(chunk)
        if self.need_dx:
            # cuBLAS may split this long sum; with fp32 results it does not add halves in 16 bits.
            dx_CD = self.dx_CD[: _length(chunk)]
            add_product(dx_CD, dlogits_CN, self.weight_ND, True)
            self.dx_TD[chunk].copy_(dx_CD)
        if self.need_dw:
            add_product(self.dw_ND, dlogits_CN.T, self.x_TD[chunk], chunk.start == 0)

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return dx in the inputs' dtype and dw in `dtype`, empty where not needed."""
        del self.buffer_CV, self.dx_CD, self.weight_ND  # before a second dw is allocated
        return self.dx_TD, self.dw_ND[: self.vocabulary].to(dtype)

    def _logits(self, chunk: slice) -> Tensor:
        return self.buffer_CV[: _length(chunk), : self.weight_ND.shape[0]]


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def chunk_words(vocabulary: int, column_bytes: int) -> int:
    """Return the words of one chunk, given the bytes that the logits of one word take."""
    least = max(-(-vocabulary // VOCABULARY_CHUNKS), MIN_VOCABULARY_BYTES // column_bytes)
    tile = VOCABULARY_TILE
    fitting = max(tile, MAX_VOCABULARY_BYTES // column_bytes // tile * tile)
    return min(round_up(least, tile), fitting, round_up(vocabulary, tile))


def gradients_by_vocabulary(
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
