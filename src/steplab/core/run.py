"""Run: everything that one measurement leaves behind, and so all that later commands can know."""

from __future__ import annotations

import json
import secrets
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from steplab.core.budget import Budget
from steplab.core.codec import decode, encode
from steplab.core.dataflow import Dataflow
from steplab.core.errors import UserError
from steplab.core.input_file import parse_json
from steplab.core.samples import Samples
from steplab.core.spec import RunSpec
from steplab.core.table import Table
from steplab.core.units import counted
from steplab.core.upgrade import VERSION, check_version, upgrade


@dataclass(frozen=True)
class Accelerator:
    """One GPU as its driver names it."""

    name: str
    memory_bytes: int
    capability: str = ""  # compute capability, as in "9.0"
    multiprocessors: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    driver: str = ""
    catalog_name: str = ""  # the card it was recognized as; "" when unknown


@dataclass(frozen=True)
class Environment:
    """Machine, versions and settings. Holds no user name, host name or path."""

    steplab: str
    python: str
    platform: str
    cpu: str
    cores: int
    memory_bytes: int | None
    cpu_bf16: bool | None = None  # whether the CPU has instructions for bf16; None: unknown
    torch: str = ""
    numpy: str = ""
    triton: str = ""
    cuda: str = ""
    cudnn: str = ""
    threads: int | None = None
    accelerators: tuple[Accelerator, ...] = ()
    git: str = ""  # commit of the working directory, "+dirty" when it has changes
    variables: Mapping[str, str] = field(default_factory=dict)  # settings that change speed

    @property
    def device_name(self) -> str:
        """The first GPU's name, or the CPU's."""
        return self.accelerators[0].name if self.accelerators else self.cpu

    @property
    def conditions(self) -> str:
        """One line to print under a table: of the GPU where there is one, else of the CPU."""
        return self.conditions_on("cuda" if self.accelerators else "cpu")

    def conditions_on(self, device: str) -> str:
        """One line to print under numbers that were measured on `device`, "cpu" or "cuda"."""
        if device == "cuda" and self.accelerators:
            cap = self.accelerators[0].power_limit_w
            where = f"{self.device_name}{f' at {cap:.0f} W' if cap else ''}, CUDA {self.cuda}"
        else:
            where = f"{self.cpu}, {counted(self.threads or self.cores, 'thread')}"
        return f"{where}, torch {self.torch}, Python {self.python}, steplab {self.steplab}"


NOISY_SPREAD = 0.10


@dataclass(frozen=True)
class LoaderUse:
    """The DataLoader of torch that the timed steps took their batches from, inside the step."""

    workers: int  # processes; 0: the loop's own fetches each batch when it is asked for
    piped_bytes: int = 0  # of a batch, in arrays and texts that workers send through a pipe
    left_epochs: float = 0.0  # epochs that were begun and left before their end, for each batch
    # Lines that its workers are in for most of the time, with their shares of it.
    lines: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Clock:
    """Where the time of the measured steps went, in milliseconds, one value per step.

    `step` is the period from the end of one step to the end of the next, with no
    synchronization in between: what a training loop sees. `host` is the time the Python thread
    needed to issue the step; where `host` is as long as `step`, the host is the limit.
    `phases` are device times between the marks of forward, backward, clip and optimizer.
    """

    step: Samples
    host: Samples
    data_wait: Samples
    phases: Mapping[str, Samples]
    host_phases: Mapping[str, Samples]
    window_ms: float  # wall time of the whole window, synchronized at both ends
    source: str  # "cuda events" or "perf_counter"
    # Time in which threads waited for a core, over that of the window, summed over threads.
    contended: float | None = field(default=None, kw_only=True)
    # Of a step, on average, in Python's garbage collector.
    collector_ms: float | None = field(default=None, kw_only=True)
    # In the median step, which most often has none; and of a step on average, by the line at which
    # the collector struck: objects are made there, or it is called.
    collector_median_ms: float | None = field(default=None, kw_only=True)
    collector_lines: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    # Where a step asks torch's DataLoader itself, `data_wait` has those waits too.
    loader: LoaderUse | None = field(default=None, kw_only=True)

    @property
    def contention(self) -> str:
        """One line where others used the machine so much that the times show it; else "".

        From 15 % of the wall time on. On two cores it is 0.2 to 2 % when nobody else works and 50
        to 99 % beside a busy process, which makes a step of 23 ms take 930: OpenMP's threads wait
        for each other, and every step alike.
        """
        if (self.contended or 0.0) <= 0.15:
            return ""
        waited = f"threads waited {self.contended:.0%} of the time for a core"
        return f"contended: {waited}; others use this machine"

    @property
    def agreement(self) -> float:
        """Sum of the step samples over the wall time of the window; 1 when both clocks agree."""
        return sum(self.step.values) / self.window_ms if self.window_ms else float("nan")

    def cautions(self) -> tuple[str, ...]:
        """Return what makes the samples doubtful, each in a sentence that begins with its name."""
        noise = ""
        if self.step.spread > NOISY_SPREAD:
            noise = f"noisy: the middle half of the samples spans {self.step.spread:.0%}"
        return tuple(filter(None, (noise, self.contention, self.step.outliers)))

    @property
    def caution_names(self) -> list[str]:
        """What makes the samples doubtful in one word each: "noisy", "contended", "outliers"."""
        return [text.split(":")[0] for text in self.cautions()]

    @property
    def typical(self) -> int:
        """Index of the step with the median time, the lower of two.

        Times of one step add up; medians of every phase over all steps do not.
        """
        return self.step.values.index(statistics.median_low(self.step.values))


