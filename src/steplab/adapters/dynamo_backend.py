"""`torch.compile(model, backend="steplab")`: Inductor with what `substitute=all` does to graphs.

torch finds it by the entry point group `torch_dynamo_backends` wherever steplab is installed, also
where a library takes only the name of a backend. Compile the loss together with the model: only
then are the logits in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch.fx import GraphModule

from steplab.substitute.backend import SubstitutingBackend
from steplab.techniques.substitute import graph_kinds, kinds_of_all


def steplab_backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile a graph that Dynamo hands over, with whatever can be proved in it replaced."""
    return substituting_backend()(graph, inputs)


@cache
def substituting_backend() -> SubstitutingBackend:
    """Return the backend of this process; its `found` lists every place that was looked at."""
    return SubstitutingBackend([kind for kind in graph_kinds() if kind in kinds_of_all()])
