import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from steplab.bench.collectives import group
from steplab.bench.collectives import rank as one_rank
from steplab.bench.collectives.job import (
    MAX_WORLD,
    OPS,
    Collective,
    Job,
    Outcome,
    algorithm_gbs,
    bus_gbs,
    message_bytes,
    message_elements,
    slowest,
)
from steplab.bench.collectives.rank import (
    RankResult,
    Timing,
    _judged,
    count_wrong,
    expected_tiles,
    sent_tiles,
    tile,
    write_tiles,
)
from steplab.bench.collectives.sweep import Grid, collectives_table, plan, refusal, sweep, to_run
from steplab.cli.main import main
from steplab.core import Accelerator, Environment, RunSpec
from steplab.core.errors import UserError
from steplab.costs.collectives import bus_factor
from steplab.store import Store

LAPTOP = Environment("0", "3.11", "Linux", "a CPU", cores=2, memory_bytes=None)
ONE_GPU = Environment(
    "0", "3.11", "Linux", "a CPU", 8, None, accelerators=(Accelerator("a GPU", 2**30),)
)
TOO_LARGE_MIB = 1e9  # 954 TiB: more than the 128 TiB that a process can address


# Bandwidths


def test_bus_factors_are_those_of_nccl_tests():
    assert [bus_factor("all-reduce", n) for n in (1, 2, 4)] == [0, 1, 1.5]
    for op in ("all-gather", "reduce-scatter", "all-to-all"):
        assert [bus_factor(op, n) for n in (1, 2, 4)] == [0, 0.5, 0.75]


def test_bandwidths_match_hand_computed_values():
    # 1 MiB in 2 ms: 1048576 B / 0.002 s = 524,288,000 B/s
    assert message_bytes(1, "fp32", 4) == 1048576
    assert algorithm_gbs(1048576, 2.0) == pytest.approx(0.524288)
    assert bus_gbs("all-reduce", 4, 1048576, 2.0) == pytest.approx(0.786432)
    assert bus_gbs("all-to-all", 4, 1048576, 2.0) == pytest.approx(0.393216)


def test_a_message_is_rounded_down_to_equal_parts():
    assert message_elements(1, "fp32", 3) == 262143
    assert message_elements(1, "bf16", 3) == 524286
    assert message_bytes(1, "bf16", 3) == 1048572


def test_the_slowest_rank_counts_in_every_run():
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.0]]) == (3.0, 5.0, 2.0)


# Verification


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_expected_values_are_what_the_collective_delivers(op, dtype):
    world, part = 3, 1500
    size = part if op == "all-gather" else part * world
    sent = [torch.empty(size, dtype=dtype) for _ in range(world)]
    for rank in range(world):
        write_tiles(sent[rank], sent_tiles(op, rank, world))
    for rank in range(world):
        mine = slice(rank * part, (rank + 1) * part)
        delivered = {
            "all-reduce": lambda: sum(sent),
            "all-gather": lambda: torch.cat(sent),
            "reduce-scatter": lambda mine=mine: sum(sent)[mine],
            "all-to-all": lambda mine=mine: torch.cat([x[mine] for x in sent]),
        }[op]()
        assert count_wrong(delivered, expected_tiles(op, rank, world)) == 0
        delivered[7] += 1
        assert count_wrong(delivered, expected_tiles(op, rank, world)) == 1
        assert count_wrong(delivered.roll(700), expected_tiles(op, rank, world)) > 100
        if op in ("reduce-scatter", "all-to-all"):
            assert count_wrong(delivered, expected_tiles(op, (rank + 1) % world, world)) > 100


def test_values_add_up_exactly_in_bf16_at_the_largest_world():
    tiles = [tile(rank, 0) for rank in range(MAX_WORLD)]
    total = torch.zeros_like(tiles[0], dtype=torch.bfloat16)
    for values in tiles:
        total += values.to(torch.bfloat16)
    assert torch.equal(total.long(), torch.stack(tiles).sum(0))


def test_nan_is_a_wrong_value():
    assert count_wrong(torch.full((10,), float("nan")), [tile(0, 0)]) == 10