@dataclass(frozen=True)
class Memory:
    """How many bytes a step needs, by CUDA's caching allocator or by a CPU's allocations."""

    before: int  # held before the step: weights, optimizer state, the batch
    peak: int  # largest value inside the measured window
    reserved: int | None  # largest value the allocator held from the driver
    total: int | None  # capacity of the device
    source: str  # "cuda allocator", "profiler memory events" or, of a Meter, "process resident set"
    phase_peaks: Mapping[str, int] = field(default_factory=dict)  # from one extra step


@dataclass(frozen=True)
class Collective:
    """The calls of one collective over groups of one size, in one step of one rank."""

    op: str  # "all-reduce", "all-gather", "reduce-scatter", "all-to-all", ...
    ranks: int  # of the group
    calls: int
    # Of all calls: the buffer of an all-reduce, the output of an all-gather, the input of a
    # reduce-scatter, what a rank sends in an all-to-all.
    bytes: int


@dataclass(frozen=True)
class Communication:
    """What one rank sends in a step that it shares with others, and what it holds of the model."""

    collectives: tuple[Collective, ...]
    held_bytes: Mapping[str, int] = field(default_factory=dict)  # "weights", "optimizer state"
    # What the scheme was to call, by the sizes of the parameters; `calls` 0: any number. Empty
    # where nobody can tell.
    planned: tuple[Collective, ...] = ()

    @property
    def calls(self) -> int:
        """Collectives in one step."""
        return sum(one.calls for one in self.collectives)

    @property
    def bytes(self) -> int:
        """Bytes of all their messages."""
        return sum(one.bytes for one in self.collectives)


@dataclass(frozen=True)
class Work:
    """FLOPs of one whole step in its mode, all micro-batches included.

    Three counts that are never mixed: `model` has active matmul parameters and visible
    attention pairs; `palm` the same with every attention pair (the PaLM convention); `hardware`
    what the kernels execute, recomputation included. `vector` is work that runs outside the
    tensor cores (FFT, scans) and belongs to none of the three. None: not known.
    """

    tokens: int
    model: float | None
    palm: float | None
    hardware: float | None
    vector: float = 0.0
    formula: str = ""
    covered_calls: int | None = None  # matmul-class calls with a FLOP formula, when counted
    uncovered_calls: Mapping[str, int] = field(default_factory=dict)  # op -> calls without one
    unit: str = "tokens"  # what is counted as tokens: a model of one's own may have "images"
    padding: float = 0.0  # share of the batch's positions, where one of its tensors tells
    padding_told_by: str = ""  # the name of that tensor

    def tokens_per_second(self, step_ms: float) -> float:
        """Return the tokens of a step over its time."""
        return self.tokens / step_ms * 1e3


@dataclass(frozen=True)
class Figures:
    """Utilization as fractions of the dense peak of the dtype that ran; None: unknown."""

    mfu: float | None
    mfu_palm: float | None
    hfu: float | None
    peak_tflops: float | None
    peak_source: str
    warning: str = ""

    @property
    def possible_mfu(self) -> float | None:
        """MFU, unless it is above 1: then the peak, the dtype or the FLOP count is wrong."""
        return self.mfu if self.mfu is not None and self.mfu <= 1 else None


