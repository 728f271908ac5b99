"""Which operators of a step its update needs: one more step, written down, and what that tells.

Going back from what outlives the step (weights, optimizer state, buffers) finds the operators that
it is for; numbering values by the operator and the numbers of its inputs finds those that compute
what was computed before.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from steplab.core import Dataflow
from steplab.core.dataflow import (
    BACKWARD_AGAIN,
    CAST_AGAIN,
    CAST_BACK,
    CONSTANT,
    COPIED_OVER,
    COPIED_ROWS,
    IDLE_GRADIENT,
    IDLE_WEIGHT,
    MADE_BEFORE,
    NEEDED,
    NOT_TAKEN,
    PARTLY_USED,
    PENALTY,
    POOLED,
    READ_ONLY,
    ROWS_COPIED,
    TIMES_ZERO,
    UNCHANGED,
    UNMOVED,
    UNUSED,
    IdleGradients,
)
from steplab.probes.compilation import graph_count
from steplab.probes.compiled_calls import OUTSIDE, CompiledCalls
from steplab.probes.copied_rows import times_computed
from steplab.probes.equal_weights import equal_weights
from steplab.probes.graph_waste import graph_waste
from steplab.probes.holders import python_tensors
from steplab.probes.idle_buffers import data_kinds, idle_buffers, idle_copies, kind_of
from steplab.probes.known_tensors import held_tensors
from steplab.probes.model_calls import feeds_itself, model_calls
from steplab.probes.op_tensors import is_plain, storage_number
from steplab.probes.probe import Subject
from steplab.probes.read_parts import unread_writers
from steplab.probes.unchanged import OlderTensors
from steplab.probes.untrained import idle_gradients, idle_state
from steplab.probes.value_graph import (
    FILLS,
    WatchedOp,
    behind,
    constants,
    copied_over,
    penalties,
    repeated,
)
from steplab.probes.watched_step import MOST_OPS, OVERWRITES, WatchedStep
from steplab.probes.zeros import CAST

MANY = 1.5  # times that a row is computed: windows that overlap by half share nearly all rows


def record_dataflow(subject: Subject) -> tuple[Dataflow | None, set[str]]:
    """Run two more steps; return what the second's operators are for and the switches that were on.

    None if there are too many operators. Compiled code runs as it is written; a step that replays
    a CUDA graph cannot be watched.
    """
    older = OlderTensors()
    batches = next(subject.feed)
    with CompiledCalls().run_eagerly() if graph_count() else contextlib.nullcontext(), older:
        subject.step(batches)
    batches = next(subject.feed)
    calls = CompiledCalls()
    watched = WatchedStep(held_tensors(), calls, older, batches)
    with (
        calls.run_eagerly() if graph_count() else contextlib.nullcontext(),
        model_calls(lambda: len(watched.seen.ops)) as models,
        watched,
    ):
        output = subject.step(batches)
    found = _dataflow(watched)
    if found is not None:
        found = replace(found, feeds_itself=feeds_itself(watched.seen.ops, models))
    del output  # what it holds was alive until now
    return found, watched.switches


def _dataflow(step: WatchedStep) -> Dataflow | None:
    """Return a verdict about every operator, and what is held for nothing."""
    ops = step.seen.ops
    if len(ops) >= MOST_OPS or not any(op.lasts for op in ops):
        return None
    _forget_dropped_gradients(step)
    kept = _still_held(step)
    verdicts = _Judge(step, kept).verdicts()
    alone = [i for i, op in enumerate(ops) if op.call == OUTSIDE]
    names = {name: i for i, name in enumerate(dict.fromkeys(ops[i].name for i in alone))}
    _look_at_outputs(step, kept)
    touched = step.values.keys() | step.before.storages
    return Dataflow(
        tuple(names),
        tuple(names[ops[i].name] for i in alone),
        "".join(verdicts[i] for i in alone),
        step.seen.padding,
        idle_buffers(step.values.keys()),
        graph_waste(ops, verdicts, step.calls, step.borders),
        fresh=step.seen.fresh,
        idle_copies=idle_copies(touched, step.older),
        tied_tables=tuple(n for key, n in step.tables.items() if key in step.multiplied),
        idle_gradients=_idle_gradients(step, verdicts),
        frozen_casts=step.casts.result(),
        equal_weights=equal_weights(_read_only(step, held_tensors().frozen)),
        idle_state=idle_state(touched),
        ignored=step.seen.ignored,
    )


def _read_only(step: WatchedStep, storages: frozenset[int]) -> set[int]:
    """Return those that the step has read and not written."""
    known = {key: step.values[key] for key in storages if key in step.values}
    return {key for key, value in known.items() if value.writer < 0}


def _idle_gradients(step: WatchedStep, verdicts: str) -> tuple[IdleGradients, ...]:
    written = {key for key, value in step.values.items() if value.writer >= 0}
    unused = {key for key in written if verdicts[step.values[key].writer] == UNUSED}
    return idle_gradients(step.values.keys() | step.before.storages, written, unused)


def _look_at_outputs(step: WatchedStep, kept: set[int]) -> None:
    """Note who made the outputs of compiled code, and which of them somebody holds."""
    for output in step.calls.outputs:
        value = step.values.get(output.storage)
        writer = value.writer if value is not None else -1
        if writer >= 0 and step.seen.ops[writer].call == output.call:
            step.borders.makers[output.storage] = writer
    step.borders.read |= kept


def _forget_dropped_gradients(step: WatchedStep) -> None:
    """Take back that writing to a gradient lasts, where `zero_grad` has freed it since."""
    for index, storages in step.gradients.items():
        if all(step.storages[key].expired() for key in storages):
            step.seen.ops[index].lasts = False


def _still_held(step: WatchedStep) -> set[int]:
    """Return the storages of results that somebody holds, but gradients that nobody uses."""
    held = {key for key, storage in step.storages.items() if not storage.expired()}
    idle = held_tensors().idle_gradients
    return {
        key
        for key, value in step.values.items()
        if key in held and value.writer >= 0 and key not in idle
    }


def _carried_over(step: WatchedStep, kept: set[int]) -> set[int]:
    """Return the writers of what is kept and looks like something that the step reads.

    That is older and no module's: a state that goes on, or experience that is replayed.
    """
    carried = {kind for kind in data_kinds(step.older) if math.prod(kind[0]) > 1}
    alike = (t for t in python_tensors() if is_plain(t) and kind_of(t) in carried)
    storages = kept & {storage_number(tensor) for tensor in alike}
    return {step.values[storage].writer for storage in storages}


class _Judge:
    """Tells of every operator of a watched step what it was for."""

    def __init__(self, step: WatchedStep, kept: set[int]) -> None:
        """`kept`: storages of results that somebody holds."""
        self.step, self.kept = step, kept
        self.held = {step.values[key].writer for key in kept}
        self.ops = ops = self._without_unread_parts()
        lasting = [*_carried_over(step, kept), *(i for i, op in enumerate(ops) if op.lasts)]
        self.for_update = behind(ops, lasting)
        self.in_earnest = behind([replace(op, needs=op.not_zero) for op in ops], lasting)
        self.taken = behind([replace(op, needs=op.taken) for op in ops], lasting)
        self.for_host = behind(ops, self.held | {i for i, op in enumerate(ops) if op.read_by_host})
        self.needed = self.for_update | self.for_host
        self.constant, self.copied_over = constants(ops), copied_over(ops, self.held)
        self.unchanged = constants([replace(op, constant=op.unchanged) for op in ops])
        self.again = repeated(ops, self.for_update)
        self.penalties = penalties(ops)
        copies = [op.copied for op in ops if times_computed(op.copied) >= MANY]
        self.row_makers = {place.maker for places in copies for place in places}

    def verdicts(self) -> str:
        """Return a letter for each operator."""
        return "".join(map(self._verdict, range(len(self.ops))))

    def _verdict(self, index: int) -> str:
        """Return the first that holds: it was for nothing, it was done before, it was too much."""
        op = self.ops[index]
        return (
            self._for_nothing(index)
            or self._known_before(index, op)
            or op.zeros
            or self._more_than_needed(index, op)
            or self._unread_result(index, op)
            or (PENALTY if index in self.penalties else NEEDED)
        )

    def _for_nothing(self, index: int) -> str:
        if index not in self.for_update:
            return READ_ONLY if index in self.for_host else UNUSED
        return TIMES_ZERO if index not in self.in_earnest else ""

    def _known_before(self, index: int, op: WatchedOp) -> str:
        """Return the letter of what no step changes, nothing takes, or this step has made."""
        if index in self.constant:
            return CONSTANT
        casts_older = op.name == CAST and not op.needs  # autocast's own, of weights
        if index in self.unchanged and not casts_older:
            return UNCHANGED
        if index not in self.taken:
            return NOT_TAKEN
        if index not in self.again:
            return ""
        return CAST_AGAIN if casts_older else _again(op, self.ops[self.again[index]])

    def _more_than_needed(self, index: int, op: WatchedOp) -> str:
        """Return the letter of copies, of updates that leave things alone and of casts and back."""
        if times_computed(op.copied) >= MANY:
            return _copies_letter(times_computed(op.copied))
        if index in self.row_makers:
            return ROWS_COPIED
        if op.unmoved >= 0.5:
            return UNMOVED[min(int(10 * op.unmoved), 9) - 5]
        if op.casts_back:
            return CAST_BACK
        return COPIED_OVER if index in self.copied_over else ""

    def _unread_result(self, index: int, op: WatchedOp) -> str:
        """Return the letter of results that nobody reads as they are, or reads a part of."""
        held = index in self.held
        if index in self.step.pooled and op.readers == 1 and not held:
            return POOLED
        if op.input_gradient is not None and self._is_idle(index, op.input_gradient):
            return IDLE_GRADIENT
        if op.weight_gradient is not None and self._is_dropped(index, op.weight_gradient):
            return IDLE_WEIGHT
        return "" if held else self._partly_used(index, op.name)

    def _without_unread_parts(self) -> list[WatchedOp]:
        """Return the operators, joins without the makers of parts that nobody reads."""
        found = list(self.step.seen.ops)
        for index, one in self.step.joined.items():
            results = self.step.read.get(index, {}).values()
            partly = [result for result in results if 0 < result.seen < result.elements]
            if index in self.held or len(partly) != 1 or partly[0].indexed:
                continue
            unread = unread_writers(one, partly[0].views)
            op = found[index]
            needs, not_zero, taken = (
                tuple(maker for maker in makers if maker not in unread)
                for makers in (op.needs, op.not_zero, op.taken)
            )
            found[index] = replace(op, needs=needs, not_zero=not_zero, taken=taken)
        return found

    def _is_idle(self, index: int, storage: int) -> bool:
        """Whether a gradient of an input was read by nobody and is not held by anybody."""
        made = self.step.read[index].get(storage)  # None: it is an input of the operator
        return made is not None and not made.seen and storage not in self.kept

    def _is_dropped(self, index: int, storage: int) -> bool:
        """Whether nothing that is needed reads a gradient, and nobody holds it."""
        made = self.step.read[index].get(storage)
        return (
            made is not None and storage not in self.kept and made.readers.isdisjoint(self.needed)
        )

    def _partly_used(self, index: int, name: str) -> str:
        """Return the letter for the tenths of a result that nobody reads, from a half on."""
        results = self.step.read.get(index, {}).values()
        # A convolution by Fourier transforms drops the padding that it needs.
        if not results or name in FILLS or name in OVERWRITES or name.startswith("aten::_fft"):
            return ""
        share = max((one.seen + one.indexed) / max(one.elements, 1) for one in results)
        tenths = int(10 * (1 - share) + 1e-9)
        return PARTLY_USED[tenths - 5] if 5 <= tenths <= 9 else ""


def _again(op: WatchedOp, first: WatchedOp) -> str:
    """Return whether the forward is made again, by a checkpoint too, or a gradient.

    One pass may well compute equal gradients: of summands, or of slices.
    """
    if op.backward < 0 or first.backward < 0:
        return MADE_BEFORE
    return BACKWARD_AGAIN if op.backward != first.backward else NEEDED


def _copies_letter(times: float) -> str:
    """Return the letter for rows that are computed so often."""
    power = max(int(math.log2(times)), 1)
    return COPIED_ROWS[min(power, len(COPIED_ROWS)) - 1]
