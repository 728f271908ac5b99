"""A simulated GPU: a mixture's step whose parts take what they took on an H200, and a clock.

Milliseconds are those of docs/mixture.md and benchmarks/*_h200*, rounded; what was never measured
alone is a guess. They decide nothing but the order in which a search tries things.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from steplab.core import (
    Accelerator,
    Budget,
    Category,
    Compilation,
    Memory,
    Profile,
    Ran,
    Recipe,
    Run,
    RunSpec,
    Samples,
    StepBudget,
)
from steplab.core.ladder import Check
from steplab.tune.champion import Champion
from steplab.verify.remote import CandidateResult
from tests.compare.sides import ENVIRONMENT, run_of

H200 = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 2**37),), cuda="13.0")

# op -> implementation -> (its kind of work, ms in bf16); the first is what `auto` takes
OPS = {
    "experts": (
        "matmul bf16",
        {"in_product": 81.0, "fused": 90.0, "grouped": 116.0, "loop": 200.0},
    ),
    "attention": (
        "attention cudnn",
        {"cudnn": 51.0, "triton_flash": 57.0, "flash": 77.0, "efficient": 165.0}
        | {"dense_mask": 150.0, "math": 400.0, "tiled": 100.0},
    ),
    "router": ("softmax", {"triton_router": 8.0, "reference": 20.0}),
    "feed_forward": (
        "elementwise",
        {"in_product": 2.0, "in_product_kept": 1.8, "fused": 4.0, "reference": 14.0},
    ),
    "rms_norm": ("normalization", {"triton_norm": 7.0, "aten": 22.0, "reference": 40.0}),
    "rotary": ("copy", {"triton_rotary": 4.0, "reference": 26.0}),
}
SEED = (
    "precision=bf16,impl.experts=loop,impl.attention=dense_mask,impl.router=reference,"
    "impl.feed_forward=reference,impl.rms_norm=aten,impl.rotary=reference"
)
UPDATES = {"foreach": 14.0, "fused": 8.0, "one-pass": 3.5}
DENSE, LOOSE, HOST = 51.0, 40.0, 14.0  # products, elementwise work that a compiler fuses, launches
LINE = "experts/loop.py:29"
WAITS = (LINE,) * 96
LOOP = 60.0  # ms of idle device that they and the launches of a loop over experts cost


@dataclass
class Clock:
    """Seconds that nobody has to wait for."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def impls_by(recipe: Recipe) -> dict[str, str]:
    asked = recipe.techniques.get("impl", {})
    auto = {op: next(iter(known)) for op, (_, known) in OPS.items()}
    return {op: auto[op] if asked.get(op, "auto") == "auto" else str(asked[op]) for op in OPS}


def waits_of(recipe: Recipe) -> tuple[str, ...]:
    return WAITS if impls_by(recipe)["experts"] == "loop" else ()


def parts_of(recipe: Recipe) -> tuple[dict[str, float], dict[str, float], float]:
    """Return (ms by kind of work, ms by op or phase, ms in which the device waits for the host).

    Of that wait half is before kernels of the ops, in equal parts.
    """
    used = recipe.techniques
    compiled, graph = "compile" in used, "cuda_graph" in used
    narrow = used.get("precision", {}).get("dtype") == "bf16-weights"
    kinds: dict[str, float] = {"matmul bf16": DENSE}
    known: dict[str, float] = {}
    for op, impl in impls_by(recipe).items():
        kind, all_ms = OPS[op]
        ms = all_ms[impl] * (0.75 if narrow and op in ("rms_norm", "rotary", "router") else 1.0)
        kinds[kind] = kinds.get(kind, 0.0) + ms
        known[f"op:{op}"] = ms
    kinds["elementwise"] += LOOSE * (0.3 if compiled else 1.0) * (0.8 if narrow else 1.0)
    kinds["copy"] += 0.0 if narrow else 7.0  # casts of the weights
    kinds["optimizer"] = known["phase:optimizer"] = UPDATES[update_of(recipe)]
    launches = 0.4 if graph else HOST * (0.15 if compiled else 1.0)
    synced = LOOP if waits_of(recipe) else 0.0
    known |= {f"idle:{op}": launches / 2 / len(OPS) for op in OPS}
    known["idle:experts"] += synced
    return kinds, known, launches + synced


