"""Rules about the time in which nothing runs: launches, waits, data, communication, captures."""

from dataclasses import replace

import pytest

from steplab.core import Compilation, OptimizerShape, Profile, Ran, Recipe, Samples
from steplab.core.run import OWN_LOOP, LoaderUse
from steplab.findings import Case, explain
from steplab.findings.claims import Claim, settled
from steplab.findings.rules import (
    allocator_calls,
    data_stall,
    exposed_communication,
    host_stall,
    late_start,
    launch_bound,
    many_graph_sizes,
    small_operators,
    split_optimizer,
    synchronization,
    unfused_optimizer,
    warmup_counted,
)
from steplab.trace.analyze import analyze
from tests.compare.test_step_tables import make_run
from tests.findings.steps import FP32, H200, RecordedOp, cpu_case, gpu_case, mm, rules, tensors
from tests.trace.traces import call, copy, kernel, op, python, range_, trace_of


def test_a_device_that_waits_for_launches():
    """Forty kernels of 1 us, for each of which the host needs 14 us."""
    slow = gpu_case([RecordedOp("aten::add", 1, late_us=10, module="blocks.0") for _ in range(40)])
    found = launch_bound.RULE(slow)
    assert 0.8 * slow.step_ms < found.stake_ms < slow.step_ms
    assert (
        "40 kernels in the median step" in found.evidence[0] and "blocks.*: 40" in found.evidence[1]
    )
    assert rules(slow)[0] == "launch_bound"
    assert launch_bound.RULE(gpu_case([RecordedOp("aten::add", 100) for _ in range(40)])) is None
    assert launch_bound.RULE(cpu_case([RecordedOp("aten::add", 1, late_us=10)] * 40)) is None


def test_launches_are_those_of_the_step_that_the_budget_shows():
    """Steps of 10, 12 and 50 kernels: 24 on average, 12 in the median one."""
    events, start = [], 0
    for number, count in enumerate((10, 12, 50)):
        begin = start
        for _ in range(count):
            events += [call("cudaLaunchKernel", start, 1_000, len(events) + 1)]
            events += [kernel("a", start + 2_000, 1_000, len(events))]
            start += 20_000
        events += [range_(f"ProfilerStep#{number}", begin, start - begin)]
    case = Case(None, analyze(trace_of(events, properties=H200)))
    assert "12 kernels in the median step" in launch_bound.RULE(case).evidence[0]
    assert sum(c.launches for c in case.analysis.budget.typical.categories) == 12


def test_without_any_kernel_in_its_steps_a_device_waits_for_nothing():
    """Else the median of no durations is a warning of numpy and an evidence of nan ms."""
    events = [kernel("before", 0, 1_000, 1)]
    for number, start in enumerate((10_000, 100_000)):
        events += [range_(f"ProfilerStep#{number}", start, 90_000)]
        events += [call("cudaLaunchKernel", start + 10_000, 50_000, number + 2)]
    case = Case(None, analyze(trace_of(events, properties=H200)))
    assert case.on_device and not case.rows.inside.any()
    assert launch_bound.RULE(case) is None


def test_the_profilers_own_cost_is_not_launching():
    """Unprofiled, the same step takes little more than its kernels."""
    done = [RecordedOp("aten::add", 10, late_us=10) for _ in range(40)]
    profiled = gpu_case(done)
    run = make_run(ms=0.42)
    assert launch_bound.RULE(profiled) is not None
    assert launch_bound.RULE(Case(run, profiled.analysis)) is None


def own_loop(*host, wait_us: int = 0, launches: int = 40) -> Case:
    """Two steps of a loop without ranges: 40 launches of 20 us each, then what `host` does.

    `host` are events that begin at 0; they are put behind the launches and last 50 ms in all. With
    `wait_us`, the device works that much longer and the host waits for it first.
    """
    events, start = [], 0
    for step in range(2):
        begin = start
        for number in range(launches):
            events += [call("cudaLaunchKernel", start, 2_000, 100 * step + number + 1)]
            events += [kernel("gemm", start + 3_000, 20_000, 100 * step + number + 1)]
            start += 21_000
        if wait_us:
            events += [call("cudaStreamSynchronize", start, wait_us * 1000)]
            events += [kernel("long", start - 100, wait_us * 1000, 100 * step + launches)]
            start += wait_us * 1000
        for event in host:
            events.append({**event, "ts": f"{(start + float(event['ts']) * 1000) / 1000:.3f}"})
        start += 50_000_000
        events += [range_(f"ProfilerStep#{step}", begin, start - begin)]
    return Case(None, analyze(trace_of(events, properties=H200)))


@pytest.mark.parametrize("name", ["next_batch", "fetch", "load", "get_next", "_next"])
def test_a_loader_that_sleeps_is_no_launching(name):
    """A generator in a loop of one's own: no range marks it, but the stack names it."""
    asleep = [python(f"train.py(9): {name}", 0, 50_000_000)]
    asleep += [python("<built-in function sleep>", 1_000, 49_000_000)]
    case = own_loop(*asleep)
    assert launch_bound.RULE(case) is None and rules(case) == ["data_stall"]
    found = data_stall.RULE(case)
    assert found.gain_ms == pytest.approx(50, rel=0.03) and found.gain_ms <= case.step_ms
    assert f"train.py:9 ({name})" in found.claim and "train.py:9" in found.evidence[1]


@pytest.mark.parametrize(
    ("caller", "rule"),
    [("contextlib.py(132): __enter__", "host_stall"), ("train.py(5): step", "data_stall")],
)
def test_entering_a_context_is_no_fetching(caller, rule):
    """contextlib enters a generator's context by `next`, as a loop asks a loader."""
    waits = [python("train.py(9): steps", 0, 50_000_000), python(caller, 500, 49_900_000)]
    waits += [python("<built-in function next>", 600, 49_899_000)]
    assert rules(own_loop(*waits)) == [rule]