def test_one_wrong_value_on_one_rank_fails_the_cell_and_hides_its_numbers():
    seen = [RankResult((Timing(1.0, 1.0),), 1.0, wrong=wrong) for wrong in (0, 3)]
    outcome = _judged(seen)
    assert (outcome.status, outcome.reason) == ("failed", "rank 1 received 3 wrong values")
    (spec,) = plan(Grid(("all-reduce",), (1.0,), (2,)))
    run = to_run(spec, outcome, LAPTOP)
    table = collectives_table([run])
    assert table.rows == (("all-reduce", "gloo", 2, 1.0, None, None, None, None, None, "failed"),)
    assert "rank 1 received 3 wrong values" in table.note


# Records


def test_a_run_keeps_the_slowest_rank_and_the_times_of_all():
    outcome = Outcome(
        rank_ms=((1.0, 5.0), (3.0, 4.0)), rank_host_ms=((1.0, 1.0), (2.0, 1.0)), window_ms=20.0
    )
    (spec,) = plan(Grid(("all-gather",), (1.0,), (2,), runs=2))
    run = to_run(spec, outcome, LAPTOP)
    assert run.clock is not None
    assert run.clock.step.values == (3.0, 5.0) and run.clock.host.values == (2.0, 1.0)
    assert run.tables["ranks"].rows == ((0, 1000.0, 3000.0), (1, 5000.0, 4000.0))
    message, median_us, algbw, busbw = run.tables["bandwidth"].rows[0]
    assert (message, median_us) == (1048576, 3000.0)  # the lower of two
    assert algbw == pytest.approx(0.349525, 1e-5) and busbw == pytest.approx(algbw / 2)
    assert collectives_table([run]).rows[0][4:9] == pytest.approx((3000, 3200, 4800, algbw, busbw))


def test_ranks_that_share_cores_are_named_below_the_table():
    outcome = Outcome(rank_ms=((1.0,),) * 3, rank_host_ms=((1.0,),) * 3, window_ms=1.0)
    two, three = plan(Grid(("all-reduce",), (1.0,), (2, 3)))
    assert to_run(two, outcome, LAPTOP).notes == ()
    table = collectives_table([to_run(three, outcome, LAPTOP)])
    assert "3 ranks shared 2 cores" in table.note and "not the algorithm" in table.note


def test_the_conditions_are_those_of_the_device_that_was_used():
    outcome = Outcome(rank_ms=((1.0,),), rank_host_ms=((1.0,),), window_ms=1.0)
    for device, named, other in (("cpu", "a CPU, 1 thread", "a GPU"), ("cuda", "a GPU", "a CPU")):
        (spec,) = plan(Grid(("all-reduce",), (1.0,), (1,), device=device))
        note = collectives_table([to_run(spec, outcome, ONE_GPU)]).note
        assert note.startswith(named) and other not in note


# One rank


@pytest.fixture
def alone(monkeypatch):
    """A group of one rank, without a backend."""
    monkeypatch.setattr(one_rank.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(one_rank.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(one_rank.dist, "all_gather_object", lambda everyone, mine: None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: tried 8 bytes"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA error: invalid device ordinal"), "failed"),
        (TypeError("a bug"), "failed"),
    ],
)
def test_only_missing_memory_is_called_oom(alone, monkeypatch, error, status):
    def refuse(*_):
        raise error

    monkeypatch.setattr(one_rank, "Buffers", refuse)
    cell = Collective("all-reduce", 1.0)
    job = Job(1, "gloo", "fp32", (cell,), runs=1, warmup=0, timeout_s=1)
    outcome = one_rank._measure(job, cell, torch.device("cpu"))
    assert outcome.status == status and str(error) in outcome.reason
    assert outcome.reason.startswith("rank 0 ") and "all-reduce of 1 MiB" in outcome.reason


class SimulatedGpu:
    """A host that queues and a device that works the queue off; times in microseconds."""

    def __init__(self, launch_us: float, operation_us: float) -> None:
        self.host_us = self.free_us = 0.0
        self.launch_us, self.operation_us = launch_us, operation_us
        self.token = None

    def queue(self, host_us: float, device_us: float) -> None:
        """Spend `host_us` on the host, then give the device `device_us` of work."""
        self.host_us += host_us
        self.free_us = max(self.free_us, self.host_us) + device_us

    def wait(self) -> None:
        self.host_us = max(self.host_us, self.free_us)

    def refill(self) -> None:
        self.queue(10, 30)

    def communicate(self) -> None:
        self.queue(self.launch_us, self.operation_us)

    def event(self, enable_timing: bool) -> "SimulatedEvent":
        return SimulatedEvent(self)


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.queue(1, 0)
        self.at_us = self.gpu.free_us

    def query(self) -> bool:
        return self.at_us <= self.gpu.host_us

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        return (end.at_us - self.at_us) / 1e3


