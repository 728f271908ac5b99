"""GateShape: the shape and the learning rate at which numerics are compared. No torch.

The shape is the step's own where fp64 fits, else a smaller one, and then the step's own as well,
with fp32 as the truth: larger tensors may get other kernels. The learning rate is the step's own,
unless rounding alone would carry its updates too far to tell right from wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from steplab.core import PLAIN, RunSpec
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.workloads.workload import find_workload

TRUTH = "fp64"
REFUSES = "the model does not run in"  # begins the reason why there is no truth
FP32_TRUTH = "with fp32 at the highest precision as the truth"
PLAIN_DTYPE = "fp32"  # of a step that rounds nothing that the plain one does not round
# Times the learning rate. At 1e-3 rounding alone carries gpt xl away: after eight steps its updates
# in fp32 are 6 % away from those in fp64, and in bf16 41 %; at an eighth of it 0.01 % and 9 %.
SMALLER_RATE = 1 / 8
# How often it is made smaller for one candidate. In fp8 the losses of the large mixture are off by
# half of themselves after six steps at an eighth: tokens change their experts.
SMALLER_RATES = 2
LIKELY_DTYPES = ("fp32", "bf16")  # what candidates declare sooner or later; the quicker one first
CURVE_STEPS = 64
DRAWS = "draws"  # the reference of a model that drops at random: the plain step's statistics
UP, DOWN = "up", "down"  # two fp32 peers whose weights begin a few roundings off, each way
ROUNDED, AUTOCAST = "rounded", "autocast"  # the two peers of any other dtype
STREAM = "stream"  # one more where weights are bf16: all that lies between products is bf16, too
NARROW_WEIGHTS = "-weights"  # behind the dtype of such a candidate
STRETCHED = "stretched"  # one more of fp8: as much is rounded off, but at other numbers
ROUNDED_STATE = "state"  # a peer in fp64 whose optimizer keeps its state in 8 bits
FP8 = "fp8"  # of some products; the others are bf16


@dataclass(frozen=True)
class GateShape:
    """A plain spec at which a candidate is compared with fp64, and what to call it."""

    name: str  # also names the files of its references
    words: str  # for people; "" for the step's own shape
    spec: RunSpec
    apart: bool = False  # compared on a step that is not the measured one
    rate: float = 1.0  # by which the learning rate is multiplied
    curves: bool = False  # many steps, of which only curves are compared
    widened: bool = False  # fp64 operator by operator: the model does not run in it
    narrow: bool = False  # fp32 is the truth: not even its operators run in fp64, or do not fit
    extra: bool = False  # beside another one, and left out where it cannot tell
    left_out: str = ""  # why this one is
    chosen_batch: int = 0  # of the measured step, for which fp8 chooses layers; 0: that of `spec`

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]+", self.name):  # a path would lead out of the folder
            raise UserError(f"{shorten(self.name)!r} is no name of a shape.")


def shapes_to_try(spec: RunSpec) -> list[GateShape]:
    """Return the shapes at which fp64 may fit, the step's own first.

    The last resort is the size that the workload has for CPUs: another model of the same code.
    Every rank keeps at least one micro-batch.
    """
    plain = one_process(spec)
    shapes = [GateShape("own", "", plain)]
    if spec.batch > 1 or spec.accumulate > 1:
        single = replace(plain, batch=1, accumulate=spec.ranks)
        shapes.append(GateShape("single", "at batch 1", single, chosen_batch=spec.batch))
    entry = find_workload(spec.workload, spec.source)
    if entry.cpu_preset and entry.cpu_preset != spec.size:
        config = entry.resolve(entry.cpu_preset, {})
        small = replace(plain, size=entry.cpu_preset, config=config, accumulate=spec.ranks)
        small = replace(small, batch=min(spec.batch, 4))
        words = f"at size {entry.cpu_preset}, batch {small.batch}"
        shapes.append(GateShape("small", words, small, chosen_batch=spec.batch))
    return shapes


def shape_of_curves(spec: RunSpec) -> GateShape:
    """Return the small shape at which a winner takes many steps: the last one of those to try."""
    small = shapes_to_try(replace(spec, ranks=1))[-1].spec
    batch = min(spec.batch, 2)
    small = replace(small, batch=batch, accumulate=1, mode="full")
    at = f"at size {small.size}, batch {batch}" if small.size else f"at batch {batch}"
    words = f"{at}, over {CURVE_STEPS} steps"
    return GateShape("curves", words, small, apart=True, curves=True, chosen_batch=spec.batch)


def one_process(spec: RunSpec) -> RunSpec:
    """Return the plain step of one process with the micro-batches of all ranks of `spec`."""
    accumulate = spec.accumulate * spec.ranks
    return replace(spec, recipe=PLAIN, ranks=1, backend="", accumulate=accumulate)


def at_shape(spec: RunSpec, shape: GateShape) -> RunSpec:
    """Return `spec` at a shape of the gate, whose micro-batches its ranks share out."""
    shared = replace(shape.spec, accumulate=shape.spec.accumulate // spec.ranks)
    return replace(shared, recipe=spec.recipe, ranks=spec.ranks, backend=spec.backend)


def with_batch(shape: GateShape, batch: int) -> GateShape:
    """Return the same shape with another batch size."""
    words = f"at batch {batch}" if not shape.words else f"{shape.words}, then batch {batch}"
    spec, chosen = replace(shape.spec, batch=batch), shape.chosen_batch or shape.spec.batch
    return replace(shape, name=f"{shape.name}-{batch}", words=words, spec=spec, chosen_batch=chosen)


def without_dropout(shape: GateShape) -> GateShape:
    """Return the shape for a model with dropout or noise, which then are held still."""
    return replace(shape, words=_add_words(shape, "without random draws"), apart=True)


def widened(shape: GateShape) -> GateShape:
    """Return the shape for a model that does not run in fp64: each of its operators does."""
    words = _add_words(shape, "computed operator by operator")
    return replace(shape, name=f"{shape.name}-wide", words=words, widened=True)


def in_fp32(shape: GateShape) -> GateShape:
    """Return the shape for a model of which fp64 cannot be had at all."""
    words = _add_words(shape, FP32_TRUTH)
    return replace(shape, name=f"{shape.name}-fp32", words=words, narrow=True)


def own_beside(spec: RunSpec, smaller: GateShape) -> GateShape:
    """Return the step's own shape with fp32 as the truth, to be compared beside a smaller one."""
    words = f"at the step's own shape, {FP32_TRUTH}"
    own = GateShape("own-fp32", words, one_process(spec), narrow=True, extra=True)
    own = without_dropout(own) if smaller.apart else own
    return with_rate_of(own, smaller)


