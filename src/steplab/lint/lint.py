"""Run some steps of a spec under observation and list their hazards."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics
from torch.utils._pytree import keystr, tree_flatten_with_path

from steplab.core import RunSpec
from steplab.core.errors import MeasurementError, SteplabError, UserError
from steplab.lint.hazards import (
    BREAK,
    KEEP,
    READ,
    RECOMPILES,
    STEP_FILE,
    VARIES,
    WAIT,
    Hazard,
    LineWait,
    ObservedStep,
    OpLocation,
)
from steplab.probes.compilation import (
    GraphBreak,
    graph_count,
    recorded_graph_breaks,
    recorded_recompiles,
)
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import error_sentence
from steplab.step.graphed_call import sync_debug_mode
from steplab.step.step import Step
from steplab.trace.lines import Frame, innermost_line, is_framework, user_line
from steplab.trace.user_frames import calling_line, error_line

SHOWN_LINES = 12  # that vary in size: what follows from one line is not a fault of its own
HIDING = ("compile", "cuda_graph")  # techniques under which torch dispatches no operators
GROWS = "the caching allocator splits and grows, compiled code is compiled again, no graph fits"
SIZE = (
    "it sizes what follows: take sizes that do not vary (pad, or a capacity for each), or a "
    "grouped product, which reads its offsets on the device"
)
PAD = "pad to a fixed size, or mask instead of selecting"
BREAK_COST = "torch.compile cuts the model in two here: nothing fuses across, and fullgraph fails"
CAPTURED = "torch.compile cuts the model in two here, unless fullgraph=True makes it one graph"
ONE_GRAPH = "nothing computes behind it, so one graph is compiled; but fullgraph fails"
BREAK_REMEDY = "take it out of the forward pass, or write it with tensor operations"
CALLS = 4  # what a first call leaves behind is another state; what changes in all of them goes on
RECOMPILE_COST = "torch.compile compiles again in every step, and gives up or fails after 8 times"
RECOMPILE_REMEDY = "keep what changes as a tensor, or outside of the model"


def lint(spec: RunSpec, steps: int) -> list[Hazard]:
    """Run `steps` steps, each on another batch, and return their hazards in the order met."""
    _refuse_what_hides_operators(spec)
    try:
        step = assemble(spec)
        feed = micro_batches(step, spec)
        with _first_call(step.model) as call:
            step(next(feed))  # not observed: what is built lazily, once, is not part of a step
        observed, shapes = [], []
        for _ in range(steps):
            batch = next(feed)
            shapes.append(_batch_shapes(batch))
            observed.append(ObservedStep())
            with observed[-1].observing():
                step(batch)
        hazards = [*_waits(observed), *_varying(observed, shapes)]
        if step.parts.device.type == "cuda":
            hazards += _silent_waits(step, next(feed), {h.line for h in hazards})
        for look in (graph_breaks, recompilations) if call else ():
            hazards += look(step.model, *call)
        return hazards
    except SteplabError:
        raise
    except Exception as error:
        raise MeasurementError(f"The step fails: {error_sentence(error)}.") from error


def _refuse_what_hides_operators(spec: RunSpec) -> None:
    hiding = [name for name in HIDING if name in spec.recipe.techniques]
    if hiding:
        raise UserError(
            f"lint observes a step operator by operator, which {' and '.join(hiding)} would hide.",
            f"Add {','.join(f'{name}=off' for name in hiding)} to the recipe.",
        )


def _waits(observed: Sequence[ObservedStep]) -> list[Hazard]:
    total = sum((one.waits for one in observed), Counter())
    sizes = _varying_sizes(observed)
    return [
        Hazard(
            wait.kind,
            line,
            wait.op,
            wait.why,
            SIZE if _is_a_size((line, wait), observed, sizes) else wait.remedy,
            count / len(observed),
        )
        for (line, wait), count in total.items()
    ]


def _is_a_size(wait: LineWait, observed: Sequence[ObservedStep], sizes: Sequence[set[int]]) -> bool:
    """Whether a number that is read there is the size of a result, in each step that reads any."""
    steps = [(one.read[wait], known) for one, known in zip(observed, sizes, strict=True)]
    return any(read for read, _ in steps) and all(read & known for read, known in steps if read)


def _varying_sizes(observed: Sequence[ObservedStep]) -> list[set[int]]:
    """Return for each step the sizes of dimensions at varying lines that not all steps have."""
    keys = _varying_places(observed)
    each = [
        {size for key in keys for shape in one.shapes[key] for size in shape} for one in observed
    ]
    return [sizes - each[0].intersection(*each) for sizes in each]


def _varying_places(observed: Sequence[ObservedStep]) -> list[OpLocation]:
    """Return where results have other sizes in one step than in another, of those that ran it."""
    keys = dict.fromkeys(key for one in observed for key in one.shapes)
    ran = {key: [one.shapes[key] for one in observed if one.shapes[key]] for key in keys}
    return [key for key in keys if len(set(map(frozenset, ran[key]))) > 1]


def _varying(observed: Sequence[ObservedStep], batches: Sequence[Any]) -> list[Hazard]:
    """Return the lines whose results differ in size between steps; first of all the batch."""
    for path in batches[0]:
        sizes = {batch.get(path) for batch in batches}
        if len(sizes) > 1:
            why = f"{_sizes(sizes)} in {len(batches)} steps: {GROWS}"
            return [Hazard(VARIES, "batches()", f"batch{path}", why, PAD)]
    found: dict[str, Hazard] = {}
    for line, op in _varying_places(observed):
        sizes = {shape for one in observed for shape in one.shapes[line, op]}
        found.setdefault(line, Hazard(VARIES, line, op, f"{_sizes(sizes)}: {GROWS}", PAD))
    return list(found.values())[:SHOWN_LINES]


def _sizes(sizes: set[Any]) -> str:
    shown = [str(size) for size in sorted(sizes, key=str)[:3]]
    return ", ".join(shown) + (" ..." if len(sizes) > 3 else "")


def _batch_shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = tree_flatten_with_path(batch)
    return {keystr(path): tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor)}


def _silent_waits(step: Step, batch: Any, known: set[str]) -> list[Hazard]:
    """Let torch warn of waits in one more step; return those at lines that are not known yet."""
    lines: Counter[str] = Counter()

    def note(message: Any, *place: Any, **more: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines[calling_line(STEP_FILE) or "torch's own code"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        with sync_debug_mode("warn"):
            step(batch)
    unseen = {line: count for line, count in lines.items() if line not in known}
    return [Hazard(WAIT, line, "a CUDA call", READ, KEEP, n) for line, n in unseen.items()]


@contextlib.contextmanager
def _first_call(model: torch.nn.Module) -> Iterator[list[Any]]:
    """Yield a list that gets the arguments of the model's first call inside."""
    call: list[Any] = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        call.extend([args, kwargs] if not call else [])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield call
    finally:
        hook.remove()