def test_python_and_operators_of_the_host_are_named():
    for name in ("sample", "make", "log"):
        logging = own_loop(python(f"train.py(30): {name}", 0, 50_000_000))
        assert rules(logging) == ["host_stall"]
    found = host_stall.RULE(logging)
    assert "train.py:30 (log)" in found.claim and found.gain_ms == pytest.approx(50, rel=0.03)
    assert "with tensors on the device" in found.remedy
    on_cpu = own_loop(op("aten::sort", 0, 50_000_000), python("model.py(4): order", 0, 50_000_000))
    found = host_stall.RULE(on_cpu)
    assert "aten::sort at model.py:4 (order)" in found.claim and "aten::sort" in found.remedy
    unknown = host_stall.RULE(own_loop())
    assert unknown.gain_ms == pytest.approx(50, rel=0.03) and "with_stack" in unknown.remedy
    named = host_stall.RULE(own_loop(range_("decode video", 0, 50_000_000)))
    assert 'range "decode video"' in named.claim


def test_torchs_own_python_is_launching():
    """Preparing an update of many tensors takes torch a while; a graph would not need it."""
    preparing = own_loop(python("torch/optim/adamw.py(12): _init_group", 0, 50_000_000))
    assert preparing.silent_ms("python", "data") == 0 and launch_bound.RULE(preparing) is None
    many = own_loop(python("torch/optim/adamw.py(12): _init_group", 0, 50_000_000), launches=90)
    assert launch_bound.RULE(many).gain_ms == pytest.approx(9.0)  # 0.1 ms each, and no more
    allocating = own_loop(op("aten::empty_strided", 0, 50_000_000))
    assert "aten::" not in host_stall.RULE(allocating).claim
    saving = own_loop(
        python("train.py(3): main", 0, 50_000_000),
        python("torch/serialization.py(12): save", 0, 50_000_000),
    )
    assert rules(saving) == ["host_stall"] and "train.py:3" in host_stall.RULE(saving).claim


def test_a_wait_and_what_follows_it_have_one_cause():
    """Behind a long wait a short computation is the wait's; a long one is its own."""
    short = own_loop(python("train.py(5): metrics", 0, 50_000_000), wait_us=60_000)
    assert rules(short) == ["synchronization"]
    longer = own_loop(python("train.py(5): metrics", 0, 50_000_000), wait_us=2_000)
    assert rules(longer)[0] == "host_stall"
    claimed = [f.gain_ms for f in explain(longer)]
    assert sum(claimed) <= longer.step_ms


def test_the_garbage_collector_is_one_finding():
    """The host stands still at the line of gc.collect(): one cause, told once, with its line."""
    case = own_loop(python("train.py(30): step", 0, 50_000_000))
    run = make_run(ms=case.step_ms)
    run = replace(run, clock=replace(run.clock, collector_ms=49.9))
    collecting = replace(case, run=run)
    assert rules(collecting)[0] == "garbage_collection" and "host_stall" not in rules(collecting)
    assert "train.py:30 (step)" in explain(collecting)[0].evidence[1]
    compiling = replace(run, compilation=Compilation(graphs=4, graphs_in_window=2))
    assert "garbage_collection" not in rules(replace(case, run=compiling))


def test_the_collector_strikes_at_the_line_that_makes_its_objects():
    """Every few steps: the median step has none, and the line's own time is told beside it."""
    case = own_loop(python("train.py(30): step", 0, 50_000_000))
    run = make_run(ms=case.step_ms)
    line = "train.py:31 (step)"
    rare = replace(
        run.clock, collector_ms=20.0, collector_median_ms=0.0, collector_lines={line: 18.0}
    )
    found = explain(replace(case, run=replace(run, clock=rare)))
    assert [finding.rule for finding in found][:2] == ["host_stall", "garbage_collection"]
    assert found[0].gain_ms > 45 and found[1].evidence[1] == f"90.0 % of it strikes at {line}"
    assert found[1].remedy.startswith("make fewer objects")
    # Here and there it strikes in any program: no line makes more objects than the others.
    spread = replace(rare, collector_lines={line: 8.0, "train.py:40 (step)": 7.0})
    told = explain(replace(case, run=replace(run, clock=spread)))[1]
    assert line not in " ".join(told.evidence) and told.remedy.startswith("no gc.collect()")


def test_a_pause_counts_where_it_comes_again():
    """A busy machine takes the host away at another line in every step."""

    def step(number: int, line: str) -> list:
        start = number * 2_000_000
        return [
            range_(f"ProfilerStep#{number}", start, 2_000_000),
            op("aten::mm", start, 1_000_000),
            python(line, start + 1_000_000, 1_000_000),
        ]

    def case(*lines: str) -> Case:
        events = [event for number, line in enumerate(lines) for event in step(number, line)]
        return Case(None, analyze(trace_of(events)))

    again = case(*["train.py(7): report"] * 3)
    assert host_stall.RULE(again).gain_ms == pytest.approx(1.0) and rules(again) == ["host_stall"]
    assert host_stall.RULE(case(*(f"train.py({n}): step" for n in (7, 8, 9)))) is None


