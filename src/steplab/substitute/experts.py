"""Routed experts of Hugging Face models run as sorted rows in grouped products.

transformers computes a class of stacked experts by any function that its registry knows under the
name in the model's config (`ALL_EXPERTS_FUNCTIONS`). Ours is `steplab`: one counting sort, two
grouped products in the dtype of autocast, sums without atomics, and a backward that keeps tokens
and rows before the activation only (`kernels/experts`). transformers' own `eager` loops over the
experts and waits for each; its `grouped_mm` is not known to autocast and multiplies in fp32.

Nothing is traced here: modules are looked at before the model is compiled. The truth is the code
of the class (`eager`), whichever implementation the model was made with.
"""

# T tokens, K chosen experts, E experts, D width, F inner width, R = T * K rows
from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from steplab.core.run import Substitution
from steplab.kernels import experts as experts_op
from steplab.kernels import grouped_mm as grouped_mm_op
from steplab.kernels.dispatch import AUTO, refusal
from steplab.kernels.experts import ExpertWeights
from steplab.substitute.proof import Forms, Proof, prove_forms
from steplab.trace.lines import line_text

NAME = "steplab"
OWN_CODE = "eager"  # transformers' word for the forward of the class
REPLACED = (None, OWN_CODE, "grouped_mm", "batched_mm")  # others were chosen on purpose
REGISTRY = "transformers.integrations.moe"
MATRICES = ("gate_up_proj", "down_proj")
TOKENS, CHOSEN = 48, 2  # of the proof

# What the model's forward runs under: the autocast of the recipe, or nothing.
Context = Callable[[], AbstractContextManager[Any]]