def with_rate_of(shape: GateShape, other: GateShape) -> GateShape:
    """Return the shape with steps as small as those of another."""
    while shape.rate > other.rate:
        shape = with_smaller_steps(shape)
    return shape


def forms_of_truth(shape: GateShape) -> tuple[GateShape, ...]:
    """Return the shape with each way to a truth; a later one where the model refuses the former."""
    return shape, widened(shape), in_fp32(shape)


def with_smaller_steps(shape: GateShape) -> GateShape:
    """Return the shape with smaller steps, in which rounding errors grow less."""
    rate = SMALLER_RATE * shape.rate
    as_it_is = replace(shape, words=shape.words.removesuffix(_rate_words(shape.rate)).rstrip(", "))
    words = _add_words(as_it_is, _rate_words(rate))
    return replace(shape, name=f"{shape.name}-gentle", words=words, rate=rate)


def _rate_words(rate: float) -> str:
    return f"at 1/{1 / rate:g} of the learning rate"


def _add_words(shape: GateShape, words: str) -> str:
    return f"{shape.words}, {words}" if shape.words else words


def rounding_name(dtype: str, narrow_weights: bool, state_format: str) -> str:
    """Return how a candidate's rounding is called: "bf16", "bf16-weights", "bf16+adam-8bit"."""
    stored = f"{dtype}{NARROW_WEIGHTS}" if narrow_weights else dtype
    return f"{stored}+{state_format}" if state_format else stored


def dtype_of(rounding: str) -> str:
    """Return the dtype of the products, without how weights and state are stored."""
    return rounding.partition("+")[0].removesuffix(NARROW_WEIGHTS)


def references_of(rounding: str) -> tuple[str, ...]:
    """Return the names of the references for candidates that declare `rounding`, or of the truth.

    The last one is what torch itself computes in that dtype; of fp8 it knows nothing. Where the
    optimizer's state is rounded, one more is the truth with nothing but that.
    """
    dtype, _, state_format = rounding.partition("+")
    if state_format:
        *others, plain = references_of(dtype)
        return *others, f"{TRUTH}-{ROUNDED_STATE}", plain
    if dtype.endswith(NARROW_WEIGHTS):
        *others, plain = references_of(dtype.removesuffix(NARROW_WEIGHTS))
        return *others, f"bf16-{STREAM}", plain
    if dtype == TRUTH:
        return (TRUTH,)
    if dtype == PLAIN_DTYPE:
        return f"{dtype}-{UP}", f"{dtype}-{DOWN}", dtype
    if dtype == FP8:  # its errors are large and few: one peer may be near the truth by luck
        return f"{FP8}-{ROUNDED}", f"{FP8}-{STRETCHED}", f"bf16-{AUTOCAST}"
    return f"{dtype}-{ROUNDED}", f"{dtype}-{AUTOCAST}"