@dataclass(frozen=True)
class Recompile:
    """One recompilation: the function and the guard that failed."""

    function: str
    reason: str
    begins: str = ""  # the function's first line: "model.py:12 (forward)"
    line: str = ""  # that the guard is for; "": an input's
    given_up: bool = False  # one too many: from here on what fails the guard runs uncompiled

    @property
    def guard(self) -> str:
        """The reason without dynamo's number of the compilation, as in "0/7: self.turn == 8"."""
        number, _, guard = self.reason.partition(": ")
        return guard if number.replace("/", "").isdecimal() else self.reason


@dataclass(frozen=True)
class Compilation:
    """What torch.compile did, up to the end of the measured window."""

    graphs: int
    graphs_in_window: int  # new graphs while the clock ran: the samples are not steady if > 0
    breaks: Mapping[str, int] = field(default_factory=dict)  # reason -> count
    recompiles: tuple[Recompile, ...] = ()
    first_seconds: float | None = None  # the first step, compilation included
    cache_hits: int = 0
    cache_misses: int = 0
    # The first step again after a reset in the same process, disk cache filled. A new process
    # pays more: it also imports the compiler and loads the kernels.
    warm_seconds: float | None = None
    cudagraph_skips: int = 0  # graphs that Inductor was to replay by CUDA graph and could not
    chunked: int = 0  # graphs of which Inductor computes a part chunk by chunk
    # Of a loop of one's own: breaks from before it was recorded, of its step or of other code.
    earlier_breaks: tuple[str, ...] = ()

    @property
    def cold_seconds(self) -> float | None:
        """The first step's seconds if nothing came out of the compile cache, else None."""
        return self.first_seconds if self.cache_misses and not self.cache_hits else None


@dataclass(frozen=True)
class Ran:
    """What really executed, seen in one profiled step outside the timed ones.

    `impls` is what the modules dispatched, the rest is what was traced.
    """

    impls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> impl names
    attention_ops: Mapping[str, int] = field(default_factory=dict)  # aten op -> calls
    matmul_dtypes: Mapping[str, int] = field(default_factory=dict)  # dtype -> calls
    kernels: Mapping[str, int] = field(default_factory=dict)  # device kernel -> executions
    kernel_launches: int | None = None  # by the host, a graph is one; None on CPU
    matmul_precision: str = "highest"  # torch.get_float32_matmul_precision() during the step
    optimizer: str = ""  # forloop, foreach, fused, "one-pass triton_update" or "one-pass reference"
    graph_launches: int | None = None  # those of kernel_launches that replay a graph; None on CPU
    # aten::_fused_adamw_, aten::_foreach_* ... -> calls; gradient clipping has foreach ops too
    optimizer_ops: Mapping[str, int] = field(default_factory=dict)
    device_busy_ms: float | None = None  # time in which at least one kernel ran; None on CPU
    # Time in which ranks exchanged something and nothing else ran; 0 for one rank.
    exposed_communication_ms: float = 0.0
    bf16_sums: str | None = None  # partial sums of split bf16 products: bf16, fp32; None on CPU
    own_ops: Mapping[str, int] = field(default_factory=dict)  # steplab::rms_norm ... -> calls
    # Where layers multiply in fp8: each Linear, each network of a mixture and each stack of
    # matrices by name, "" or why it stays in bf16.
    fp8_linears: Mapping[str, str] = field(default_factory=dict)
    # channels_last, contiguous -> convolutions over images or volumes that ran on such tensors
    conv_layouts: Mapping[str, int] = field(default_factory=dict)
    loader_workers: int | None = None  # of the DataLoader that batches come from; None: from none

    @property
    def impls_text(self) -> str:
        """The implementations that executed, as in `attention=flash, experts=grouped`."""
        return ", ".join(f"{op}={'/'.join(names)}" for op, names in sorted(self.impls.items()))

    @property
    def fp8_text(self) -> str:
        """One line on how many layers multiply in fp8 and why others do not; "" without fp8."""
        if not self.fp8_linears:
            return ""
        reasons = Counter(self.fp8_linears.values())
        told = [f"fp8 in {reasons.pop('', 0)} of {len(self.fp8_linears)} layers"]
        return "; ".join([*told, *(f"{n} in bf16: {why}" for why, n in reasons.most_common(3))])