def test_the_stack_of_the_detailed_step_names_the_line():
    """The lean trace has no stacks: the line comes from between the same launches."""

    def step(stacks: bool) -> list:
        events = [range_("ProfilerStep#1", 0, 12_000_000)]
        for number, start in enumerate((0, 10_000_000), 1):
            events += [call("cudaLaunchKernel", start, 2_000, number)]
            events += [kernel("gemm", start + 3_000, 900_000, number)]
        if stacks:
            events += [python("train.py(8): render", 100_000, 9_800_000)]
        return events

    found = analyze(trace_of(step(False)), trace_of(step(True)))
    assert "train.py:8 (render)" in host_stall.RULE(Case(None, found)).claim
    alone = host_stall.RULE(Case(None, analyze(trace_of(step(False)))))
    assert "train.py" not in alone.claim


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_a_kernel_is_loaded_at_its_first_launch(vendor):
    """A recording that begins cold: its first launches are long, and memory comes from the driver.

    Ten kernels are launched ten times each; each first launch takes 3 ms, with a stack around it.
    """

    def recording(long_turn: int) -> Case:
        events, start = [], 0
        for turn in range(10):
            for which in range(10):
                number = len(events) + 1
                long = 3_000_000 if turn == long_turn else 5_000
                events += [call(f"{vendor}LaunchKernel", start, long, number)]
                events += [kernel(f"k{which}", start + long, 2_000, number)]
                start += long + 5_000
                if turn == long_turn:
                    events += [call(f"{vendor}Malloc", start, 200_000)]
                    start += 200_000
        whole = [python("torch/nn/modules/linear.py(3): forward", 0, start)]
        return Case(None, analyze(trace_of([*events, *whole])))

    cold = recording(0)
    assert rules(cold)[0] == "warmup_counted" and host_stall.RULE(cold) is None
    found = warmup_counted.RULE(cold)
    assert found.gain_ms == pytest.approx(32, rel=0.01)
    assert found.evidence[0] == "10 kernels at their first launch: 30.00 ms, the longest 3.000 ms"
    assert allocator_calls.RULE(cold) is None, "taken with the rest of the start"
    warm = recording(1)  # held up later, for whatever reason
    assert warmup_counted.RULE(warm) is None and allocator_calls.RULE(warm) is not None
    assert host_stall.RULE(warm).gain_ms > 20
    assert "with_stack" not in host_stall.RULE(warm).remedy, "it has them"


def test_a_recording_without_an_operator_has_no_small_ones():
    """What waited for the device is known all the same."""
    case = Case(None, analyze(trace_of([call("cudaDeviceSynchronize", 0, 185_000_000)])))
    assert case.term_ms("synchronization") == 185 and case.term_ms("launch") == 0
    assert small_operators.RULE(case) is None and not rules(case)


def test_compiling_is_one_finding():
    case = own_loop(op("entire_frame_compile", 0, 49_900_000), op("aten::mm", 10_000, 40_000_000))
    assert rules(case) == ["recompiles"]


def test_a_cpu_that_stands_still_and_one_that_only_calls():
    asleep = [mm(64, 64, 64, 900, FP32), mm(64, 64, 64, 100, FP32, late_us=1_000)]
    case = cpu_case(asleep, extra=[python("train.py(7): report", 900_000, 1_000_000)])
    assert rules(case) == ["host_stall"]
    found = host_stall.RULE(case)
    assert "train.py:7" in found.claim and found.why == "no operator runs meanwhile"
    assert "device" not in found.remedy
    turn = RecordedOp("aten::add", 4, late_us=6, line="rnn.py(3): forward", module="rnn")
    found = small_operators.RULE(cpu_case([turn] * 100 + [mm(64, 64, 64, 500, FP32)]))
    assert "rnn.py:3 (forward)" in found.claim and "aten::add 100 times" in found.evidence[1]
    assert found.stake_ms == pytest.approx(0.6 + 0.3, rel=0.05)
    assert found.gain_ms == pytest.approx(0.75 * found.stake_ms)
    assert "where each turn needs the one before, torch.compile" in found.remedy
    launched = small_operators.RULE(gpu_case([turn] * 100))
    assert "loop in Python at rnn.py:3" in launched.claim and launched.gain_ms < launched.stake_ms
    assert small_operators.RULE(gpu_case([turn] * 20)) is None  # no loop
    # Kernels of 8 us that read and write what would take 0.2 us go with their launches.
    small = replace(turn, us=8, args=tensors([64], [64]))
    found = small_operators.RULE(gpu_case([small] * 100))
    assert found.gain_ms == pytest.approx((0.2 + 0.8) * 0.99, rel=0.02)
    assert "800.0 us because they are small" in found.evidence[1]
    assert small_operators.RULE(cpu_case([mm(64, 64, 64, 100, FP32, late_us=5)] * 40)) is None
    # Layers of a model are no loop: each is a module of its own.
    layers = [
        RecordedOp("aten::add", 40, line="net.py(3): forward", module=f"blocks.{i}")
        for i in range(48)
    ]
    assert small_operators.RULE(cpu_case(layers)) is None


@pytest.mark.parametrize(("updates", "found"), [(1, True), (8, False)])
def test_tiny_micro_batches_are_told_from_updates(updates, found):
    """Eight passes with 40 operators each; an update after each of them is a smaller batch."""
    half = [RecordedOp("aten::add", 4, late_us=6, line="net.py(3): forward")] * 20
    back = [replace(one, phase="backward", line="") for one in half]
    lines = []
    for turn in range(8):
        begin = turn * 400_000
        lines += [op("line:train.py:7 (step)", begin, 200_000)]
        lines += [op("line:train.py:8 (step)", begin + 200_000, 200_000)]
    steps = [
        range_("Optimizer.step#AdamW.step", turn * 400_000 + 399_000, 900)
        for turn in range(updates)
    ]
    said = small_operators.RULE(cpu_case([*half, *back] * 8, extra=[*lines, *steps]))
    assert ("8 micro-batches, each with a backward pass at train.py:8" in said.claim) == found
    assert ("larger micro-batches" in said.remedy) == found


def test_a_loop_is_called_where_it_takes_most_time():
    """96 short calls in a rollout take more than the one long call of the update."""
    call = RecordedOp("aten::add", 4, late_us=6, line="net.py(3): forward")
    long = RecordedOp("aten::add", 300, line="net.py(3): forward")
    lines = [op("line:train.py:9 (update)", 0, 299_900), op("line:net.py:3 (forward)", 0, 299_000)]
    for turn in range(96):
        begin = 300_000 + turn * 10_000
        lines += [op("line:train.py:5 (play)", begin, 9_900)]
        lines += [op("line:net.py:3 (forward)", begin, 9_800)]
    said = small_operators.RULE(cpu_case([long, *[call] * 96], extra=lines))
    assert any("called at train.py:5 (play)" in one for one in said.evidence)


