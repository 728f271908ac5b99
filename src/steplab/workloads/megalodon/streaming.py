"""A stream of tokens through the model: any number of them, in a fixed amount of memory.

Keys and values have as many slots as a chunk has tokens; a new chunk overwrites the old one. All
tensors are updated in place and single tokens find their position on the device, so that a CUDA
graph of one token's step can be replayed forever.
"""

# B batch, T new tokens, H heads, K width of a head's keys, V of its values (of logits: vocabulary),
# C tokens of a chunk, D width, N modes
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steplab.core.errors import UserError
from steplab.kernels.timestep_norm import Statistics
from steplab.modules.rotary import Angles, Rotary
from steplab.workloads.megalodon.config import MegalodonConfig

if TYPE_CHECKING:
    from steplab.workloads.megalodon.model import Megalodon


class Position:
    """How many tokens a stream has seen, counted on the device: a replayed graph runs no Python."""

    def __init__(self, chunk: int, device: torch.device) -> None:
        self.chunk = chunk
        self.tokens = 0  # on the host, where several tokens are read at once
        self.tokens_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.slot_C = torch.arange(chunk, device=device)

    def advance(self, tokens: int) -> None:
        """Count new tokens as seen."""
        self.tokens_1 += tokens


class BlockCache:
    """What one block keeps: keys and values of the present chunk, statistics and averages."""

    def __init__(
        self, config: MegalodonConfig, batch: int, like: Tensor, kv_like: Tensor, position: Position
    ) -> None:
        self.position = position
        slots = (batch, config.heads, config.chunk)
        self.keys_BHCK = kv_like.new_zeros(*slots, config.head_width)
        self.values_BHCV = kv_like.new_zeros(*slots, config.value_head_width)
        self.statistics = Statistics.fresh(batch, config.norm_groups, like)
        wide = self.statistics.mean_BG
        self.averages_B2ND = wide.new_zeros(batch, 2, config.modes, config.width)

    def angles(self, rotary: Rotary, tokens: int) -> Angles:
        """Return the angles of new tokens, by their position in their chunk."""
        if tokens == 1:
            slot_1 = self.position.tokens_1 % self.position.chunk
            return rotary.cos_TD[slot_1], rotary.sin_TD[slot_1]
        start, chunk = self.position.tokens, self.position.chunk
        slot_T = torch.arange(start, start + tokens, device=rotary.cos_TD.device) % chunk
        return rotary.cos_TD[slot_T], rotary.sin_TD[slot_T]

    def attend(
        self, attention: Callable[..., Tensor], q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor
    ) -> Tensor:
        """Store new keys and values, and attend to each token's own chunk."""
        T = q_BHTK.shape[2]
        if T == 1:
            return self._attend_one(q_BHTK, k_BHTK, v_BHTV)
        chunk, out, done = self.position.chunk, [], 0
        while done < T:
            slot = (self.position.tokens + done) % chunk
            new = slice(done, min(done + chunk - slot, T))
            filled = slice(0, slot + new.stop - new.start)
            self.keys_BHCK[:, :, slot : filled.stop] = k_BHTK[:, :, new]
            self.values_BHCV[:, :, slot : filled.stop] = v_BHTV[:, :, new]
            keys, values = self.keys_BHCK[:, :, filled], self.values_BHCV[:, :, filled]
            out.append(attention(q_BHTK[:, :, new], keys, values))
            done = new.stop
        return torch.cat(out, 2)

    def _attend_one(self, q_BH1K: Tensor, k_BH1K: Tensor, v_BH1V: Tensor) -> Tensor:
        """One token: attend to all slots, with those not yet written in this chunk masked."""
        slot_1 = self.position.tokens_1 % self.position.chunk
        self.keys_BHCK.index_copy_(2, slot_1, k_BH1K.to(self.keys_BHCK.dtype))
        self.values_BHCV.index_copy_(2, slot_1, v_BH1V.to(self.values_BHCV.dtype))
        scores_BH1C = q_BH1K @ self.keys_BHCK.mT / q_BH1K.shape[-1] ** 0.5
        hidden_C = self.position.slot_C > slot_1
        wide = torch.promote_types(scores_BH1C.dtype, torch.float32)
        weights_BH1C = scores_BH1C.to(wide).masked_fill(hidden_C, -torch.inf).softmax(-1)
        return weights_BH1C.to(v_BH1V.dtype) @ self.values_BHCV

    def update(self, statistics: Statistics, averages_B2ND: Tensor) -> None:
        """Store the state after the newest tokens."""
        for own, new in zip(self.statistics, statistics, strict=True):
            own.copy_(new)
        self.averages_B2ND.copy_(averages_B2ND)