@dataclass(frozen=True)
class Counters:
    """What NVML reports about the device while the steps ran, one value per reading.

    None where this device or driver does not report it.
    """

    sm_util_pct: Samples | None = None  # share of time in which at least one kernel ran
    mem_ctrl_util_pct: Samples | None = None  # share of time in which the memory was accessed
    hbm_util_pct: Samples | None = None  # measured DRAM bandwidth over its peak (GPM counters)
    tensor_util_pct: Samples | None = None  # share of cycles with the tensor cores active (GPM)
    power_w: Samples | None = None
    sm_clock_mhz: Samples | None = None
    mem_clock_mhz: Samples | None = None
    temperature_c: Samples | None = None
    sm_clock_max_mhz: float | None = None  # the most that the card would run at
    # Why the clock was held below that ("its power limit", "heat", ...) -> share of the readings.
    held_back: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    note: str = ""  # what a reader of the numbers must know

    @property
    def clock_share(self) -> float:
        """The SM clock over the card's highest, where something held it back; else 1.

        A reason counts from half of the readings on, a clock below 97 %: a card that boosts freely
        is 1 or 2 % below its highest clock most of the time.
        """
        if self.sm_clock_mhz is None or not self.sm_clock_max_mhz or not self._reasons:
            return 1.0
        share = self.sm_clock_mhz.median / self.sm_clock_max_mhz
        return share if share < 0.97 else 1.0

    @property
    def held_by(self) -> str:
        """What held the SM clock back; "" where nothing did."""
        return " and ".join(self._reasons) if self.clock_share < 1 else ""

    @property
    def clock_text(self) -> str:
        """`1440 of 1980 MHz at 695 W, held back by its power limit`, as far as it is known."""
        if self.sm_clock_mhz is None:
            return "unknown"
        highest = f" of {self.sm_clock_max_mhz:.0f}" if self.sm_clock_max_mhz else ""
        power = f" at {self.power_w.median:.0f} W" if self.power_w is not None else ""
        held = f", held back by {self.held_by}" if self.held_by else ""
        return f"{self.sm_clock_mhz.median:.0f}{highest} MHz{power}{held}"

    @property
    def held_clock(self) -> str:
        """One line on what the SM clock was and what held it back; "" where nothing did."""
        return f"the card ran at {self.clock_text}" if self.held_by else ""

    @property
    def _reasons(self) -> list[str]:
        return [name for name, share in self.held_back.items() if share >= 0.5]


MEMORY_KINDS = ("weights", "gradients", "optimizer state", "activations", "temporaries", "other")


@dataclass(frozen=True)
class Allocation:
    """One block of memory that was live at the peak, or one of the largest of the step."""

    bytes: int
    kind: str  # one of MEMORY_KINDS
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    line: str = ""  # file.py:12 (function), the innermost line outside torch
    module: str = ""
    op: str = ""  # the operator that asked for it


@dataclass(frozen=True)
class MemoryTimeline:
    """Who held how much memory when, over one step: `bytes_by_kind[kind][i]` at `times_ms[i]`."""

    times_ms: tuple[float, ...]  # since the step began; at most some thousand points
    bytes_by_kind: Mapping[str, tuple[int, ...]]
    phases_ms: Mapping[str, tuple[float, float]]  # begin and end of every phase
    peak_bytes: int
    peak_ms: float
    peak_by_kind: Mapping[str, int]
    at_peak: tuple[Allocation, ...]  # largest first, at most 20
    largest: tuple[Allocation, ...]  # largest of the step, largest first, at most 20
    saved_by_module: Mapping[str, int] = field(default_factory=dict)  # saved for backward
    reserved_bytes: int | None = None  # by the allocator at the peak; None on CPU
    largest_free_block: int | None = None  # of the reserved; small while much is free: fragmented
    source: str = ""  # "cuda allocator" or "profiler memory events"
    notes: tuple[str, ...] = ()
    growth_bytes: int = 0  # held at the end of the step and not at its beginning
    # Allocated in the step, still held at its end, and no weight, gradient, state or batch.
    kept_bytes: int = 0
    # Of these, plain tensors that a variable holds and the next step replaces: a queue, a state.
    kept_state_bytes: int = 0
    kept: tuple[Allocation, ...] = ()  # largest first, at most 20
    kept_by: tuple[
        str, ...
    ] = ()  # variables that hold them: "outputs, written at loop.py:9 (step)"