@pytest.mark.parametrize(("launch_us", "late"), [(5, False), (60, False), (5000, True)])
def test_the_time_of_a_small_message_is_the_devices_not_the_hosts(monkeypatch, launch_us, late):
    gpu = SimulatedGpu(launch_us, operation_us=8)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.queue(5, cycles / 2000))
    monkeypatch.setattr(one_rank.dist, "barrier", gpu.wait)
    monkeypatch.setattr(one_rank.dist, "all_reduce", lambda token: gpu.queue(40, 8))
    seen = one_rank._time_queued(gpu)
    assert seen.late is late
    assert late or seen.ms == pytest.approx(8e-3)


def test_runs_that_waited_for_the_host_are_noted():
    ranks = [
        RankResult(tuple(Timing(1.0, 1.0, late) for late in lates), 3.0, wrong=0)
        for lates in ((False, True, False), (True, True, False))
    ]
    outcome = _judged(ranks)
    assert outcome.late_runs == 2
    (spec,) = plan(Grid(("all-reduce",), (1.0,), (2,), device="cuda"))
    table = collectives_table([to_run(spec, outcome, ONE_GPU)])
    assert "all-reduce of 1 MiB over 2 ranks: the host was late in 2 of 3 runs" in table.note
    on_time = to_run(spec, _judged([RankResult((Timing(1.0, 1.0),), 1.0, wrong=0)] * 2), ONE_GPU)
    assert on_time.notes == ()


# Groups of ranks


@pytest.mark.slow
def test_two_ranks_measure_every_collective_and_go_on_after_out_of_memory(tmp_path, capfd):
    flags = ["--mib", "0.01", str(TOO_LARGE_MIB), "--runs", "3", "--world", "2", "--device", "cpu"]
    out = tmp_path / "table.json"
    files = ["--out", str(out), str(tmp_path / "table.csv"), "--store", str(tmp_path / "store")]
    assert main(["bench", "collectives", *flags, *files]) == 0
    printed = capfd.readouterr()
    rows = json.loads(out.read_text())["rows"]
    assert [(row[0], row[-1]) for row in rows] == [(op, s) for op in OPS for s in ("ok", "oom")]
    assert all(row[4] > 0 and row[7] > 0 for row in rows if row[-1] == "ok")
    assert (
        (tmp_path / "table.csv").read_text().startswith("op,backend,world,size [MiB],median [us]")
    )
    assert "busbw [GB/s]" in printed.out and "had no memory" in printed.out
    # One line per cell and nothing of the ranks' own chatter.
    assert [line[:4] for line in printed.err.splitlines()] == [f"[{i}/8" for i in range(1, 9)]
    runs = [run for _, run in Store(tmp_path / "store").all()]
    assert len(runs) == 8 and len({run.group for run in runs}) == 1
    measured = [run for run in runs if run.status == "ok"]
    assert all(len(run.clock.step) == 3 and run.clock.window_ms > 0 for run in measured)
    assert all(run.environment.torch == torch.__version__ for run in runs)


@pytest.fixture
def launchers(monkeypatch):
    """Process ids of the groups that a test starts."""
    pids, start = [], subprocess.Popen

    def remember(command, **options):
        process = start(command, **options)
        if group.LAUNCHER in command:
            pids.append(process.pid)
        return process

    monkeypatch.setattr(group.subprocess, "Popen", remember)
    return pids


