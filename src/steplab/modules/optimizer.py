"""What a step and its checkpoints ask of an optimizer, and an AdamW that updates in one pass.

torch's optimizers neither clip nor keep weights of their own. One that does offers the members of
`ExtendedOptimizer`; the functions of this file use them or do what torch does, so that no caller
has to know which optimizer it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steplab.core.errors import Unsupported, UserError
from steplab.kernels import adamw as adamw_op
from steplab.kernels.adamw.reference import take_over
from steplab.kernels.dispatch import AUTO
from steplab.modules.shards import local, replace_data

MASTER = "master"  # the key of a parameter's fp32 weights in the optimizer's state


@runtime_checkable
class ExtendedOptimizer(Protocol):
    """What an optimizer may offer beyond torch's interface."""

    clips_itself: bool  # the gradients are scaled within `step`, by what `clip` found

    @property
    def label(self) -> str:
        """How a Run names the update that ran, as in "one-pass triton_update"."""
        ...

    def clip(self, params: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Let the next step scale the gradients to `max_norm`; return their norm, or `norm`."""
        ...

    def set_master_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Take these fp32 weights for the 16-bit parameters that are their rounded copies."""
        ...

    def full_weights(self) -> AbstractContextManager[None]:
        """Let the parameters be their fp32 weights, to be saved or replaced; then round them."""
        ...

    @property
    def has_rounded_weights(self) -> bool:
        """Whether parameters are 16-bit copies of weights now."""
        ...


@runtime_checkable
class PackedState(Protocol):
    """An optimizer that keeps some of its state in tensors of fewer bits, made of parts."""

    def unpacked(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield a parameter's state with the parts of packed tensors: `exp_avg.codes`."""
        ...

    def packed(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Put the parts together again; what does not fit the parameter is a UserError."""
        ...


def unpacked_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield every parameter's state, all of it in plain tensors."""
    for parameter, state in optimizer.state.items():
        if isinstance(optimizer, PackedState):
            state = dict(optimizer.unpacked(state))
        yield parameter, dict(state)


def packed_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Return a parameter's state as the optimizer keeps it."""
    return optimizer.packed(parameter, state) if isinstance(optimizer, PackedState) else state


def numbers_of(state: Tensor) -> Tensor:
    """Return the numbers that a tensor of an optimizer's state stands for."""
    return state.dequantize() if hasattr(state, "codes") else state


def optimizer_label(optimizer: torch.optim.Optimizer) -> str:
    """Return how the optimizer names its update, or "" for one of torch's."""
    return optimizer.label if isinstance(optimizer, ExtendedOptimizer) else ""


def clip_gradients(
    optimizer: torch.optim.Optimizer,
    params: Iterable[Tensor],
    max_norm: float,
    norm: Tensor | None = None,
) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`, now or in the next step.

    `norm` is given where the gradients of `params` are a part of those that count.
    """
    if getattr(optimizer, "clips_itself", False):
        return optimizer.clip(params, max_norm, norm)  # type: ignore[attr-defined]
    held = [*params]
    if norm is None:
        try:
            return nn.utils.clip_grad_norm_(held, max_norm)
        except NotImplementedError:  # torch has no norm of sparse gradients
            norm = _norm_of_sparse(held)
    grads = [local(p.grad) for p in held if p.grad is not None]
    torch._foreach_mul_(grads, clip_coefficient(norm, max_norm))
    return norm


def _norm_of_sparse(params: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients, some of which are sparse and may name a row repeatedly."""
    grads = [p.grad for p in params if p.grad is not None]
    numbers = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    return nn.utils.get_total_norm(numbers)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this norm are multiplied by, as torch's clip_grad_norm_ does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def set_master_weights(
    optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor]
) -> None:
    """Give an optimizer the fp32 weights of 16-bit parameters, or say that it cannot keep them."""
    if not isinstance(optimizer, ExtendedOptimizer):
        raise UserError(
            "16-bit weights need an optimizer that keeps them in fp32 too: their own steps are "
            "too coarse for most updates.",
            "Add optimizer=one-pass to the recipe.",
        )
    optimizer.set_master_weights(masters)


def full_weights(optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
    """Let the parameters be their fp32 weights where the optimizer keeps such."""
    return optimizer.full_weights() if isinstance(optimizer, ExtendedOptimizer) else nullcontext()


def has_rounded_weights(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether parameters are 16-bit copies of weights that the optimizer keeps."""
    return isinstance(optimizer, ExtendedOptimizer) and optimizer.has_rounded_weights


def master_weight(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> Tensor | None:
    """Return the fp32 weights of which a parameter is the rounded copy, if there are any."""
    return None if optimizer is None else optimizer.state.get(parameter, {}).get(MASTER)


def update_numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return by name the numbers and flags with which an update is captured or compiled.

    Not the rates, which it reads from tensors, and not what a scheduler keeps in a group.
    """
    return {
        f"{key} of parameter group {index}": group[key]
        for index, group in enumerate(optimizer.param_groups)
        for key in optimizer.defaults
        if key in group and key != "lr" and not _holds_tensor(group[key])
    }


def changed_number(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the name of a number that is not what it was, or ""; those of later groups are new."""
    return next((name for name, number in now.items() if number != before.get(name, number)), "")


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield every parameter's state without its fp32 weights, which are saved as the model's."""
    for parameter, state in unpacked_state(optimizer):
        yield parameter, {key: value for key, value in state.items() if key != MASTER}


def state_keys(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return what an AdamW keeps of a parameter once it has taken a step; of others nothing."""
    adamw = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, OnePassAdamW))
    return frozenset({"step", "exp_avg", "exp_avg_sq"}) if adamw else frozenset()


def clear_moments(optimizer: torch.optim.Optimizer) -> None:
    """Forget all state but the fp32 weights."""
    masters = {p: state[MASTER] for p, state in optimizer.state.items() if MASTER in state}
    optimizer.state.clear()
    optimizer.state.update({p: {MASTER: master} for p, master in masters.items()})


class OnePassAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's groups and state, with `lr` and the step count as tensors on the device.

    It reads and writes every number once. A 16-bit parameter is the rounded copy of fp32 weights in
    the state, which are what is updated: so updates too small for 16 bits add up.
    `set_master_weights` hands over the ones it was rounded from.
    """

    op = "adamw"
    impl = AUTO
    ran = ""
    clips_itself = True
    coefficient: Tensor | None = None  # of the gradients, for the next step alone

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        hyper = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        # capturable: a restored state must keep the step counts on the device.
        super().__init__(params, {"lr": lr, **hyper, "capturable": True})

    @property
    def label(self) -> str:
        """How a Run names the update, with the implementation that ran."""
        return f"one-pass {self.ran}".strip()

    @classmethod
    def from_adamw(cls, optimizer: torch.optim.Optimizer) -> OnePassAdamW:
        """Return the same with the groups of a torch.optim.AdamW that has not taken a step."""
        kind = type(optimizer).__name__
        if type(optimizer) is not torch.optim.AdamW:
            raise Unsupported(
                f"optimizer=one-pass computes AdamW, but this workload is trained by {kind}.",
                "Leave the optimizer out of the recipe.",
            )
        odd = {n for g in optimizer.param_groups for n in ("amsgrad", "maximize") if g.get(n)}
        if odd:
            raise Unsupported(f"optimizer=one-pass knows AdamW without {' and '.join(odd)}.")
        keys = ("params", "lr", "betas", "eps", "weight_decay")
        return cls([{key: group[key] for key in keys} for group in optimizer.param_groups])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its learning rate becomes a tensor of its own, which schedulers fill."""
        super().add_param_group(param_group)
        _place_rate(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; nothing is read on the host."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.ran = adamw_op.choose(self.impl, map(_reals, params))
        if params:
            torch._foreach_add_([self._state(p)["step"] for p in params], 1)
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):  # set by hand
                _place_rate(group)
            beta1, beta2 = group["betas"]
            hyper = adamw_op.Hyperparameters(beta1, beta2, group["eps"], group["weight_decay"])
            given = [(p, p.grad) for p in group["params"] if p.grad is not None]
            weights = [_weight(p, grad, self.state[p]) for p, grad in given]
            adamw_op.update_all(self.ran, weights, hyper, group["lr"], self.coefficient)
        self.coefficient = None
        return loss

    @torch.no_grad()
    def clip(self, params: Iterable[Tensor], max_norm: float, norm: Tensor | None = None) -> Tensor:
        """Let the next step scale the gradients as torch's clip_grad_norm_ does; return their norm.

        The norm is summed in fp32 or better, also for 16-bit gradients, unless it is given.
        """
        if norm is not None:
            self.coefficient = clip_coefficient(norm, max_norm)
            return norm
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                by_dtype.setdefault(p.grad.dtype, []).append(p.grad)
        norms: list[Tensor] = []
        for dtype, grads in by_dtype.items():
            norms += torch._foreach_norm(grads, 2.0, torch.promote_types(dtype, torch.float32))
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self.coefficient = clip_coefficient(norm, max_norm)
        return norm

    def set_master_weights(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Take these fp32 weights for the 16-bit parameters that are their rounded copies."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in masters:
                    self.state[p][MASTER] = masters[p]

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Let the parameters be their fp32 weights, to be saved or replaced; then round them."""
        narrow = {p: (p.data, local(p.data)) for p in self._rounded()}
        for p, (_, part) in narrow.items():
            take_over(part, local(self.state[p][MASTER]))
            replace_data(p, self.state[p][MASTER], local(self.state[p][MASTER]))
        try:
            yield
        finally:
            for p, (data, part) in narrow.items():
                part.copy_(local(self.state[p][MASTER]))
                replace_data(p, data, part)

    @property
    def has_rounded_weights(self) -> bool:
        """Whether parameters are 16-bit copies of weights now, and not the weights themselves."""
        return bool(self._rounded())

    def _rounded(self) -> list[Tensor]:
        """Return the parameters that are rounded copies now."""
        kept = ((p, state[MASTER]) for p, state in self.state.items() if MASTER in state)
        return [p for p, master in kept if p.dtype != master.dtype]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, bit for bit, where torch would round it to 16 bits."""
        masters = {p: state[MASTER] for p, state in self.state.items() if MASTER in state}
        on_device = [isinstance(group["lr"], Tensor) for group in self.param_groups]
        super().load_state_dict(dict(state_dict))
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for p, number in zip(own, saved, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[p][key] = value.detach().to(p.device, copy=True)
        for p, master in masters.items():  # a state without them: the model's have them
            self.state[p].setdefault(MASTER, master)
        for group, is_tensor in zip(self.param_groups, on_device, strict=True):
            if is_tensor:
                _place_rate(group)

    def _state(self, p: Tensor) -> dict[str, Any]:
        """Return a parameter's state, initialized at its first step."""
        state = self.state[p]
        if "step" not in state:
            if p.grad is not None and p.grad.is_sparse:
                raise Unsupported("optimizer=one-pass takes no sparse gradients.")
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            wide = torch.promote_types(p.dtype, torch.float32)
            if p.dtype != wide:
                state.setdefault(MASTER, p.detach().to(wide))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(p, dtype=wide, requires_grad=False)
        return state


def _place_rate(group: dict[str, Any]) -> None:
    device = group["params"][0].device if group["params"] else None
    rate = torch.as_tensor(group["lr"], dtype=torch.float64, device=device)
    group["lr"] = rate.clone() if rate is group["lr"] else rate


def _weight(p: Tensor, grad: Tensor, state: Mapping[str, Any]) -> adamw_op.ParameterState:
    master = _reals(state[MASTER]) if MASTER in state else None
    first, second = _reals(state["exp_avg"]), _reals(state["exp_avg_sq"])
    return adamw_op.ParameterState(_reals(p), master, _reals(grad), first, second, state["step"])


def _reals(x: Tensor) -> Tensor:
    """Return this rank's part; of complex numbers both parts, each updated alone as torch does."""
    part = local(x)
    return torch.view_as_real(part) if part.is_complex() else part
