"""What a step's operators are for, as two watched steps show it, and what is held for nothing."""

from __future__ import annotations

from dataclasses import dataclass

# What became of an operator's result; the first that holds.
UNUSED = "u"  # nothing that outlives the step came from it
READ_ONLY = "h"  # only the host read it, or somebody holds it: a metric, a log
TIMES_ZERO = "n"  # the update has it times the number zero only
NOT_TAKEN = "x"  # only a torch.where has it, which takes no element of it
CONSTANT = "c"  # it depends on no weight, no batch and no random number: the same in every step
UNCHANGED = "s"  # the step before had it too: it depends on nothing that a step changes
MADE_BEFORE = "r"  # the step had computed it before, from the same inputs
BACKWARD_AGAIN = "q"  # the same, of a gradient that another backward of the step had computed
CAST_AGAIN = "w"  # a cast of what is older than the step, a weight, that the step had made before
CAST_BACK = "b"  # a cast of what a cast had made: to a dtype and back
ZEROS = "z"  # it works on something that is nearly all zeros: a factor, a kernel, a summand
PARTLY_USED = "VWXYZ"  # so many tenths of the result nobody reads: 5, 6, 7, 8, 9
IDLE_GRADIENT = "g"  # of the gradients that it computes, the input's is read by nobody
IDLE_WEIGHT = "i"  # of the gradients that it computes, the weight's is dropped, the input's is not
UNMOVED = "KLMNO"  # so many tenths of what it updates in place stay as they were: 5 to 9
COPIED_OVER = "k"  # made anew element by element, then copied over what is older than the step
UNREAD_OUTPUT = "o"  # of a compiled graph: it returns what nobody reads
MASKED = "PQR"  # attention of which a mask leaves out so many tenths of the scores: 7, 8, 9
CAUSAL_MASK = "l"  # fused attention with a mask that hides exactly the keys to come
ROWS_OF_ZEROS = "6789"  # a product of which so many tenths of the rows are zeros
# Rows that are copies of fewer ones, each computed so often or more: 1.5, 4, 8 and on to 1024.
COPIED_ROWS = "ABCDEFGHIJ"
ROWS_COPIED = "m"  # made these copies
POOLED = "p"  # a product or a lookup of many rows of which only sums are read
PENALTY = "d"  # it makes a number of the loss out of trained weights alone
RUNNING = "t"  # a product with a triangle of equal numbers in each row: a running sum or mean
NEEDED = "."


@dataclass(frozen=True)
class IdleBuffers:
    """The buffers of one class of modules that a step could do without."""

    name: str  # "Attention.bias"
    unread: int = 0  # bytes of those that no operator reads
    copies: int = 0  # bytes of those that equal another one


@dataclass(frozen=True)
class IdleCopies:
    """Tensors of the shapes of weights that no module, no optimizer and no step has."""

    bytes: int
    held_by: tuple[str, ...]  # "checkpoint, written at train.py:9 (main)"


@dataclass(frozen=True)
class EqualWeights:
    """Frozen weights that a step reads and that equal others that it reads."""

    weights: int  # without the first of each
    bytes: int
    names: tuple[str, ...]  # "blocks.*.up.weight", most bytes first
    held_by: tuple[str, ...]  # the models: "reference, written at train.py:9 (main)"


@dataclass(frozen=True)
class IdleState:
    """Optimizers whose state no step has anything to do with, where another's is updated."""

    optimizers: tuple[str, ...]  # their classes
    bytes: int
    held_by: tuple[str, ...]  # "warmup, written at train.py:9 (main)"


@dataclass(frozen=True)
class IdleGradients:
    """Weights of one name whose gradients nobody uses."""

    name: str  # "backbone.blocks.*.up.weight"
    weights: int
    bytes: int  # of gradients that are held when a step ends
    asked: bool  # the weights require gradients, and neither an optimizer nor the step updates them


@dataclass(frozen=True)
class FrozenCasts:
    """Frozen weights in fp32 with which a step does nothing but cast them to 16 bits."""

    weights: int
    bytes: int
    copies: int  # bytes of the casts that are alive when the backward begins
    names: tuple[str, ...]  # most bytes first


@dataclass(frozen=True)
class GraphWaste:
    """What compiled graphs compute for nothing, and why: one verdict."""

    verdict: str
    line: str  # that computes most of it, or calls the graph; "": unknown
    flops: float  # share of the FLOPs of all compiled graphs
    bytes: float  # share of what their operators read and write


@dataclass(frozen=True)
class Dataflow:
    """What the operators of one step are for, in the order in which they ran; views left out.

    Those inside compiled graphs are in `graphs` only.
    """

    names: tuple[str, ...]  # distinct: "aten::mm"
    ops: tuple[int, ...]  # the number in `names` of each
    verdicts: str  # one letter each, from UNUSED to NEEDED
    padding: float = 0.0  # share of the token ids that repeat the last of their row to its end
    buffers: tuple[IdleBuffers, ...] = ()
    graphs: tuple[GraphWaste, ...] = ()  # of compiled code, the most first
    feeds_itself: bool = False  # a model is called again and again on its own results
    fresh: bool = True  # it reads data that the step before did not
    idle_copies: IdleCopies | None = None
    tied_tables: tuple[int, ...] = ()  # weights of embeddings that are also a factor of a product
    idle_gradients: tuple[IdleGradients, ...] = ()  # most bytes first
    frozen_casts: FrozenCasts | None = None
    equal_weights: EqualWeights | None = None
    idle_state: IdleState | None = None
    ignored: float = 0.0  # share of the class numbers of a loss that it leaves out: ignore_index