class MegalodonCache:
    """Everything that `batch` streams need to continue; all have seen equally many tokens.

    `like` has the device and the dtype of the statistics, `kv_like` the dtype of keys and values.
    """

    def __init__(self, config: MegalodonConfig, batch: int, like: Tensor, kv_like: Tensor) -> None:
        if batch < 1:
            raise UserError(f"A stream has at least 1 row, not {batch}.")
        self.batch = batch
        self.position = Position(config.chunk, like.device)
        shape = (config, batch, like, kv_like, self.position)
        self.layers = [BlockCache(*shape) for _ in range(config.layers)]
        self.statistics = Statistics.fresh(batch, config.norm_groups, like)

    def begin(self, tokens_BT: Tensor) -> None:
        """Refuse tokens of other rows, and none at all; of several, look up where they begin."""
        if tokens_BT.shape[0] != self.batch or tokens_BT.shape[1] < 1:
            raise UserError(
                f"A stream of {self.batch} rows cannot take {tuple(tokens_BT.shape)} tokens.",
                "Give every row at least one token.",
            )
        if tokens_BT.shape[1] > 1:
            self.position.tokens = int(self.position.tokens_1)

    @property
    def named(self) -> dict[str, Tensor]:
        """All tensors by name, always in the same order."""
        found = {"position": self.position.tokens_1, **_named("norm", self.statistics)}
        for index, layer in enumerate(self.layers):
            found |= {f"{index}.keys": layer.keys_BHCK, f"{index}.values": layer.values_BHCV}
            found |= {f"{index}.averages": layer.averages_B2ND}
            found |= _named(f"{index}.norm", layer.statistics)
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, always in the same order."""
        return list(self.named.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of all tensors by name, to continue later or in another process."""
        return {name: x.clone() for name, x in self.named.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue, in place, from where a cache of the same shape was."""
        own = self.named
        shapes, theirs = ({n: (x.shape, x.dtype) for n, x in d.items()} for d in (own, saved))
        if shapes != theirs:
            wrong = min(n for n in {*shapes, *theirs} if shapes.get(n) != theirs.get(n))
            raise UserError(
                f"The saved cache does not fit: {wrong!r} differs in shape or dtype.",
                "Load it into a stream of equally many rows, of the same model and precision.",
            )
        for name, x in own.items():
            x.copy_(saved[name])

    def reindex(self, rows_B: Tensor) -> None:
        """Let row i continue from where row `rows_B[i]` is, in place; a row may be taken twice."""
        if rows_B.shape != (self.batch,):
            raise UserError(
                f"{self.batch} rows cannot continue from {tuple(rows_B.shape)} rows.",
                "Name one row for each.",
            )
        for x in self.tensors[1:]:  # the position is that of all rows
            x.copy_(x[rows_B])


class Stream:
    """Call it with new tokens (B, T); it returns the logits (B, V) after the last of them.

    Under autocast every call casts all weights: a model cast to bf16 beforehand is faster.
    """

    def __init__(self, model: Megalodon, rows: int) -> None:
        self.model, self.cache = model, model.empty_cache(rows)

    @property
    def tokens(self) -> int:
        """How many tokens each row has seen."""
        return int(self.cache.position.tokens_1)

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        """Feed new tokens."""
        return self.model.extend(tokens_BT, self.cache)

    step = __call__  # of one token per row a CUDA graph can be replayed


def _named(prefix: str, statistics: Statistics) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": x for name, x in statistics._asdict().items()}
