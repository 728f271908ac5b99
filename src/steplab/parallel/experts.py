"""Expert parallelism: each of P ranks holds E/P of the experts, and rows travel to them and back.

Nothing is dropped, so the number of rows that a rank receives changes from step to step. It is
exchanged first, and reading it is the one time that the host waits.
"""

# T tokens, K chosen experts, E experts, L = E/P experts of one rank, D width, R = T * K rows that
# a rank sends, S rows that it receives, P ranks that share one set of experts
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from steplab.core.errors import Unsupported, UserError
from steplab.kernels.experts import ExpertWeights, RoutedTokens
from steplab.kernels.experts._rows import SortedRows, sort_rows
from steplab.kernels.experts.grouped import combine, gather
from steplab.modules.experts import ComputeExperts, RoutedExperts
from steplab.modules.shards import local
from steplab.parallel.mesh import EXPERT


def check_expert_parts(model: nn.Module, parts: int, ranks: int) -> None:
    """Refuse to share out a model's experts over `parts` ranks where that leaves a remainder."""
    experts = [m.w_in_EFD.shape[0] for m in routed_experts(model)]
    if not experts:
        raise Unsupported(
            f"parallel.expert={parts} shares out routed experts, and this model has none.",
            "Leave parallel.expert out.",
        )
    fitting = [n for n in range(1, ranks + 1) if not any(m % n for m in (*experts, ranks))]
    if parts not in fitting:
        raise UserError(
            f"parallel.expert={parts} must divide the {min(experts)} experts of a layer and the "
            f"{ranks} ranks.",
            f"What fits: {', '.join(map(str, fitting))}.",
        )


def shard_experts(
    model: nn.Module, mesh: DeviceMesh, exact: bool = False
) -> dict[nn.Parameter, nn.Parameter]:
    """Leave each rank its part of every stack of experts; return the old parameters' successors.

    Names stay as they are. For `exact` see Exchange.
    """
    exchange = Exchange(mesh.get_group(EXPERT), exact)
    replaced = {}
    for module in routed_experts(model):
        for name, weight in list(module.named_parameters(recurse=False)):
            part = expert_part(weight.detach(), mesh)
            replaced[weight] = nn.Parameter(part, weight.requires_grad)
            setattr(module, name, replaced[weight])
        module.exchange = exchange
    return replaced


