"""Both forms of a part of a graph, run side by side: values and gradients, in fp64 and as they are.

In fp64 they must agree to the last digits; a kernel that does not take fp64 is stood in for by the
implementation of its op in plain torch. In the dtypes of the model the new form may be as far
from the fp64 result as the old one is, times ALLOWED. Inputs have three scales, so that a constant
inside (an eps, a bound) shows in at least one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from steplab.kernels.fp64_masks import Fp64Masks
from steplab.substitute.match import Declined, Match, is_method, value_of
from steplab.substitute.modes import autocasts_around

SCALES = (1e-3, 1.0, 8.0)
FP64 = 1e-10  # largest difference in fp64, relative to the norm of a result
ALLOWED = 2.0
SLACK = 32 * torch.finfo(torch.float32).eps  # where the old form is exact by luck
CASTS = ("float", "half", "bfloat16")
SIZED = ("view", "reshape", "expand")  # methods that are given sizes


@dataclass(frozen=True)
class Proof:
    """Largest differences over values and gradients at all scales, relative to norms."""

    fp64: float  # between both forms
    plain: float  # of the old form from its fp64 result
    ours: float  # of the new form from the same

    def __str__(self) -> str:
        own = f"own dtype {self.ours:.1e} where the model's code has {self.plain:.1e}"
        return f"fp64 {self.fp64:.0e}, {own}"


# Both forms, "plain" and "ours", each as the model runs it and (True) in fp64.
Forms = Mapping[tuple[str, bool], Callable[..., Sequence[Tensor]]]


def prove(match: Match) -> Proof | Declined:
    """Run a match and its replacement; return how far they are apart, or why it cannot be used."""

    def forms() -> Forms:
        return {
            (name, wide): _extract(match, build, wide)
            for name, build in (("plain", _copy_interior), ("ours", _emit_replacement))
            for wide in (False, True)
        }

    traced = [value_of(output).dtype for output in match.outputs]
    found = prove_forms(forms, partial(_inputs, match), traced)
    return Declined(match.outputs[0], found) if isinstance(found, str) else found


def prove_forms(
    forms: Callable[[], Forms],
    inputs: Callable[[float, int], list[Tensor]],
    dtypes: Sequence[torch.dtype] = (),
) -> Proof | str:
    """Compare both forms on inputs made for a scale and a seed; return why they are not the same.

    `dtypes` are those that the results must have, where they are known.
    """
    with _disable_current_modes(), torch.enable_grad():
        try:
            return _compare(forms(), inputs, dtypes)
        except Exception as error:
            text = " ".join(str(error).split())[:120]
            return f"could not be run: {type(error).__name__}: {text}"


def _compare(
    forms: Forms, inputs: Callable[[float, int], list[Tensor]], traced: Sequence[torch.dtype]
) -> Proof | str:
    proofs: list[Proof] = []
    for number, scale in enumerate(SCALES):
        own = inputs(scale, number)
        wide = [t.double() if t.is_floating_point() else t for t in own]
        truth = _results(forms["plain", True], wide)
        plain, ours = (_results(forms[name, False], own) for name in ("plain", "ours"))
        if not all(bool(t.isfinite().all()) for t in (*truth, *plain)):
            continue  # the model's own code overflows there
        dtypes = [[t.dtype for t in results] for results in (plain, ours)]
        if dtypes[0] != dtypes[1] or dtypes[0][: len(traced)] != [*traced]:
            return f"results would be of {dtypes[1][0]} and not of {[*traced, *dtypes[0]][0]}"
        fp64 = max(_differences(_results(forms["ours", True], wide), truth))
        if not fp64 <= FP64:
            return f"not the same: they differ by {fp64:.1e} in fp64"
        errors = list(zip(_differences(plain, truth), _differences(ours, truth), strict=True))
        worse = [pair for pair in errors if not pair[1] <= ALLOWED * pair[0] + SLACK]
        if worse:
            return f"less exact: {worse[0][1]:.1e} from fp64 instead of {worse[0][0]:.1e}"
        proofs.append(Proof(fp64, *(max(column) for column in zip(*errors, strict=True))))
    if len(proofs) < 2:
        return "its results are finite at fewer than two scales"
    return Proof(*(max(getattr(proof, name) for proof in proofs) for name in Proof.__annotations__))


def _differences(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Return the difference of every tensor, relative to its norm."""
    return [
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip(found, truth, strict=True)
    ]