def test_a_loop_over_many_modules_of_one_list():
    """A deep model has fewer layers than this."""

    def critics(count: int) -> Case:
        return cpu_case([
            RecordedOp("aten::linear", 4, late_us=6, line="net.py(3): q", module=f"critics.{i}.0")
            for i in range(count)
        ])  # fmt: skip

    found = small_operators.RULE(critics(100))
    assert "the loop at net.py:3 (q)" in found.claim and "aten::linear 100" in found.evidence[1]
    few = small_operators.RULE(critics(50))
    assert "loop" not in few.claim and "loop" not in few.remedy


def test_an_optimizer_for_every_module():
    """On a CPU its Python counts, and is no small operator of the model."""
    own = {"phase": "optimizer", "args": {"shapes": [[[64], [64]]], "dtypes": ["TensorList"]}}
    updates = [RecordedOp("aten::_fused_adamw_", 10, late_us=40, **own) for _ in range(40)]
    done = [mm(64, 64, 64, 1_000, FP32), *updates]
    ranges = [
        range_("Optimizer.step#AdamW.step", 1_000_000 + 50_000 * i, 50_000) for i in range(40)
    ]
    shapes = tuple(OptimizerShape("AdamW", 1, 2) for _ in range(40))
    lines = {"AdamW": ("train.py:9 (main)",)}
    run = make_run(ms=3.0)
    profile = Profile((0, 1, 1, 1), (), optimizers=shapes, setup_lines=lines)
    case = cpu_case(done, replace(run, clock=None, profile=profile), extra=ranges)
    found = split_optimizer.RULE(case)
    assert found.stake_ms == pytest.approx(40 * 0.04, rel=0.05)
    assert "40 optimizers, made at train.py:9 (main)" in found.evidence
    assert "small_operators" not in rules(case)


def test_long_operators_and_views_of_a_loop_are_no_calls():
    """Of 3 us for a call, a view takes a fifth; a product takes no less for having views."""
    turn = [mm(64, 64, 64, 200, FP32, line="net.py(3): play")]
    turn += [RecordedOp("aten::view", 1, line="net.py(3): play")] * 30
    assert small_operators.RULE(cpu_case(turn * 30)) is None
    calls = [RecordedOp("aten::add", 3, line="net.py(3): play")] * 30
    assert small_operators.RULE(cpu_case([turn[0], *calls] * 30)) is not None


def test_the_profiler_slows_calls_as_it_slows_operators():
    """A step of 2 ms that takes 4 under the profiler: of 3 ms between operators, 1.5 remain."""
    turn = RecordedOp("aten::add", 10, late_us=30, line="rnn.py(3): forward")
    recorded = cpu_case([turn] * 100)
    found = small_operators.RULE(replace(recorded, run=make_run(ms=2.0)))
    assert found.stake_ms == pytest.approx(1.5 + 0.3, rel=0.05)


def test_launch_bound_without_a_trace():
    run = make_run(ms=10.0)
    wait = replace(run.clock, data_wait=Samples((0.1,), "ms"))
    idle = replace(run, clock=wait, ran=Ran(device_busy_ms=4.0, kernel_launches=3000))
    found = launch_bound.RULE(Case(idle))
    assert found.stake_ms == pytest.approx(5.9) and "3000 launches" in found.evidence[0]
    assert launch_bound.RULE(Case(replace(idle, ran=Ran(device_busy_ms=9.5)))) is None
    assert launch_bound.RULE(Case(replace(idle, ran=Ran()))) is None


def synchronized(
    late: int, call_name: str = "cudaStreamSynchronize", op_name: str = "aten::item"
) -> Case:
    """A kernel, a wait of the host for it, `late` us of host work, another kernel."""
    events = [
        range_("ProfilerStep#1", 0, (300 + late) * 1000),
        range_("forward", 0, (200 + late) * 1000),
        op(op_name, 20_000, 85_000),
        call("cudaLaunchKernel", 1_000, 1_000, 1),
        kernel("a", 2_000, 100_000, 1),
        call(call_name, 22_000, 82_000),
        call("cudaLaunchKernel", (106 + late) * 1000, 1_000, 2),
        kernel("b", (108 + late) * 1000, 100_000, 2),
    ]
    from steplab.trace.analyze import analyze
    from tests.trace.traces import trace_of

    return Case(None, analyze(trace_of(events)))


def test_waits_cost_what_the_device_idles_after_them():
    found = synchronization.RULE(synchronized(late=40))
    assert found.stake_ms == pytest.approx(0.044, abs=0.005)
    assert "aten::item" in found.evidence[0] and "aten::item" in found.remedy
    assert "synchronization" in rules(synchronized(late=40))
    # The idle time that follows a wait belongs to it and not to slow launching.
    assert launch_bound.RULE(synchronized(late=40)) is None


def logged() -> Case:
    """A kernel that one line bins, whose copy to the host the same line waits for, and another."""
    events = [
        range_("ProfilerStep#1", 0, 340_000),
        range_("forward", 0, 240_000),
        python("train.py(7): log", 0, 130_000),
        op("aten::histc", 500, 20_000),
        call("cudaLaunchKernel", 1_000, 1_000, 1),
        kernel("bins", 2_000, 100_000, 1),
        op("aten::item", 20_500, 85_000),
        call("cudaMemcpyAsync", 21_000, 900, 3),
        copy("Memcpy DtoH (Device -> Pageable)", 102_000, 1_000, 3),
        call("cudaStreamSynchronize", 22_000, 82_000),
        op("aten::mul", 146_000, 2_000),
        call("cudaLaunchKernel", 146_000, 1_000, 2),
        kernel("other", 148_000, 100_000, 2),
    ]
    return Case(None, analyze(trace_of(events)))