@dataclass(frozen=True)
class OptimizerShape:
    """How an optimizer divides what it updates."""

    name: str  # of its class
    groups: int
    tensors: int


TRACEMALLOC, PYTHON_PROFILER = "tracemalloc", "a profiler of Python"  # switches, too
# A setting of the compiler, a switch where it is below 1: "activation_memory_budget=0.5".
MEMORY_BUDGET = "activation_memory_budget"
FORCE_EAGER = "the stance force_eager"  # of torch.compiler: a switch, too
MODE = "the mode "  # how the switch begins that stands for a mode of torch


@dataclass(frozen=True)
class Profile:
    """What `steplab profile` adds: a lean trace for times, and one step in detail for attribution.

    Stacks, shapes and memory cost the host so much that times taken with them are not the
    step's own; so they are recorded in another step, and matched kernel by kernel.
    """

    schedule: tuple[int, int, int, int]  # wait, warm-up, active, repeat
    traces: tuple[str, ...]  # artifact names, one per repeat
    detail: str | None = None  # artifact name of the detailed step
    budget: Budget | None = None
    memory: MemoryTimeline | None = None
    updated_weights: int | None = None  # by each step; None: unknown, or none is updated
    dataflow: Dataflow | None = None  # None: of several ranks, or not looked at
    # Switches of torch that cost time and were on while the step ran: "anomaly mode", or modes
    # that took every operator: "the mode FlopCounterMode".
    switches: tuple[str, ...] = ()
    optimizers: tuple[OptimizerShape, ...] = ()  # all that are alive in the process
    default_optimizer: bool = False  # the user's model brings none: AdamW as torch has it
    graph_pools: tuple[int, ...] = ()  # bytes of each pool that only CUDA graphs use
    # What torch.compile was given (classes of modules), where nothing has been compiled.
    never_compiled: tuple[str, ...] = ()
    # Lines of the user's files that turn a switch on ("anomaly mode"), make an optimizer
    # ("AdamW"), its groups ("params"), a "DataLoader" or embeddings ("Embedding"), or write
    # "torch.compile", a debugging "backend", "retain_graph", "create_graph", "requires_grad",
    # "register_buffer", "collate_fn", "float64", "float32" or "recompile_limit".
    setup_lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A fault with its evidence, what is at stake and the remedy.

    `rule` is named for the fault, never for the cure.
    """

    rule: str
    claim: str
    evidence: tuple[str, ...]
    remedy: str
    # Milliseconds per step, on average, that the fault takes; shown as a share of the median step.
    stake_ms: float | None = None
    stake_bytes: int | None = None
    why: str = ""  # why it costs, in one sentence
    gain_ms: float | None = None  # milliseconds that the remedy is expected to give back
    of_bytes: int | None = None  # what `stake_bytes` is a part of; None: the device's memory
    # The price of running op by op, which every eager step pays: a matter for `tune`, no fault.
    ordinary: bool = False


@dataclass(frozen=True)
class RankResult:
    """What one of the ranks that share a step saw of it; the index in `Run.ranks` is its rank."""

    step_ms: float  # median
    sync_ms: float  # of it, after the backward, until the gradients of all ranks were there
    exposed_ms: float  # of one profiled step, in which it communicated and did nothing else
    peak_bytes: int | None  # most memory in the measured window
    parameters: int | None  # whole ones, also where this rank holds a part of each


@dataclass(frozen=True)
class Substitution:
    """A place in a model's code that `substitute` looked at, and what became of it."""

    rewrite: str  # "attention", "experts", "loss", "norm"
    place: str  # model.py:12 (forward)
    what: str = ""  # what runs instead: "is_causal, 2 heads of keys for 8"; "": left alone
    proof: str = ""  # how far both forms are apart, and the old one from fp64
    reason: str = ""  # why it was left alone
    count: int = 1  # of such places in one graph, or of such modules


RANDOM_DIGITS = 6  # in which an id ends
Metric = float | tuple[float, ...] | tuple[tuple[float, ...], ...]
Status = Literal["ok", "oom", "unsupported", "timeout", "crashed", "failed"]