class GroupedProducts:
    """The grouped product that suits its operands."""

    def choose(self, x_RK: Tensor, w_EKN: Tensor) -> str:
        """Return the name of the implementation that will multiply these."""
        return grouped_mm_op.choose(AUTO, x_RK, w_EKN)

    def __call__(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Return (R, N)."""
        return grouped_mm_op.grouped_mm(self.choose(x_RK, w_EKN), x_RK, w_EKN, offsets_E)


PRODUCTS = GroupedProducts()


def steplab_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return (T, D) of tokens (T, D), chosen experts (T, K) and their weights (T, K).

    `self` is a module of transformers with `gate_up_proj` (E, 2F, D) and `down_proj` (E, D, F).
    """
    kind, dtype = hidden_states.device.type, _product_dtype(hidden_states)
    # torch's grouped product is not known to autocast, so the casts are ours.
    with torch.autocast(kind, enabled=False):
        x_TD = hidden_states.to(dtype)
        w_in_EFD, w_out_EDF = (getattr(self, name).to(dtype) for name in MATRICES)
        weights = ExpertWeights(w_in_EFD, w_out_EDF, "swiglu")
        wide = torch.promote_types(top_k_weights.dtype, torch.float32)
        impl = experts_op.choose(AUTO, x_TD, weights)
        out_TD, _ = experts_op.experts(
            impl, x_TD, top_k_weights.to(wide), top_k_index, weights, PRODUCTS
        )
        return out_TD.to(hidden_states.dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype where it is on; as in torch, it leaves fp64 alone."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


class RegisteredExperts:
    """The rewrite of modules."""

    def replace(self, model: nn.Module, context: Context) -> list[Substitution]:
        """Let the experts run by `steplab` where that is proved; return one entry per module.

        `context` is what the forward will run under. A config decides for all experts that have
        it, so of these all are replaced or none.
        """
        groups: dict[int, list[Any]] = {}
        for module in model.modules():
            if _is_registered(module):
                groups.setdefault(id(module.config), []).append(module)
        if groups:
            sys.modules[REGISTRY].ALL_EXPERTS_FUNCTIONS.register(NAME, steplab_experts)
        return [entry for group in groups.values() for entry in _replace_group(group, context)]


def _is_registered(module: nn.Module) -> bool:
    """Whether transformers asks its registry how to compute a module."""
    return (
        REGISTRY in sys.modules
        and hasattr(type(module), "_apply_gate")
        and hasattr(getattr(module, "config", None), "_experts_implementation")
    )


def _replace_group(modules: list[Any], context: Context) -> list[Substitution]:
    verdicts: dict[Any, Proof | str] = {}  # equal modules are proved once
    for module in modules:
        key = _signature(module)
        if key not in verdicts:
            verdicts[key] = _not_read(module) or _prove(module, context)
    is_proved = all(isinstance(verdict, Proof) for verdict in verdicts.values())
    if is_proved:
        modules[0].config._experts_implementation = NAME
    entries = []
    for module in modules:
        verdict = verdicts[_signature(module)]
        code = inspect.unwrap(type(module).forward).__code__
        place = line_text(code.co_filename, code.co_firstlineno, code.co_qualname)
        if isinstance(verdict, Proof) and is_proved:
            what = f"experts {_implementation(module, context)}"
            entries.append(Substitution("experts", place, what, str(verdict)))
        else:
            others = "other experts of its config cannot be replaced"
            reason = verdict if isinstance(verdict, str) else others
            entries.append(Substitution("experts", place, reason=reason))
    return entries


def _signature(module: nn.Module) -> Any:
    sizes = [(name, w.shape, w.dtype, w.device) for name, w in module.named_parameters()]
    return type(module), repr(module), *sizes


def _not_read(module: Any) -> str:
    """Return why a module is not understood, or ""."""
    asked = module.config._experts_implementation
    if asked not in REPLACED:
        return f"the model asks for {asked!r}"
    held = {name: tuple(w.shape) for name, w in module.named_parameters()}
    if set(held) != set(MATRICES) or list(module.buffers()):
        return f"it holds {', '.join(sorted(held))} and not just {' and '.join(MATRICES)}"
    (E, rows, D), down = held["gate_up_proj"], held["down_proj"]
    if down != (E, D, rows // 2) or rows % 2:
        return f"its matrices are {held['gate_up_proj']} and {down}: not (E, 2F, D) and (E, D, F)"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    return ""


def _prove(module: Any, context: Context) -> Proof | str:
    last = experts_op.PREFERENCE[-1]  # in torch alone, which reads the routing on the host
    if module.gate_up_proj.is_cuda and _implementation(module, context) == last:
        fused = experts_op.IMPLS["fused"]
        return f"experts 'fused' {refusal(fused, *_operands(module, context))}"

    def forms() -> Forms:
        return {
            (name, wide): _form(module, implementation, context, wide)
            for name, implementation in (("plain", OWN_CODE), ("ours", NAME))
            for wide in (False, True)
        }

    return prove_forms(forms, lambda scale, seed: _inputs(module, context, scale, seed))


def _form(
    module: Any, implementation: str, context: Context, wide: bool
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the module as a function of what `_inputs` gives."""

    def run(x_TD: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, choice: Tensor) -> Any:
        matrices = dict(zip(MATRICES, (w_in, w_out), strict=True))
        around = torch.autocast(x_TD.device.type, enabled=False) if wide else context()
        with _implemented_by(implementation, module.config), around:
            return (functional_call(module, matrices, (x_TD, choice, weights_TK)),)

    return run


def _inputs(module: Any, context: Context, scale: float, seed: int) -> list[Tensor]:
    """Return tokens, routing weights, both matrices and the chosen experts."""
    (E, rows, D), generator = module.gate_up_proj.shape, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights_TK, experts_TK = normal(TOKENS, E).softmax(-1).topk(min(CHOSEN, E))
    # The first matrix grows too: a bound on gate or up shows among the largest.
    w_in_EFD = normal(E, rows, D) * scale * D**-0.5
    w_out_EDF = normal(E, D, rows // 2) * (rows // 2) ** -0.5
    dtype, device = module.gate_up_proj.dtype, module.gate_up_proj.device
    with context():
        routed_TK = weights_TK.to(_product_dtype(module.gate_up_proj))  # that of router logits
    floats = [t.to(dtype) for t in (normal(TOKENS, D) * scale, w_in_EFD, w_out_EDF)]
    return [t.to(device) for t in (floats[0], routed_TK, *floats[1:], experts_TK)]


@contextlib.contextmanager
def _implemented_by(name: str, config: Any) -> Iterator[None]:
    before = config._experts_implementation
    config._experts_implementation = name
    try:
        yield
    finally:
        config._experts_implementation = before


def _implementation(module: Any, context: Context) -> str:
    """Return which of our implementations will compute a module."""
    return experts_op.choose(AUTO, *_operands(module, context))


def _operands(module: Any, context: Context) -> tuple[Tensor, ExpertWeights]:
    """Return one token and the weights as an implementation will see them, without a copy."""
    with context():
        dtype = _product_dtype(module.gate_up_proj)
    w_in_EFD, w_out_EDF = (
        w.detach().new_empty(1, dtype=dtype).expand(w.shape)
        for w in (getattr(module, name) for name in MATRICES)
    )
    return w_in_EFD.new_empty(1, w_in_EFD.shape[-1]), ExpertWeights(w_in_EFD, w_out_EDF, "swiglu")


MODULE_REWRITE = RegisteredExperts()
