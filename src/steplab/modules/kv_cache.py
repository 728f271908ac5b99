"""Keys and values of the tokens that a decoder has seen, so that it computes only new ones.

A `KVCache` takes new tokens in pieces of any size: the host knows how far it is filled. Its
`static` view takes pieces of one size and knows their places on the device alone: every piece runs
the same kernels on the same memory, so a CUDA graph of one can be replayed for the next.
"""

# L layers, B batch, H query heads, G key heads, S places for tokens, T new tokens, D head width
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.core.errors import UserError
from steplab.modules.attention import document_positions, document_starts
from steplab.modules.precision import matmul_dtype
from steplab.modules.rotary import Rotary


class Cacheable(Protocol):
    """A decoder that can continue from a cache."""

    @property
    def rotary(self) -> Rotary:
        """The table of angles."""
        ...

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads, head width."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """The weights, which determine device and dtype."""
        ...


class NewTokens(NamedTuple):
    """Where new tokens stand."""

    positions_BT: Tensor  # counted within the document; (1, T) when all rows have the same
    documents_BS: Tensor | None  # of all tokens, the new ones included; None: one per row


class GrowingLayer(NamedTuple):
    """One layer's share of a cache whose tokens are counted on the host."""

    keys_BGSD: Tensor
    values_BGSD: Tensor
    length: int  # tokens before the new ones

    def attend(
        self,
        attention: Callable[..., Tensor],
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """Store new keys (rotated) and values; attend by `attention` to all so far.

        Returns (B, H, T, D).
        """
        stop = self.length + k_BGTD.shape[2]
        self.keys_BGSD[:, :, self.length : stop] = k_BGTD
        self.values_BGSD[:, :, self.length : stop] = v_BGTD
        filled = self.keys_BGSD[:, :, :stop], self.values_BGSD[:, :, :stop]
        return attention(q_BHTD, *filled, documents_BS)


class StaticLayer(NamedTuple):
    """One layer's share of a cache whose tokens are counted on the device."""

    keys_BGSD: Tensor
    values_BGSD: Tensor
    places_T: Tensor  # of the new tokens
    bias_B1TS: Tensor  # added to scores: 0 where a token sees a place, else -inf

    def attend(
        self,
        attention: Callable[..., Tensor],
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        documents_BS: Tensor | None = None,
    ) -> Tensor:
        """The same, over all places, with the bias; no `attention` of ours takes such a bias."""
        self.keys_BGSD.index_copy_(2, self.places_T, k_BGTD.to(self.keys_BGSD.dtype))
        self.values_BGSD.index_copy_(2, self.places_T, v_BGTD.to(self.values_BGSD.dtype))
        groups, bias_B1TS = self.keys_BGSD.shape[1], self.bias_B1TS
        sharing, T = q_BHTD.shape[1] // groups, q_BHTD.shape[2]
        if sharing > 1:  # as rows of one query head, so that keys are not repeated
            q_BHTD = q_BHTD.unflatten(1, (groups, sharing)).flatten(2, 3)
            bias_B1TS = bias_B1TS if T == 1 else bias_B1TS.repeat(1, 1, sharing, 1)
        out = F.scaled_dot_product_attention(
            q_BHTD.to(self.keys_BGSD.dtype), self.keys_BGSD, self.values_BGSD, bias_B1TS
        )
        return out.unflatten(2, (sharing, T)).flatten(1, 2) if sharing > 1 else out


LayerCache = GrowingLayer | StaticLayer

# torch's attention kernel wants a bias whose rows are multiples of this, and would copy others.
PLACES = 16


class KVCache:
    """Room for some tokens in each row of a batch; all rows are filled equally far.

    Rows of different lengths are padded on the left by tokens of another document.
    """

    def __init__(self, keys_LBGSD: Tensor, values_LBGSD: Tensor, documents_BS: Tensor) -> None:
        self.keys_LBGSD, self.values_LBGSD = keys_LBGSD, values_LBGSD
        self.documents_BS = documents_BS
        self.static = StaticCache(keys_LBGSD, values_LBGSD)
        self.clear()

    @classmethod
    def empty(cls, model: Cacheable, batch: int, capacity: int) -> KVCache:
        """Return a cache for `batch` rows of up to `capacity` tokens, in the dtype of attention.

        Under autocast that is autocast's dtype, so make the cache where it is used. Positions
        beyond the trained ones are prepared too; there a model extrapolates.
        """
        layers, heads, width = model.cache_shape
        weight = next(model.parameters())
        shape = (layers, batch, heads, -(-capacity // PLACES) * PLACES, width)
        keys_LBGSD = torch.empty(shape, dtype=matmul_dtype(weight), device=weight.device)
        documents_BS = torch.zeros(batch, capacity, dtype=torch.int32, device=weight.device)
        model.rotary.reserve(capacity)
        return cls(keys_LBGSD, torch.empty_like(keys_LBGSD), documents_BS)

    def clear(self) -> None:
        """Forget all tokens; the memory stays where it is."""
        # The static view weighs unseen places by 0, and 0 times NaN is NaN.
        self.keys_LBGSD.zero_()
        self.values_LBGSD.zero_()
        self.length = 0  # tokens in every row
        self.has_documents = False  # False: each row is one document
        self.static.start(0, None)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a row."""
        return self.documents_BS.shape[1]

    def add_tokens(self, batch: int, tokens: int, documents_BT: Tensor | None) -> NewTokens:
        """Place new tokens and note their documents; they count as seen after `advance`.

        Without `documents_BT` they continue the document that each row ended in.
        """
        stop = self.length + tokens
        if batch != len(self.documents_BS) or stop > self.capacity:
            raise UserError(
                f"A cache of {len(self.documents_BS)} rows with room for {self.capacity} tokens, "
                f"{self.length} of them taken, cannot take {batch} rows of {tokens} more.",
                "Make the cache for the whole batch, context and forecast.",
            )
        if documents_BT is not None:
            self.documents_BS[:, self.length : stop] = documents_BT
            self.has_documents = True
        elif self.length:
            self.documents_BS[:, self.length : stop] = self.documents_BS[:, self.length - 1, None]
        if not self.has_documents:
            places_T = torch.arange(self.length, stop, device=self.documents_BS.device)
            return NewTokens(places_T[None], None)
        documents_BS = self.documents_BS[:, :stop]
        return NewTokens(document_positions(documents_BS)[:, self.length :], documents_BS)

    def layer(self, index: int) -> LayerCache:
        """Return the share of one layer."""
        return GrowingLayer(self.keys_LBGSD[index], self.values_LBGSD[index], self.length)

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen: every layer has stored them."""
        self.length += tokens
        documents_BS = self.documents_BS[:, : self.length]
        self.static.start(self.length, documents_BS if self.has_documents else None)


class StaticCache:
    """The memory of a KVCache, for tokens whose places only the device knows.

    They continue the document that each row ended in. Nobody sees here whether there is room for
    them: the caller counts. Once it was used, clear the KVCache before you use that again.
    """

    def __init__(self, keys_LBGSD: Tensor, values_LBGSD: Tensor) -> None:
        self.keys_LBGSD, self.values_LBGSD = keys_LBGSD, values_LBGSD
        batch, places, device = keys_LBGSD.shape[1], keys_LBGSD.shape[3], keys_LBGSD.device
        self.place_S = torch.arange(places, device=device)
        self.next_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # of the document
        self._places_T, self._bias_B1TS = self.next_1, keys_LBGSD  # of the newest tokens

    def start(self, length: int, documents_BS: Tensor | None) -> None:
        """Continue behind `length` tokens; without documents each row is one."""
        self.next_1.fill_(length)
        if documents_BS is None:
            self.first_B1.zero_()
        else:
            self.first_B1.copy_(document_starts(documents_BS)[:, -1:])

    def add_tokens(self, batch: int, tokens: int, documents_BT: Tensor | None) -> NewTokens:
        """Place new tokens; they count as seen after `advance`."""
        assert batch == len(self.first_B1) and documents_BT is None
        self._places_T = self.next_1 + self.place_S[:tokens]
        place_T1 = self._places_T[:, None]
        is_seen_BTS = (self.place_S <= place_T1) & (self.place_S >= self.first_B1[:, None])
        hidden_BTS = torch.where(is_seen_BTS, 0.0, -torch.inf)
        self._bias_B1TS = hidden_BTS.to(self.keys_LBGSD.dtype)[:, None]
        return NewTokens(self._places_T - self.first_B1, None)

    def layer(self, index: int) -> LayerCache:
        """Return the share of one layer."""
        kept = self.keys_LBGSD[index], self.values_LBGSD[index]
        return StaticLayer(*kept, self._places_T, self._bias_B1TS)

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen: every layer has stored them."""
        self.next_1 += tokens


class CachedReader(NamedTuple):
    """A decoder that reads tokens; see `TokenReader` of `workloads/workload.py`."""

    extend: Callable[[Tensor, Any], Tensor]  # new tokens (B, T) and a state to logits (B, V)
    state: Any  # with a KVCache
    static: Any  # the same with its static view

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Read new tokens, one or more per row; return the logits (B, V) after the last."""
        return self.extend(tokens_BT, self.state)

    def step(self, token_B1: Tensor) -> Tensor:
        """The same of one token per row; a CUDA graph of it can be replayed."""
        return self.extend(token_B1, self.static)