def test_work_takes_the_waits_of_its_line_along():
    """100 us of bins and 45 of idling behind their copy go together; not with another line."""
    case = logged()
    bins, other = (case.rows.labeled("name", name.__eq__) for name in ("bins", "other"))
    of_line = case.rows.labeled("line", lambda line: line.startswith("train.py:7"))
    assert case.cost_ms(of_line) == pytest.approx(0.146, abs=0.002)
    assert case.cost_ms(bins) == pytest.approx(0.1 + 0.045 * 100 / 101, abs=0.001)
    assert case.launched_ms(bins) == pytest.approx(0.1, abs=0.001)
    assert case.cost_ms(other) == case.launched_ms(other)


def test_a_wait_that_another_finding_has_told_is_not_told_again():
    case = logged()
    wait = synchronization.RULE(case)
    assert wait.work.tolist() == case.rows.labeled("name", lambda n: "Memcpy" in n).tolist()
    of_line = case.rows.labeled("line", lambda line: line.startswith("train.py:7"))
    told = ("unused_work", "bins for nothing", (), "leave them out")
    bins = Claim(*told, gain_ms=case.cost_ms(of_line), work=of_line)
    assert [one.rule for one in settled([wait, bins], case)] == ["unused_work"]
    assert [one.rule for one in settled([wait], case)] == ["synchronization"]


def test_freeing_memory_is_no_value_of_an_operator():
    """An allocator that ran out frees inside whichever operator comes next."""
    case = synchronized(40, call_name="cudaFree", op_name="aten::addmm")
    assert rules(case)[0] == "allocator_calls" and synchronization.RULE(case) is None
    found = allocator_calls.RULE(case)
    assert "aten::addmm" not in found.remedy and "empty_cache" in found.remedy
    assert found.evidence[0].startswith("cudaFree")
    assert found.gain_ms <= case.step_ms - case.busy_ms, "the work of the device stays"


def test_the_recorders_own_wait_is_no_fault():
    events = [
        range_("ProfilerStep#1", 0, 400_000),
        range_("step", 0, 390_000),
        call("cudaLaunchKernel", 1_000, 1_000, 1),
        kernel("a", 2_000, 100_000, 1),
        range_("wait for the step before", 20_000, 90_000),
        call("cudaEventSynchronize", 22_000, 82_000),
        call("cudaLaunchKernel", 150_000, 1_000, 2),
        kernel("b", 152_000, 100_000, 2),
    ]
    ours = Case(None, analyze(trace_of(events)))
    assert len(ours.analysis.syncs.start) == 0 and synchronization.RULE(ours) is None
    theirs = [event for event in events if event["name"] != "wait for the step before"]
    found = synchronization.RULE(Case(None, analyze(trace_of(theirs))))
    assert found.claim.startswith("once a step") and "cudaEventSynchronize: 1" in found.evidence[0]
    assert found.remedy.startswith("leave cudaEventSynchronize out")


def replayed(gap_us: int) -> Case:
    """One launch, and 50 kernels of 2 us with a gap before each."""
    events = [call("cudaGraphLaunch", 0, 5_000, 7)]
    events += [
        kernel("k", 6_000 + number * (2 + gap_us) * 1000, 2_000, 7, graph=3) for number in range(50)
    ]
    events += [range_("ProfilerStep#1", 0, 6_000 + 50 * (2 + gap_us) * 1000)]
    return Case(None, analyze(trace_of(events, properties=H200)))


def test_work_that_is_launched_and_not_begun():
    short = late_start.RULE(replayed(gap_us=3))
    assert short.stake_ms == pytest.approx(0.15, rel=0.05) and "compile=blocks" in short.remedy
    assert rules(replayed(gap_us=3)) == ["late_start"]
    long = late_start.RULE(replayed(gap_us=100))
    assert "other processes" in long.remedy


def recording(gap_before: int) -> Case:
    """Three launches at once, and one long wait before the first or the second of their kernels."""
    launches = [call("hipLaunchKernel", 1_000 * n, 500, n) for n in (1, 2, 3)]
    starts = [900_000 * (n >= gap_before) + 20_000 * n for n in (1, 2, 3)]
    kernels = [kernel("k", start, 15_000, n) for n, start in enumerate(starts, 1)]
    return Case(None, analyze(trace_of([*launches, *kernels], properties=H200)))


def test_what_a_recording_does_not_hold_is_no_late_start():
    """Before its first work, the device may compute what was launched before the recording."""
    assert late_start.RULE(recording(gap_before=1)) is None
    found = late_start.RULE(recording(gap_before=2))
    assert found.stake_ms == pytest.approx(0.9, rel=0.05) and "record again" in found.remedy


def test_two_steps_have_no_middle_one():
    """A wait is never longer than the step that is shown."""
    events = [
        range_("ProfilerStep#1", 0, 1_000_000),
        range_("ProfilerStep#2", 1_000_000, 3_000_000),
    ]
    for start, wait, number in ((0, 600_000, 1), (1_000_000, 2_600_000, 2)):
        events += [
            range_("data", start, wait),
            call("cudaLaunchKernel", start + wait, 1_000, number),
            kernel("k", start + wait + 5_000, 390_000, number),
        ]
    case = Case(None, analyze(trace_of(events, properties=H200)))
    found = data_stall.RULE(case)
    assert found.stake_ms == pytest.approx(0.6, rel=0.02) and found.stake_ms < case.step_ms


def test_a_line_is_named_if_it_explains_most():
    """What no stack tells is not the fault of the line that one does tell."""

    def silent(unknown_us: int) -> Case:
        events, at = [], 0
        for number in (1, 2, 3):
            events += [
                call("cudaLaunchKernel", at, 1_000, number),
                kernel("k", at + 2_000, 9_000, number),
            ]
            at += 9_000_000 if number == 1 else unknown_us * 1000
        events += [range_("mine", 100_000, 8_800_000), range_("ProfilerStep#1", 0, at + 20_000)]
        return Case(None, analyze(trace_of(events, properties=H200)))

    named, unknown = (host_stall.RULE(silent(us)) for us in (2_500, 9_000))
    assert 'range "mine"' in named.claim and "with_stack" in named.remedy
    assert "launches nothing" in unknown.claim and "stacks" in unknown.remedy


