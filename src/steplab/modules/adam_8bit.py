"""AdamW whose two moments are kept in 8 bits, by torchao, and what that rounding does.

Blocks of 256 numbers share a scale, their largest magnitude. Within a block a number becomes the
nearest of 256 that lie closer together towards zero. The update of a step is computed from moments
in fp32; they are rounded when they are stored. Tensors with fewer than 4,096 numbers, or whose size
no block divides, keep fp32 moments. So do embeddings: the second moment of a rare word lies so far
below that of its neighbors that it becomes zero, and with it what divides the update. (By the gate,
the embedding of a tiny gpt was 7.8 times its update away from the truth.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.errors import Unsupported, UserError

NAME = "adam-8bit"
BLOCK = 256
LEAST_NUMBERS = 4096
DECADES = 7
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether they have a sign
PARTS = ("codes", "scale")


@functools.cache
def levels(signed: bool) -> Tensor:
    """Return the 256 numbers that a block holds in units of its scale, in order, in fp64.

    Decade i of seven, the largest up to 1, is cut into 2**i parts of equal width, twice as many
    where there is no sign; the level of a part is its middle. Zero and one come on top.
    """
    found = [0.0, 1.0]
    for i in range(DECADES):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        middles = (10.0 ** (i + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(found), dtype=torch.float64)


def rounded_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters of a model whose moments are kept in 8 bits."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {m.weight for m in model.modules() if isinstance(m, kinds)}
    large = (p for p in model.parameters() if p.numel() >= LEAST_NUMBERS and not p.numel() % BLOCK)
    return {p for p in large if p not in embeddings}


def rounded(moment: Tensor, signed: bool) -> Tensor:
    """Return a moment as it comes back from 8 bits, in its own dtype."""
    blocks = moment.detach().double().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    known = levels(signed).to(moment.device)
    nearest = torch.bucketize((blocks / scale).contiguous(), (known[:-1] + known[1:]) / 2)
    return (known[nearest] * scale).reshape(moment.shape).to(moment.dtype)


def round_moments(optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]) -> None:
    """Let an AdamW of torch keep its moments as 8 bits would: the gate's budget is made of it."""

    def after_step(this: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in this.state.items():
            for key, signed in MOMENTS.items() if parameter in parameters else ():
                state[key].copy_(rounded(state[key], signed))

    optimizer.register_step_post_hook(after_step)


def from_adamw(
    optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]
) -> torch.optim.Optimizer:
    """Return torchao's AdamW8bit with the groups of an AdamW that has not taken a step.

    The moments of `parameters` are kept in 8 bits, those of all others in fp32.
    """
    if type(optimizer) is not torch.optim.AdamW:
        raise Unsupported(
            f"optimizer={NAME} is an AdamW, but this workload is trained by "
            f"{type(optimizer).__name__}.",
            "Leave the optimizer out of the recipe.",
        )
    odd = {n for g in optimizer.param_groups for n in ("amsgrad", "maximize") if g.get(n)}
    if odd:
        raise Unsupported(f"optimizer={NAME} knows AdamW without {' and '.join(odd)}.")
    keys = ("params", "lr", "betas", "eps", "weight_decay")
    groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    made: torch.optim.Optimizer = _class()(groups)
    made.rounded = frozenset(parameters)  # type: ignore[attr-defined]
    return made


class RoundedState:
    """What steps and checkpoints ask of an optimizer, for one of torchao's."""

    label = f"{NAME} torchao"
    clips_itself = False
    rounded: frozenset[Tensor] = frozenset()  # the parameters whose moments are packed
    packing: Any  # torchao's class of a packed tensor

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Return zeros for a moment; torchao would pack those of embeddings too."""
        if p not in self.rounded:
            return torch.zeros_like(p)
        made: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        return made

    def clip(self, params: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
        """It does not clip by itself."""
        raise NotImplementedError

    def set_master_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """It keeps no weights."""
        raise Unsupported(
            f"optimizer={NAME} keeps no fp32 weights beside 16-bit ones.",
            "Use precision=bf16, or optimizer=one-pass.",
        )

    def full_weights(self) -> AbstractContextManager[None]:
        """The parameters are all the weights there are."""
        return nullcontext()

    @property
    def has_rounded_weights(self) -> bool:
        """Never."""
        return False

    def unpacked(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield a parameter's state with the parts of packed tensors: `exp_avg.codes`."""
        for key, value in state.items():
            if isinstance(value, self.packing):
                yield from ((f"{key}.{part}", getattr(value, part)) for part in PARTS)
            else:
                yield key, value

    def packed(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Put the parts together again; what does not fit the parameter is a UserError."""
        found = dict(state)
        for key, signed in MOMENTS.items():
            codes, scale = (found.pop(f"{key}.{part}", None) for part in PARTS)
            if codes is None and scale is None and parameter not in self.rounded:
                continue
            _check_parts(key, parameter, codes, scale)
            made = (parameter.shape, signed, BLOCK, parameter.device, parameter.dtype)
            found[key] = self.packing.zeros(*made)
            found[key].codes.copy_(codes)
            found[key].scale.copy_(scale)
        return found


@functools.cache
def _class() -> Any:
    """Return torchao's optimizer with what steps and checkpoints ask of one."""
    # Its C++ extensions, which this does not need, are built for one torch: it warns of that.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        raise Unsupported(
            f"optimizer={NAME} is torchao's, which is not installed.",
            "Install it (pip install 'steplab[adam-8bit]'), or leave the optimizer out.",
        ) from None
    return type("AdamW8bit", (RoundedState, AdamW8bit), {"packing": OptimState8bit})


def _check_parts(key: str, parameter: Tensor, codes: Any, scale: Any) -> None:
    fits = (
        isinstance(codes, Tensor)
        and isinstance(scale, Tensor)
        and codes.dtype == torch.uint8
        and scale.dtype == torch.float32
        and codes.shape == parameter.shape
        and scale.shape == (parameter.numel() // BLOCK,)
    )
    if not fits:
        raise UserError(
            f"The saved {key} in 8 bits does not fit a parameter of {list(parameter.shape)}."
        )