def told_by(recipe: Recipe, detail: str) -> dict[str, float]:
    """Return what a profile tells: of ops nothing inside compiled blocks, nor without modules."""
    known = parts_of(recipe)[1]
    told = detail != "none" and "compile" not in recipe.techniques
    return known if told else {part: ms for part, ms in known.items() if part[:6] == "phase:"}


def update_of(recipe: Recipe) -> str:
    return str(recipe.techniques.get("optimizer", {}).get("impl", "foreach"))


def step_ms(recipe: Recipe) -> float:
    kinds, _, host = parts_of(recipe)
    return sum(kinds.values()) + host


def measured(spec: RunSpec) -> Run:
    """Return the Run of a simulated step, profiled."""
    kinds, _, host = parts_of(spec.recipe)
    ms = step_ms(spec.recipe)
    terms = {"kernels": sum(kinds.values()), "launch": host}
    step = StepBudget(0, ms, terms, tuple(Category(n, k, 10) for n, k in kinds.items()))
    ran = Ran({op: (i,) for op, i in impls_by(spec.recipe).items()})
    return replace(
        run_of((ms,) * 8, environment=H200), spec=spec, id=f"run-{spec.recipe.label}",
        ran=replace(ran, optimizer=update_of(spec.recipe)),
        memory=Memory(0, 2**35, None, 2**37, "cuda allocator"),
        compilation=Compilation(1, 0) if "compile" in spec.recipe.techniques else None,
        profile=Profile((0, 1, 2, 1), ("trace.json",), budget=Budget((step,), on_device=True)),
    )  # fmt: skip


def candidates_on(clock: Clock, is_wrong: Callable[[Recipe], bool]):
    """Return a stand-in for RemoteCandidate that takes its time on `clock`."""

    class Candidate:
        def __init__(self, spec, environment, pool):
            self.spec = spec

        def open(self, shapes, references, timeout, progress):
            used, run = self.spec.recipe.techniques, measured(self.spec)
            # Gate at a smaller shape, 14 steps, and compilation at both shapes.
            clock.now += 5.0 + 14 * step_ms(self.spec.recipe) / 1e3
            if "compile" in used:
                clock.now += 20.0 if "cuda_graph" not in used else 8.0  # graphs find caches filled
            if "compile" in used and waits_of(self.spec.recipe):
                broken = replace(run, status="failed", reason="a graph break", clock=None)
                return CandidateResult(broken)
            wrong = is_wrong(self.spec.recipe)
            checks = (Check("gradients", not wrong, "far off" if wrong else "near"),)
            seen = replace(run, profile=None, clock=None if wrong else run.clock)
            return CandidateResult(seen, checks, waits_of(self.spec.recipe))

        def measure(self, steps, timeout):
            ms = step_ms(self.spec.recipe)
            clock.now += (steps + 1) * ms / 1e3
            return Samples(tuple(ms * (1 + 0.002 * (n % 3)) for n in range(steps)), "ms")

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self.close()

        def close(self):
            pass

    return Candidate


def use_gpu(monkeypatch, clock: Clock, is_wrong: Callable[[Recipe], bool]) -> None:
    """Let a search live on the simulated GPU, whose gate is red for what `is_wrong`."""
    candidate = candidates_on(clock, is_wrong)
    for module in ("champion", "rung", "climb"):
        monkeypatch.setattr(f"steplab.tune.{module}.RemoteCandidate", candidate)

    def promote(candidate, result, store, timeout, progress, detail):
        clock.now += {"none": 5.0, "modules": 9.0, "all": 15.0}[detail]
        run = measured(candidate.spec)
        known = told_by(run.spec.recipe, detail)
        return Champion(candidate, run, waits_of(run.spec.recipe), known)

    for module in ("champion", "climb"):
        monkeypatch.setattr(f"steplab.tune.{module}.promote", promote)
    for module in ("tune.progress", "tune.options", "workers.alternate"):
        monkeypatch.setattr(f"steplab.{module}.monotonic", clock)
    monkeypatch.setattr("steplab.store.Store.save", lambda self, run, files=None: None)