def expert_part(stack: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a stack that all ranks hold, so that nothing is sent."""
    part = stack.chunk(mesh[EXPERT].size())[mesh.get_local_rank(EXPERT)].clone()
    return DTensor.from_local(part, mesh[EXPERT], [Shard(0)], run_check=False)


def routed_experts(model: nn.Module) -> list[RoutedExperts]:
    """Return the modules whose experts can be shared out."""
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


class Exchange:
    """Brings every row to the rank of its expert, and the result back to the row's token.

    On a GPU one half of the tokens travels while the other half is multiplied. With `exact` the
    rows of each sender are multiplied by themselves, as on one rank, and the gradients of the
    weights are added in a binary tree over the senders.
    """

    def __init__(self, group: dist.ProcessGroup, exact: bool = False) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.exact = exact
        self.side: torch.cuda.Stream | None = None  # one for all layers: it has memory of its own

    # The counts are read on the host, where no graph can be traced through.
    @torch.compiler.disable
    def __call__(
        self, tokens: RoutedTokens, weights: ExpertWeights, compute: ComputeExperts
    ) -> Tensor:
        """Return (T, D): every token's weighted sum over its K experts, wherever they are."""
        pieces = 2 if tokens.x_TD.is_cuda and not self.exact else 1
        return self.in_pieces(pieces, tokens, weights, compute)

    def in_pieces(
        self, count: int, tokens: RoutedTokens, weights: ExpertWeights, compute: ComputeExperts
    ) -> Tensor:
        """Return (T, D), computed in one piece or in two, each on a stream of its own."""
        pieces = [
            RoutedTokens(*piece)
            for piece in zip(*(t.tensor_split(count) for t in tokens), strict=True)
        ]
        stacks = self._stacks(weights, tokens.x_TD.dtype)
        routes = self._routes(pieces, self.ranks * stacks[0].w_in_EFD.shape[0])
        shared = [*tokens, *stacks[0][:2], *(t for route in routes for t in route.tensors())]
        received, outputs = [], []
        with self._streams(count, shared) as streams:
            # All rows are on their way before the first product begins. Autograd takes the same
            # streams, so that in the backward, too, one piece travels while another is multiplied.
            for piece, route, stream in zip(pieces, routes, streams, strict=True):
                with torch.cuda.stream(stream):
                    received.append(route.send(piece.x_TD))
            for x_SD, piece, route, stream in zip(received, pieces, routes, streams, strict=True):
                with torch.cuda.stream(stream):
                    y_SD = _compute(x_SD, route, stacks, compute)
                    outputs.append(route.give_back(y_SD, piece.weights_TK))
        return torch.cat(outputs) if count > 1 else outputs[0]

    def _stacks(self, weights: ExpertWeights, dtype: torch.dtype) -> list[ExpertWeights]:
        """Return this rank's experts: once, or once for every sender whose gradient is apart.

        Cast after they are copied: gradients are added in the dtype of the parameters.
        """
        own = [local(weight) for weight in weights[:2]]
        copies = zip(*(copy(w, self.ranks) for w in own), strict=True) if self.exact else [own]
        return [ExpertWeights(a, b, weights.activation).to(dtype) for a, b in copies]

    def _routes(self, pieces: Sequence[RoutedTokens], experts: int) -> list[Route]:
        """Sort every piece's rows by expert and tell all ranks how many they will receive."""
        sorted_rows = [sort_rows(piece.experts_TK, experts) for piece in pieces]
        offsets_HE = torch.stack([rows.offsets_E for rows in sorted_rows])
        counts_HE = offsets_HE.diff(dim=1, prepend=torch.zeros_like(offsets_HE[:, :1]))
        to_PHL = counts_HE.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()
        from_PHL = torch.empty_like(to_PHL)
        dist.all_to_all_single(from_PHL, to_PHL, group=self.group)
        assigned = [piece.experts_TK.numel() for piece in pieces]
        sent_HP, received_HP = self.read_counts(to_PHL, from_PHL, assigned)
        numbers_M = torch.arange(to_PHL.shape[-1], device=to_PHL.device).repeat(self.ranks)
        routes = []
        for half, rows in enumerate(sorted_rows):
            counts_M = from_PHL[:, half].flatten()
            total = sum(received_HP[half])
            expert_S = numbers_M.repeat_interleave(counts_M, output_size=total)
            routes.append(
                Route(rows, expert_S[:, None], sent_HP[half], received_HP[half], self.group)
            )
        return routes

    def read_counts(
        self, to_PHL: Tensor, from_PHL: Tensor, rows: Sequence[int]
    ) -> list[list[list[int]]]:
        """Return how many rows go to and come from every rank, of each piece with so many `rows`.

        The one time that the host waits.
        """
        counts: list[list[list[int]]] = (
            torch.stack([to_PHL, from_PHL]).sum(-1).transpose(1, 2).tolist()
        )
        return counts

    @contextlib.contextmanager
    def _streams(self, count: int, shared: Sequence[Tensor]) -> Iterator[list[Any]]:
        """Yield a stream per piece; None is the present one. `shared` is used by all of them."""
        if count == 1 or not shared[0].is_cuda:
            yield [None] * count
            return
        present = torch.cuda.current_stream()
        self.side = self.side or torch.cuda.Stream()
        self.side.wait_stream(present)
        for tensor in shared:  # not to be given away while the other stream still reads it
            tensor.record_stream(self.side)
        yield [None, self.side]
        present.wait_stream(self.side)


@dataclass(frozen=True)
class Route:
    """Where the rows of one piece go: how many to and from every rank, for which experts."""

    rows: SortedRows
    expert_S1: Tensor  # the expert of this rank that each received row is for
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    def send(self, x_TD: Tensor) -> Tensor:
        """Return (S, D): the rows for this rank's experts, sender by sender."""
        x_RD = gather(x_TD, self.rows.token_R, self.rows.row_TK)
        return all_to_all(x_RD, self.sent, self.received, self.group)

    def give_back(self, y_SD: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, D): the results of this rank's tokens, weighted and added."""
        y_RD = all_to_all(y_SD, self.received, self.sent, self.group)
        return combine(y_RD, weights_TK, self.rows.token_R, self.rows.row_TK)

    def tensors(self) -> list[Tensor]:
        """Return what is on the device."""
        return [*self.rows, self.expert_S1]


def _compute(
    x_SD: Tensor, route: Route, stacks: Sequence[ExpertWeights], compute: ComputeExperts
) -> Tensor:
    """Return (S, D): every row through its expert, all at once or sender by sender."""
    # One expert per row, with a weight of one: the row's token weighs the result.
    ones_S1 = torch.ones_like(route.expert_S1, dtype=torch.promote_types(x_SD.dtype, torch.float32))
    sizes = [len(x_SD)] if len(stacks) == 1 else route.received
    parts = zip(*(t.split(sizes) for t in (x_SD, ones_S1, route.expert_S1)), strict=True)
    results = [
        compute(RoutedTokens(*part), stack)[0] for part, stack in zip(parts, stacks, strict=True)
    ]
    return results[0] if len(results) == 1 else torch.cat(results)


class AllToAll(torch.autograd.Function):
    """Rows to every rank and from every rank; their gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Return sum(received) rows."""
        ctx.route = (received, sent, group)
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients back."""
        return _all_to_all(gradients[0], *ctx.route), None, None, None


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows to the group's first rank, and so on; return what came."""
    out: Tensor = AllToAll.apply(x, sent, received, group)
    return out


def _all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class Copy(torch.autograd.Function):
    """The same tensor several times; the gradients are added in a binary tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return `count` views of x."""
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add neighbors, then neighbors of these sums; the count is a power of two."""
        level = list(gradients)
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0], None


def copy(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return x `count` times, for `count` uses whose gradients are added in one order."""
    out: tuple[Tensor, ...] = Copy.apply(x, count)
    return out