def _results(form: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a form's values and its gradients by all inputs of floats, along fixed directions."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    values = form(*leaves)
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v) for v in values]
    wanted = [t for t in leaves if t.requires_grad]
    gradients = torch.autograd.grad(values, wanted, along, materialize_grads=True)
    return [*(value.detach() for value in values), *gradients]


def _inputs(match: Match, scale: float, seed: int) -> list[Tensor]:
    # Drawn where they are used: a CPU takes seconds for the 260 million weights of a Llama's head.
    device = value_of(match.outputs[0]).device
    draws = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    made = []
    for node in match.inputs:
        value = value_of(node)
        shape = match.small_shapes.get(node, tuple(value.shape))
        if node in match.integers:
            below, special = match.integers[node]
            numbers = torch.randint(0, below, shape, **draws)
            rare = torch.rand(shape, **draws) < 0.2
            made.append(torch.where(rare, special, numbers).to(value.device, value.dtype))
        else:
            numbers = torch.randn(shape, **draws) * scale
            made.append(numbers.to(value.device, value.dtype))
    return made


Build = Callable[[Match, Graph, Sequence[Node], nn.Module, bool], tuple[Node, ...]]


def _extract(match: Match, build: Build, wide: bool) -> Callable[..., Any]:
    """Return one form as a function of the inputs, small, and in fp64 where `wide`."""
    root, graph = nn.Module(), Graph()
    inputs = [graph.placeholder(f"input_{i}") for i in range(len(match.inputs))]
    graph.output(build(match, graph, inputs, root, wide))
    for node in graph.nodes:
        _adapt(node, match, wide)
    run = GraphModule(root, graph)
    device = value_of(match.outputs[0]).device.type
    autocasts = [(device, None, False)] if wide else autocasts_around(match.outputs[0])

    def form(*tensors: Tensor) -> Any:
        with contextlib.ExitStack() as stack:  # the model's autocasts inside the step's; or none
            for arguments in autocasts:
                stack.enter_context(torch.autocast(*arguments))
            if wide:
                stack.enter_context(Fp64Masks())
            return run(*tensors)

    return form


def _copy_interior(
    match: Match, graph: Graph, inputs: Sequence[Node], root: nn.Module, wide: bool
) -> tuple[Node, ...]:
    copies: dict[Node, Node] = dict(zip(match.inputs, inputs, strict=True))
    for number, (node, value) in enumerate(match.constants.items()):
        root.register_buffer(f"constant_{number}", value)
        copies[node] = graph.get_attr(f"constant_{number}")
    for node in match.interior:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return tuple(copies[output] for output in match.outputs)


def _emit_replacement(
    match: Match, graph: Graph, inputs: Sequence[Node], root: nn.Module, wide: bool
) -> tuple[Node, ...]:
    emit = match.emit_wide if wide and match.emit_wide is not None else match.emit
    return emit(graph, inputs)


def _adapt(node: Node, match: Match, wide: bool) -> None:
    """Give a copied node small sizes, no dropout and, where `wide`, fp64 for every float."""
    if node.op not in ("call_function", "call_method"):
        return
    if "dropout_p" in node.kwargs:
        node.update_kwarg("dropout_p", 0.0)
    if is_method(node, *SIZED):
        sizes: Any = node.args[1:]
        flat = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if all(isinstance(size, int) for size in flat) and len(flat) > 1:
            node.args = (node.args[0], match.shrink(flat))
    if wide:
        if node.op == "call_method" and node.target in CASTS:
            node.target = "double"
        node.args = map_aggregate(node.args, _widened)
        node.kwargs = map_aggregate(node.kwargs, _widened)


def _widened(value: Any) -> Any:
    is_float = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_float else value