def processes() -> list[tuple[int, str, int, int, str]]:
    """Return (pid, state, parent, session, command) of every process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        found.append((int(folder.name), state, int(parent), int(session), command))
    return found


def living(session: int) -> list[int]:
    return [pid for pid, state, _, sid, _ in processes() if sid == session and state not in "ZX"]


def wait_until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def kill_first_rank(launchers: list[int]) -> None:
    def ranks() -> list[int]:
        return [
            p for p, _, parent, _, c in processes() if parent in launchers and "spawn_main" in c
        ]

    if wait_until(ranks):
        os.kill(ranks()[0], 9)


@pytest.mark.slow
def test_a_rank_that_dies_is_a_row_and_the_next_world_size_is_measured(store, launchers):
    grid = Grid(("all-reduce", "all-to-all"), (0.01,), (2, 3), dtype="bf16", runs=2)
    killer = threading.Thread(target=kill_first_rank, args=(launchers,))
    killer.start()
    runs = list(sweep(grid, store, LAPTOP))
    killer.join()
    assert [run.status for run in runs] == ["crashed", "crashed", "ok", "ok"]
    assert runs[0].reason.startswith("in all-reduce of 0.01 MiB, rank ")
    assert runs[1].reason == "not reached, because all-reduce of 0.01 MiB ended as crashed"
    assert [run.id for _, run in store.all()] == sorted(run.id for run in runs)
    assert len(launchers) == 2
    assert wait_until(lambda: not any(living(pid) for pid in launchers))


def test_a_timeout_is_a_row_and_leaves_no_process(store, launchers):
    grid = Grid(("all-reduce",), (0.01, 0.02), (2,), runs=10**8, timeout_s=3)
    runs = list(sweep(grid, store, LAPTOP))
    assert [run.status for run in runs] == ["timeout", "timeout"]
    assert "had not finished 3 s after the start" in runs[0].reason
    assert wait_until(lambda: not living(launchers[0]))


@pytest.mark.gpu
def test_one_nccl_rank_runs_every_collective(store):
    from steplab.probes.environment import capture_environment

    runs = list(sweep(Grid(OPS, (1.0,), (1,), device="cuda"), store, capture_environment()))
    assert [(run.status, run.reason) for run in runs] == [("ok", "")] * 4
    assert {run.clock.source for run in runs} == {"cuda events"}


# What is refused


def test_nccl_with_more_ranks_than_gpus_is_unsupported_and_starts_nothing(store, launchers):
    assert refusal("nccl", 1, ONE_GPU) == "" == refusal("gloo", 64, LAPTOP)
    assert "2 ranks found 1" in refusal("nccl", 2, ONE_GPU)
    runs = list(sweep(Grid(OPS, (1.0,), (2, 4), device="cuda"), store, ONE_GPU))
    assert {run.status for run in runs} == {"unsupported"} and launchers == []
    assert runs[0].spec.config["backend"] == "nccl"


def test_an_interrupted_sweep_goes_on_where_it_stopped(store):
    grid = Grid(OPS, (1.0,), (2,), device="cuda")
    begun = sweep(grid, store, ONE_GPU)
    first = next(begun)
    begun.close()
    runs = list(sweep(grid, store, ONE_GPU))
    assert runs[0] == first and len(runs) == len(store.ids()) == 4


def test_the_exit_code_says_that_nothing_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("steplab.probes.environment.capture_environment", lambda: ONE_GPU)
    flags = ["bench", "collectives", "--device", "cuda", "--store", str(tmp_path)]
    assert main(flags) == 3
    printed = capsys.readouterr()
    assert "unsupported" in printed.out and "NCCL ranks do not share a GPU" in printed.err
    monkeypatch.setattr(
        group, "run_job", lambda job: (Outcome("crashed", "gone") for _ in job.cells)
    )
    assert main([*flags[:3], "cpu", *flags[4:]]) == 4
    assert "the first: gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--op", "all-reduc"], "Did you mean 'all-reduce'?"),
        (["--dtype", "fp8"], "--dtype cannot be 'fp8'"),
        (["--worlds", "2"], "Did you mean '--world'?"),
        (["--out", "table.xls"], "Use a suffix of .csv, .md, .json"),
        (["--mib", "0.000001"], "Use a larger --mib."),
        (["--mib", "nan"], "Use a larger --mib."),
        (["--world", "0"], f"Use 1 to {MAX_WORLD}."),
        (["--runs", "0"], "at least 1 run"),
    ],
)
def test_bad_values_exit_with_2_and_a_suggestion(flags, sentence, tmp_path, capsys):
    assert main(["bench", "collectives", *flags, "--store", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_world_sizes_come_outermost_and_every_spec_says_what_it_measures():
    specs = plan(Grid(("all-reduce", "all-gather"), (1.0, 2.0), (2, 4), runs=7, warmup=3))
    assert [spec.config["world"] for spec in specs] == [2] * 4 + [4] * 4
    assert isinstance(specs[0], RunSpec) and (specs[0].steps, specs[0].warmup) == (7, 3)
    assert specs[0].config == {
        "op": "all-reduce",
        "world": 2,
        "mib": 1.0,
        "dtype": "fp32",
        "backend": "gloo",
        "runs": 7,
        "warmup": 3,
    }
    with pytest.raises(UserError):
        Grid(OPS, (1.0,), (2,), timeout_s=0)