def graph_breaks(model: nn.Module, args: Any, kwargs: Any) -> list[Hazard]:
    """Trace one call of the model and return every place where dynamo ends a graph.

    Breaks with nothing to compute between them count too: they show as soon as the others go. Where
    the compiler takes the call as one graph with and without fullgraph=True, there are none.
    """
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)  # dynamo warns of some breaks itself
    torch._dynamo.reset()
    clear_compilation_metrics()
    try:
        graphs = graph_count()
        torch.compile(model, backend="eager")(*args, **kwargs)
        breaks, cut = list(recorded_graph_breaks()), graph_count() - graphs > 1
        whole = bool(breaks) and _compiles_whole(model, args, kwargs)
        if whole and not cut:
            return []
        why = CAPTURED if whole else BREAK_COST if cut else ONE_GRAPH
        return list(dict.fromkeys(_break_hazard(one, why) for one in breaks))
    except Exception as error:
        reason = f"cannot be traced: {_first_line(str(error))}"
        return [Hazard(BREAK, error_line(error), reason, BREAK_COST, BREAK_REMEDY)]
    finally:
        log.setLevel(level)
        torch._dynamo.reset()


def recompilations(model: nn.Module, args: Any, kwargs: Any) -> list[Hazard]:
    """Return the guards that fail in one and the same call, however often it is repeated."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    compiled, seen = torch.compile(model, backend="eager"), 0
    try:
        for _ in range(CALLS):
            seen = len(list(recorded_recompiles()))
            compiled(*args, **kwargs)
    except Exception:
        return []  # graph_breaks tells why it cannot be traced
    finally:
        torch._dynamo.reset()
    return [
        Hazard(RECOMPILES, one.line or one.begins, one.guard, RECOMPILE_COST, RECOMPILE_REMEDY)
        for one in list(recorded_recompiles())[seen:]
    ]


def _compiles_whole(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether the call compiles with fullgraph=True."""
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True)(*args, **kwargs)
    except Exception:
        return False
    return True


def _break_hazard(found: GraphBreak, why: str) -> Hazard:
    """Name the line of the break, and the innermost of the user's own where that is a library's."""
    file, number, function = next(
        (frame for frame in found.frames if not is_framework(_call(frame))), found.frames[0]
    )
    here = f"{'/'.join(file.split('/')[-2:])}:{number} ({function})"
    own, user = innermost_line(found.frames), user_line(_call((file, number, function)))
    line = user or (f"{here}, called at {own}" if own else here)
    return Hazard(BREAK, line, _first_line(found.reason), why, BREAK_REMEDY)


def _call(frame: Frame) -> str:
    """Return a frame as the profiler names a call."""
    return f"{frame[0]}({frame[1]}): {frame[2]}"


def _first_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return "branch by a value" if first.startswith("generic_jump") else first
