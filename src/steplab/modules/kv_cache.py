"""Keys and values of the tokens that a decoder has seen, so that it computes only new ones."""

# L layers, B batch, H heads, S places for tokens, T new tokens, D head width
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from steplab.core.errors import UserError
from steplab.modules.attention import document_positions
from steplab.modules.precision import matmul_dtype
from steplab.modules.rotary import Rotary


class Cacheable(Protocol):
    """A decoder that can continue from a cache."""

    rotary: Rotary

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


class LayerCache(NamedTuple):
    """One layer's share of a cache."""

    keys_BHSD: Tensor
    values_BHSD: Tensor
    length: int  # tokens before the new ones

    def append(self, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys (rotated) and values; return all so far, (B, H, length + T, D) each."""
        stop = self.length + k_BHTD.shape[2]
        self.keys_BHSD[:, :, self.length : stop] = k_BHTD
        self.values_BHSD[:, :, self.length : stop] = v_BHTD
        return self.keys_BHSD[:, :, :stop], self.values_BHSD[:, :, :stop]


class KVCache:
    """Room for some tokens in each row of a batch; all rows are filled equally far.

    Rows of different lengths are padded on the left by tokens of another document.
    """

    def __init__(self, keys_LBHSD: Tensor, values_LBHSD: Tensor, documents_BS: Tensor) -> None:
        self.keys_LBHSD, self.values_LBHSD = keys_LBHSD, values_LBHSD
        self.documents_BS = documents_BS
        self.length = 0  # tokens in every row
        self.has_documents = False  # False: each row is one document

    @classmethod
    def empty(cls, model: Cacheable, batch: int, capacity: int) -> KVCache:
        """Return a cache for `batch` rows of up to `capacity` tokens, in the dtype of attention.

        Under autocast that is autocast's dtype, so make the cache where it is used. Positions
        beyond the trained ones are prepared too; there a model extrapolates.
        """
        layers, heads, width = model.cache_shape
        weight = next(model.parameters())
        shape = (layers, batch, heads, capacity, width)
        keys_LBHSD = torch.empty(shape, dtype=matmul_dtype(weight), device=weight.device)
        documents_BS = torch.zeros(batch, capacity, dtype=torch.int32, device=weight.device)
        model.rotary.reserve(capacity)
        return cls(keys_LBHSD, torch.empty_like(keys_LBHSD), documents_BS)

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
        return LayerCache(self.keys_LBHSD[index], self.values_LBHSD[index], self.length)

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen: every layer has stored them."""
        self.length += tokens