def test_short_steps_are_not_late():
    assert late_start.RULE(gpu_case([mm(64, 64, 64, 100)] * 3)) is None


def test_hip_and_mtia_are_read_by_the_same_rules():
    """The calls of both have categories of their own; a graph is no remedy on MTIA."""

    def step(call_name: str, calls: str, kernels: str) -> Case:
        events = [range_("ProfilerStep#1", 0, 2_000_000)]
        for number in range(1, 101):
            start = number * 20_000
            events += [call(call_name, start, 5_000, number, category=calls)]
            events += [{**kernel("k", start + 6_000, 1_000, number), "cat": kernels}]
        return Case(None, analyze(trace_of(events)))

    amd = launch_bound.RULE(step("hipLaunchKernel", "hip_runtime", "kernel"))
    assert amd.gain_ms == pytest.approx(1.9, rel=0.1) and "cuda_graph" in amd.remedy
    on_mtia = step("runFunction", "mtia_runtime", "mtia_ccp_events")
    assert "MTIA is not in the catalog: the ideal is unknown" in on_mtia.analysis.budget.notes
    mtia = launch_bound.RULE(on_mtia)
    assert mtia.gain_ms == pytest.approx(amd.gain_ms) and "cuda_graph" not in mtia.remedy


def test_no_wait_no_finding():
    assert synchronization.RULE(gpu_case([mm(64, 64, 64, 100)] * 3)) is None
    assert synchronization.RULE(cpu_case([mm(64, 64, 64, 100)])) is None


def test_the_device_idles_for_a_batch():
    """The host fetches for 300 us while the device has 100 us of work left."""
    done = [mm(64, 64, 64, 100), mm(64, 64, 64, 600, late_us=300)]
    case = gpu_case(done, extra=[range_("data", 4_000, 300_000)])
    found = data_stall.RULE(case)
    assert found.stake_ms == pytest.approx(0.2, abs=0.01) and rules(case)[0] == "data_stall"
    assert "num_workers=2" in found.remedy
    mark = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    longer = [mm(64, 64, 64, 100), mm(64, 64, 64, 600, late_us=3_000)]
    busy = data_stall.RULE(gpu_case(longer, extra=[range_(mark, 4_000, 3_000_000)]))
    assert "more workers" in busy.remedy and "num_workers" not in busy.remedy
    # Taking over a batch that is ready is no wait.
    brief = [mm(64, 64, 64, 100), mm(64, 64, 64, 600, late_us=150)]
    assert data_stall.RULE(gpu_case(brief, extra=[range_(mark, 4_000, 150_000)])) is None
    hidden = [mm(64, 64, 64, 900), mm(64, 64, 64, 600, late_us=300)]
    assert data_stall.RULE(gpu_case(hidden, extra=[range_("data", 4_000, 300_000)])) is None


def test_a_cpu_waits_as_long_as_it_fetches():
    run = make_run(ms=10.0)
    stalled = replace(run, clock=replace(run.clock, data_wait=Samples((3.0, 3.0), "ms")))
    assert data_stall.RULE(Case(stalled)).stake_ms == 3.0
    # A batch of a worker comes through a pipe: it takes 1 ms where a core does that, too.
    assert data_stall.RULE(Case(stalled)).gain_ms == 2.0
    assert not data_stall.RULE(Case(stalled)).ordinary
    little = replace(run, clock=replace(run.clock, data_wait=Samples((1.4, 1.4), "ms")))
    assert data_stall.RULE(Case(little)).ordinary
    on_cuda = replace(stalled, spec=replace(stalled.spec, device="cuda"))
    assert data_stall.RULE(Case(on_cuda)).gain_ms == 3.0
    brief = replace(run, clock=replace(run.clock, data_wait=Samples((0.4, 0.4), "ms")))
    assert data_stall.RULE(Case(brief)) is None


def test_a_loop_of_ones_own_is_told_of_its_loader():
    run = make_run(ms=10.0)
    stalled = replace(run, clock=replace(run.clock, data_wait=Samples((3.0, 3.0), "ms")))
    own = replace(stalled, notes=(OWN_LOOP,))
    assert data_stall.RULE(Case(stalled)).remedy.startswith("prefetch=2; in a loop of your own")
    remedy = data_stall.RULE(Case(own)).remedy
    assert "DataLoader(..., num_workers=2" in remedy and "prefetch=" not in remedy


MADE = Profile(
    (0, 1, 1, 1),
    (),
    setup_lines={"DataLoader": ("train.py:3 (main)",), "collate_fn": ("train.py:4 (main)",)},
)


