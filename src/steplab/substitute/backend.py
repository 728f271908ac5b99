"""A torch.compile backend that substitutes first, then hands the graph to another backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._inductor import list_mode_options
from torch.fx import GraphModule, Node

from steplab.core import registry
from steplab.core.run import Substitution
from steplab.substitute.match import Declined, Match, Rewrite, changes_in_place, place_of
from steplab.substitute.modes import is_transformed, switches_mode
from steplab.substitute.proof import prove


class SubstitutingBackend:
    """Substitutes in every graph that Dynamo hands over, before another backend compiles it.

    One object for all that is compiled: Dynamo shares a graph between equal blocks only where the
    backend is the same.
    """

    def __init__(self, kinds: Sequence[str], in_modules: Sequence[Substitution] = ()) -> None:
        self.rewrites: Mapping[str, Rewrite] = {
            kind: registry.load("steplab.substitute", kind, "REWRITE") for kind in kinds
        }
        # What was found in each graph, and before any was traced.
        self.graphs: list[list[Substitution]] = [[*in_modules]]
        self.before("inductor")

    def before(
        self, backend: str, mode: str = "default", options: Mapping[str, Any] | None = None
    ) -> SubstitutingBackend:
        """Hand the graphs to this backend; mode and options are Inductor's. Returns itself."""
        self.config: dict[str, Any] = {}
        name_operators_only()
        compile_graph: Any = lookup_backend(backend)
        if backend == "inductor" and (mode != "default" or options):
            self.config = {**list_mode_options(mode), **(options or {})}
            compile_graph = partial(compile_graph, config_patches=self.config)
        self.compile_graph: Callable[..., Any] = compile_graph
        return self

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        """Change the graph where it can be proved, and compile it."""
        self.graphs.append(substitute(graph, self.rewrites))
        return self.compile_graph(graph, inputs)

    def reset(self) -> None:
        """Forget Inductor's CUDA graphs; Dynamo asks every backend to, when it is reset."""
        if self.config.get("triton.cudagraphs"):
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()

    @property
    def found(self) -> tuple[Substitution, ...]:
        """Every place that was looked at, once, with its count.

        Of several graphs that have it, the largest count: a function that is compiled twice runs in
        one of its forms.
        """
        most: dict[Substitution, int] = {}
        for entries in self.graphs:
            for entry in entries:
                most[entry] = max(most.get(entry, 0), entries.count(entry))
        return tuple(replace(entry, count=count) for entry, count in most.items())


def name_operators_only() -> None:
    """Keep Inductor before torch 2.13 from writing out what an operator that it meets first is of.

    It does so for a log that nobody reads, and every operand is written with all that it was
    computed from: along a residual stream the text doubles with every norm that is an op of ours.
    nanoGPT's twelve layers were not compiled after a minute and a half.
    """
    if torch.__version__ < "2.13":
        from torch._inductor.exc import OperatorIssue

        OperatorIssue.operator_str = staticmethod(  # type: ignore[method-assign]
            lambda target, args, kwargs: f"target: {target}"
        )


def substitute(graph: GraphModule, rewrites: Mapping[str, Rewrite]) -> list[Substitution]:
    """Replace in place what can be proved; return every place that was looked at.

    A rewrite goes on looking after each replacement: the next match may take its result.
    """
    found: list[Substitution] = []
    for name, rewrite in rewrites.items():
        try:
            found.extend(_tried(name, match) for match in rewrite.find(graph))
        except Exception as error:  # of a form that nobody has thought of: the model comes first
            text = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            found.append(Substitution(name, "the rest of a graph", reason=f"not read: {text}"))
    graph.recompile()
    return found


def _tried(name: str, match: Match | Declined) -> Substitution:
    if isinstance(match, Match):
        verdict = _cannot_stand(match) or prove(match)
        if not isinstance(verdict, Declined):
            place = place_of(match.outputs[0])
            _replace(match)
            return Substitution(name, place, match.what, str(verdict))
        match = verdict
    return Substitution(name, place_of(match.anchor), reason=match.reason)


def _cannot_stand(match: Match) -> Declined | None:
    """Return why the replacement cannot be put into the graph at its one place."""
    order = {node: number for number, node in enumerate(match.outputs[0].graph.nodes)}
    interior, point = match.interior, _place_for(match)
    if any(order[node] >= order[point] for node in match.inputs):
        return Declined(match.outputs[0], "a result is used before all inputs are there")
    last = max(order[point], *(order[output] + 1 for output in match.outputs))
    between = list(order)[order[interior[0]] : last]
    if any(changes_in_place(node) for node in between):
        return Declined(match.outputs[0], "a tensor is changed in place in between")
    if not match.ignores_modes and any(switches_mode(node) for node in between):
        return Declined(match.outputs[0], "gradients or autocast are switched in between")
    if is_transformed(interior[0]):
        return Declined(match.outputs[0], "torch.func maps or differentiates it")
    return None


def _place_for(match: Match) -> Node:
    """Return the node before which the replacement stands.

    It follows the part, where modes such as no_grad are still those of the part; or it is the first
    one that uses a result, if that stands in between.
    """
    interior = match.interior
    users = {user for output in match.outputs for user in output.users}.difference(interior)
    stops = {interior[-1].next, *users}
    return next(node for node in match.outputs[0].graph.nodes if node in stops)


def _replace(match: Match) -> None:
    graph, interior = match.outputs[0].graph, set(match.interior)
    with graph.inserting_before(_place_for(match)):
        new = match.emit(graph, match.inputs)
    for old, node in zip(match.outputs, new, strict=True):
        node.meta = dict(old.meta)
        old.replace_all_uses_with(node, delete_user_cb=lambda user: user not in interior)
    for output in match.outputs:
        _erase_unused(output)


def _erase_unused(node: Node) -> None:
    """Erase a node that nobody uses, and what was only there for it."""
    if node.users or node.op not in ("call_function", "call_method") or node._erased:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unused(source)
