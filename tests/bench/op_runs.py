"""Runs of attention cells as a worker would return them."""

from dataclasses import replace

from steplab.bench.op_results import ERRORS, KEPT
from steplab.bench.ops.attention import BENCH
from steplab.core import Clock, Column, Environment, Memory, Run, RunSpec, Samples, Table
from steplab.workers.trials import TrialRunner

MACHINE = Environment("0", "3.11", "Linux", "a CPU", cores=2, memory_bytes=None)
MIB = 2**20


class InThisProcess(TrialRunner):
    """Measures cells without a worker, whose start takes seconds."""

    def environment(self):
        from steplab.probes.environment import capture_environment

        return capture_environment()

    def trial(self, spec, environment, key="", progress=None):
        from steplab.bench.op_cell import measure_cell

        return measure_cell(spec)


def specs(impls, contexts=(64,), device="cpu", tiles=(), dtypes=("fp32",)):
    asked = {"batch": [1], "heads": [2], "context": contexts, "head_width": [16]}
    asked |= {"dtype": dtypes, "impl": impls, "tiles": tiles}
    return BENCH.cells(asked, RunSpec("attention", device=device, steps=8, warmup=1), 1.0)


def samples(center, noise=0.001):
    return Samples(tuple(center * (1 + noise * i) for i in range(8)), "ms")


def measured(spec, forward=1.0, backward=2.0, both=3.0, mib=1, error=1e-7, noise=0.001):
    """A cell that went well; the error's budget is 2e-7."""
    clock = Clock(
        samples(both, noise),
        samples(0.1),
        Samples((), "ms"),
        {"forward": samples(forward, noise), "backward": samples(backward, noise)},
        {},
        1.0,
        "perf_counter",
    )
    memory = Memory(10, 10 + mib * MIB, None, None, "x", {KEPT: 10 + MIB // 2})
    names = ("result", "error", "budget", "worst tile")
    rows = tuple((name, error, 2e-7, 0.1) for name in ("out", "dq", "dk", "dv"))
    table = Table("against fp64: all heads", tuple(map(Column, names)), rows)
    run = Run(f"id {spec.size}", spec, MACHINE)
    return replace(run, clock=clock, memory=memory, tables={ERRORS: table})


def wrong(spec, **times):
    """A cell that was quick and is wrong."""
    run = measured(spec, error=1e-3, **times)
    return replace(run, status="failed", reason="wrong: dq is 1.0e-03 from fp64")


def failed(spec, status="oom", reason="out of memory"):
    return Run(f"id {spec.size}", spec, MACHINE, status=status, reason=reason)