def test_a_loader_without_workers_is_named_with_the_line_that_asks_it():
    done = [mm(64, 64, 64, 100), mm(64, 64, 64, 600, late_us=3_000)]
    asking = op("line:train.py:9 (step)", 4_000, 3_000_000)
    fetch = range_("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 5_000, 2_990_000)
    case = gpu_case(done, extra=[asking, fetch])
    run = replace(make_run(ms=case.step_ms), profile=MADE)
    found = data_stall.RULE(replace(case, run=run))
    assert "the loader has no workers (num_workers=0)" in found.evidence
    assert "a DataLoader is made at train.py:3 (main)" in found.evidence
    assert "asked for at train.py:9 (step)" in found.evidence


@pytest.mark.parametrize(
    ("waits", "piped", "remedy"),
    [(6.0, 2**25, "return tensors"), (6.0, 0, "more workers"), (0.8, 2**25, "")],
)
def test_workers_fill_their_queue_while_a_recording_starts(waits, piped, remedy):
    """The recorded step finds its batch ready; the timed ones wait for it, 4 ms at most."""
    ready = range_("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 4_000, 50_000)
    recorded = gpu_case([mm(64, 64, 64, 6_000)], extra=[ready])
    run = make_run(ms=10.0)
    wait = Samples((waits,) * 2, "ms")
    clock = replace(run.clock, data_wait=wait, loader=LoaderUse(4, piped))
    found = data_stall.RULE(Case(replace(run, clock=clock, profile=MADE), recorded.analysis))
    assert (found is not None) == bool(remedy)
    if found is not None:
        assert found.gain_ms == pytest.approx(4.0) and remedy in found.remedy
        assert any("32.0 MiB of each batch" in one for one in found.evidence) == bool(piped)
        assert ("a collate_fn is given at train.py:4 (main)" in found.evidence) == bool(piped)


def test_the_lines_of_workers_stand_before_the_line_that_asks_them():
    ready = range_("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 4_000, 50_000)
    recorded = gpu_case([mm(64, 64, 64, 6_000)], extra=[ready])
    run = make_run(ms=10.0)
    use = LoaderUse(4, lines={"data.py:12 (crop)": 0.7, "data.py:14 (crop)": 0.2})
    clock = replace(run.clock, data_wait=Samples((6.0,) * 2, "ms"), loader=use)
    found = data_stall.RULE(Case(replace(run, clock=clock), recorded.analysis))
    assert found.claim.endswith("(data.py:12 (crop))")
    assert "a worker is at data.py:12 (crop) for 70.0 % of its time" in found.evidence
    assert "a worker is at data.py:14 (crop) for 20.0 % of its time" in found.evidence


@pytest.mark.parametrize("workers", [0, 4])
def test_an_epoch_for_each_batch_is_no_lack_of_workers(workers):
    fetch = range_("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 4_000, 3_000_000)
    recorded = gpu_case([mm(64, 64, 64, 6_000)], extra=[fetch])
    run = make_run(ms=10.0)
    wait = Samples((6.0,) * 2, "ms")
    clock = replace(run.clock, data_wait=wait, loader=LoaderUse(workers, left_epochs=0.75))
    found = data_stall.RULE(Case(replace(run, clock=clock), recorded.analysis))
    assert "one iterator" in found.remedy and "workers" not in found.remedy
    assert "an epoch is begun for each batch, and left after it" in found.evidence


def test_workers_that_are_slower_than_the_step_make_it_wait_now_and_then():
    quick, slow = [10.0] * 5, [10.0, 10.0, 10.0, 45.0]
    loader = python("torch/utils/data/dataloader.py(700): __next__", 0, 100_000)
    fetched = cpu_case([mm(64, 64, 64, 400)], extra=[loader])

    def timed(samples: list[float]) -> Case:
        run = make_run(ms=10.0)
        clock = replace(run.clock, step=Samples(tuple(samples), "ms"))
        return Case(replace(run, clock=clock), fetched.analysis)

    found = data_stall.RULE(timed([*quick, *slow, *slow, *slow]))
    assert "3 of 17 steps wait" in found.claim and found.gain_ms == pytest.approx(105 / 17)
    assert data_stall.RULE(timed([45.0, 45.0, *quick, *quick, *quick])) is None  # warm-up
    other = cpu_case([mm(64, 64, 64, 400)])  # no loader: another reason
    assert data_stall.RULE(replace(timed([*quick, *slow, *slow]), analysis=other.analysis)) is None


def test_communication_beside_kernels_is_hidden():
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    compute = [mm(64, 64, 64, 300)]

    def beside(start: int) -> Case:
        sent = [call("cudaLaunchKernel", 5_000, 1_000, 50)]
        sent.append(kernel(ring, start, 100_000, 50, stream=20))
        return gpu_case(compute, extra=sent, until_us=420)

    found = exposed_communication.RULE(beside(310_000))
    assert found.stake_ms == pytest.approx(0.1) and "ncclDevKernel" in found.evidence[0]
    assert exposed_communication.RULE(beside(50_000)) is None
    assert exposed_communication.RULE(gpu_case(compute)) is None


def test_what_hides_communication_depends_on_what_is_sent():
    def remedy(name: str, phase: str = "backward", extra: tuple = ()) -> str:
        done = [mm(64, 64, 64, 100, phase=phase), RecordedOp("c10d::send", 200, name, phase=phase)]
        return exposed_communication.RULE(gpu_case(done, extra=extra)).remedy

    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    wrapped = range_("DistributedDataParallel.forward", 0, 1_000)
    assert "bucket by bucket" in remedy(ring)
    assert "already" in remedy(ring, extra=(wrapped,))
    assert "gradients" not in remedy(ring, phase="forward")
    assert "half of the batch" in remedy("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t")
    assert "next layer" in remedy("ncclDevKernel_AllGather_RING_LL")


def test_launches_that_are_left_in_a_compiled_or_replayed_step():
    def remedy(name: str, launch: str) -> str:
        done = [RecordedOp(name, 5, late_us=60) for _ in range(20)]
        extra = (call(launch, 1, 1, 77),)
        return launch_bound.RULE(gpu_case(done, extra=extra)).remedy

    plain = remedy("aten::add", "cudaLaunchKernel")
    assert "cuda_graph=step" in plain and "compile=blocks" in plain
    assert "compile=blocks" not in remedy("Torch-Compiled Region: 0/0", "cudaLaunchKernel")
    assert "rest of the step" in remedy("aten::add", "cudaGraphLaunch")


def test_a_copy_to_the_device_waits_for_pageable_memory():
    def remedy(name: str) -> str:
        events = [
            range_("ProfilerStep#1", 0, 1_000_000),
            op("aten::copy_", 1_000, 400_000),
            call("cudaMemcpyAsync", 2_000, 9_000, 1),
            copy(name, 5_000, 300_000, 1, 2**20),
            call("cudaStreamSynchronize", 20_000, 290_000),
            call("cudaLaunchKernel", 500_000, 1_000, 2),
            kernel("k", 502_000, 100_000, 2),
        ]
        return synchronization.RULE(Case(None, analyze(trace_of(events)))).remedy

    assert "pin_memory" in remedy("Memcpy HtoD (Pageable -> Device)")
    assert "on the device" in remedy("Memcpy DtoH (Device -> Pageable)")


def test_graphs_captured_while_training():
    def captured(at: int) -> list[dict[str, object]]:
        return [
            call("cudaStreamBeginCapture", at + 10_000, 1_000),
            call("cudaStreamEndCapture", at + 400_000, 1_000),
            call("cudaGraphInstantiateWithFlags", at + 410_000, 90_000),
        ]

    case = gpu_case([mm(64, 64, 64, 300)], extra=captured(0), until_us=600)
    found = many_graph_sizes.RULE(case)
    assert found.stake_ms == pytest.approx(0.49) and "a graph was captured" in found.claim
    assert found.gain_ms is None and "record steps after" in found.remedy
    later = [*captured(0), *captured(1_000_000), range_("ProfilerStep#2", 900_000, 700_000)]
    again = many_graph_sizes.RULE(gpu_case([mm(64, 64, 64, 300)], extra=later, until_us=600))
    assert again.gain_ms and "pad inputs" in again.remedy and "2 graphs" in again.claim
    assert many_graph_sizes.RULE(gpu_case([mm(64, 64, 64, 300)])) is None


def adam(name: str, count: int) -> list[RecordedOp]:
    return [
        RecordedOp(name, 20, "multi_tensor_apply_kernel<>", phase="optimizer") for _ in range(count)
    ]


def test_an_unfused_update_in_a_foreign_trace():
    rest = mm(64, 64, 64, 200)
    found = unfused_optimizer.RULE(gpu_case([rest, *adam("aten::_foreach_addcdiv_", 5)]))
    assert "foreach" in found.claim and found.stake_ms == pytest.approx(0.1)
    assert found.gain_ms == pytest.approx(0.065)
    loop = unfused_optimizer.RULE(cpu_case([rest, *adam("aten::addcdiv_", 5)]))
    assert loop.claim.startswith("torch's loop over the weights takes")
    assert loop.remedy == "fused=True where the optimizer is made"
    assert "aten::addcdiv_ x 5" in loop.evidence[1]
    assert unfused_optimizer.RULE(gpu_case([rest, *adam("aten::_fused_adamw_", 5)])) is None
    other = [range_("Optimizer.step#NAdam.step", 0, 900_000)]
    gather = RecordedOp("c10d::_allgather_base_", 500, "ncclDevKernel_AllGather_RING_LL(void)")
    gather = replace(gather, phase="optimizer")
    sharded = gpu_case([rest, gather, *adam("aten::_foreach_addcdiv_", 5)])
    assert unfused_optimizer.RULE(sharded).stake_ms == pytest.approx(0.1)
    nadam = gpu_case([rest, *adam("aten::_foreach_addcdiv_", 5)], extra=other)
    assert "fused=True" not in unfused_optimizer.RULE(nadam).remedy
    assert unfused_optimizer.RULE(gpu_case([rest])) is None


def test_updates_with_no_pass_to_save_are_left_alone():
    """Plain SGD is one operation, and a compiled update is fused already."""
    rest = mm(64, 64, 64, 200)
    run = replace(make_run(ms=0.3), ran=Ran(optimizer="foreach"))
    for name in ("aten::_foreach_add_", "triton_for_fused_0", "aten::add_"):
        assert unfused_optimizer.RULE(gpu_case([rest, *adam(name, 5)], run)) is None
    slow = replace(run, clock=replace(run.clock, phases={"optimizer": Samples((0.2,), "ms")}))
    found = unfused_optimizer.RULE(Case(slow))
    assert found.gain_ms == pytest.approx(0.13) and not found.ordinary
    # What the model does not bring is torch's choice; and 5 % of the step is no fault.
    profile = Profile((0, 1, 1, 1), (), default_optimizer=True)
    assert unfused_optimizer.RULE(Case(replace(slow, profile=profile))).ordinary
    brief = replace(slow, clock=replace(slow.clock, phases={"optimizer": Samples((0.02,), "ms")}))
    assert unfused_optimizer.RULE(Case(brief)).ordinary
    recipe = Recipe({"compile": {"scope": "whole", "optimizer": True}})
    compiled = replace(slow, spec=replace(slow.spec, recipe=recipe))
    assert unfused_optimizer.RULE(Case(compiled)) is None


@pytest.mark.parametrize("on", [cpu_case, gpu_case])
def test_clipping_in_a_loop_is_told_from_the_loop_that_torch_has(on):
    """Both call the same operators; the line of one runs a hundred times."""
    turn = RecordedOp("aten::_foreach_norm", 4, phase="clip", late_us=6, line="train.py(8): clip")
    done = [*[turn] * 100, mm(64, 64, 64, 500, FP32)]
    line = "line:train.py:9 (clip)"
    each = [op(line, 10_000 * number, 10_000) for number in range(100)]
    found = small_operators.RULE(on(done, extra=each))
    assert "loop" in found.claim and "train.py:9 (clip)" in found.claim
    assert "one clip_grad_norm_ for the list of all weights" in found.remedy
    whole = small_operators.RULE(on(done, extra=[op(line, 0, 1_000_000)]))
    assert whole is None or "loop" not in whole.claim


@pytest.mark.parametrize(("calls", "found"), [(14, True), (8, False)])
def test_calls_of_a_loop_count_below_a_fifth_of_the_step(calls, found):
    """Of 7 ms, 1.4 or 0.8."""
    turn = [mm(64, 64, 64, 200, FP32, line="net.py(3): play")]
    turn += [RecordedOp("aten::add", 3, line="net.py(3): play")] * calls
    said = small_operators.RULE(cpu_case(turn * 30))
    assert (said is not None) == found
    if found:
        assert not said.ordinary and said.stake_ms == pytest.approx(0.003 * 15 * 30)
        assert small_operators.RULE(cpu_case(turn)) is None  # no loop
