"""A torch.compile backend that substitutes first, then hands the graph to another backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch._dynamo import lookup_backend
from torch._inductor import list_mode_options
from torch.fx import GraphModule, Node

from steplab.core import registry
from steplab.core.run import Substitution
from steplab.substitute.match import Declined, Match, Rewrite, between, changes_in_place, place_of
from steplab.substitute.proof import prove


class SubstitutingBackend:
    """Substitutes in every graph that Dynamo hands over, before another backend compiles it.

    One object for all that is compiled: Dynamo shares a graph between equal blocks only where the
    backend is the same.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.rewrites: Mapping[str, Rewrite] = {
            kind: registry.load("steplab.substitute", kind, "REWRITE") for kind in kinds
        }
        self.graphs: list[list[Substitution]] = []
        self.before("inductor")

    def before(self, backend: str, mode: str = "default") -> SubstitutingBackend:
        """Hand the graphs to this backend; a mode is Inductor's. Returns itself."""
        self.config: dict[str, Any] = {}
        compile_graph: Any = lookup_backend(backend)
        if backend == "inductor" and mode != "default":
            self.config = list_mode_options(mode)
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


def substitute(graph: GraphModule, rewrites: Mapping[str, Rewrite]) -> list[Substitution]:
    """Replace in place what can be proved; return every place that was looked at."""
    found: list[Substitution] = []
    for name, rewrite in rewrites.items():
        for match in list(rewrite.find(graph)):
            found.append(_tried(name, match))
    graph.recompile()
    return found


def _tried(name: str, match: Match | Declined) -> Substitution:
    if isinstance(match, Match) and _changed_meanwhile(match):
        match = Declined(match.output, "a tensor is changed in place in between")
    if isinstance(match, Match):
        verdict = prove(match)
        if not isinstance(verdict, Declined):
            place = place_of(match.output)
            _replace(match)
            return Substitution(name, place, match.what, str(verdict))
        match = verdict
    return Substitution(name, place_of(match.anchor), reason=match.reason)


def _changed_meanwhile(match: Match) -> bool:
    interior = match.interior
    return any(changes_in_place(node) for node in between(interior[0], match.output))


def _replace(match: Match) -> None:
    graph = match.output.graph
    with graph.inserting_before(match.output):
        new = match.emit(graph, match.inputs)
    new.meta = dict(match.output.meta)
    match.output.replace_all_uses_with(new)
    _erase_unused(match.output)


def _erase_unused(node: Node) -> None:
    """Erase a node that nobody uses, and what was only there for it."""
    if node.users or node.op not in ("call_function", "call_method"):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unused(source)