# The first note of a Run that `steplab.profile` made.
OWN_LOOP = "a loop of your own: its batch, recipe and work are not known"


@dataclass(frozen=True)
class Run:
    """One measurement: what was asked, where, what was seen, and how it ended."""

    id: str
    spec: RunSpec
    environment: Environment
    status: Status = "ok"
    reason: str = ""  # why the status is not ok, in one sentence
    created: str = ""  # UTC, ISO 8601
    command: tuple[str, ...] = ()
    group: str = ""  # the sweep this Run is a cell of
    clock: Clock | None = None
    memory: Memory | None = None
    work: Work | None = None
    figures: Figures | None = None
    compilation: Compilation | None = None
    ran: Ran | None = None
    counters: Counters | None = None
    communication: Communication | None = None  # of a step that ranks share
    profile: Profile | None = None
    parameters: int | None = None
    losses: tuple[float, ...] = ()  # one per measured step
    # What the workload says of one step beside its loss: numbers, vectors and matrices by name.
    # Two names are understood: `load_LE` has the share of the assignments that each expert of a
    # layer got, `dropped` the share of them that no expert took.
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    against: RunSpec | None = None  # what `spec` was measured in turns with; None: with nothing
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know
    verdict: str = ""  # of the gate, in one word; "": nobody asked it
    findings: tuple[Finding, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()  # file names beside run.json
    ranks: tuple[RankResult, ...] = ()  # one each where several ranks share the step
    substitutions: tuple[Substitution, ...] = ()  # what `substitute` found in the compiled graphs

    @property
    def of_own_loop(self) -> bool:
        """Whether it shows somebody's own loop, which no recipe changes and no command repeats."""
        return OWN_LOOP in self.notes

    @property
    def outcome(self) -> str:
        """How it ended: with the reason, or "ok" and the words that warn, which begin its notes."""
        if self.status != "ok":
            return f"{self.status}: {self.reason}"
        return ", ".join(["ok", *(note.split(":")[0] for note in self.notes)])

    @property
    def substituted(self) -> str:
        """One line on what was replaced and why the rest was not; "" without `substitute`."""
        done = [f"{s.rewrite} x {s.count} ({s.what})" for s in self.substitutions if s.what]
        left = [f"{s.rewrite}, {s.place}: {s.reason}" for s in self.substitutions if s.reason]
        told = [f"substituted {', '.join(done) or 'nothing'}"] if self.substitutions else []
        return "; ".join([*told, *(f"left alone {text}" for text in left[:3])])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of one step over its median time."""
        if self.clock is None or self.work is None or not self.clock.step.median > 0:
            return None
        return self.work.tokens_per_second(self.clock.step.median)


def rate_name(runs: Iterable[Run]) -> str:
    """Return how the speed of Runs is called: "tokens/s", or by the unit that all of them count."""
    found = {run.work.unit for run in runs if run.work}
    return f"{found.pop() if len(found) == 1 else 'tokens'}/s"


def new_run_id(spec: RunSpec) -> str:
    """Return an id that sorts by time (microseconds), can be read, and does not collide."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    name = spec.workload.rsplit("/", 1)[-1].replace(".py", "")
    name = name.replace(":", "-").replace(".", "-")
    safe = "".join(c for c in f"{name}-{spec.size}".strip("-") if c.isalnum() or c in "-_")[:40]
    return f"{stamp}-{safe}-{secrets.token_hex(RANDOM_DIGITS // 2)}"


def new_run(spec: RunSpec, environment: Environment) -> Run:
    """Return a Run of `spec` in which nothing has been measured yet."""
    return Run(new_run_id(spec), spec, environment, created=now())


def now() -> str:
    """Return the present moment in UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_to_json(run: Run) -> str:
    """Write a Run as JSON text with its version in front."""
    document = {"steplab_record": VERSION, "run": encode(run)}
    return json.dumps(document, indent=1, allow_nan=False)


def run_from_json(text: str | bytes, where: str = "run.json") -> Run:
    """Read a Run; a foreign, damaged or newer document is a UserError that says so."""
    document = parse_json(text, where)
    version = document.get("steplab_record") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{where} is not a steplab Run.")
    check_version(version, where)
    run: Run = decode(Run, upgrade("run", version, document.get("run")), where)
    return run
