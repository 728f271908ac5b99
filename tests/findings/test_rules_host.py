"""Rules about the time in which nothing runs: launches, waits, data, communication, captures."""

from dataclasses import replace

import pytest

from steplab.core import Ran, Recipe, Samples
from steplab.findings import Case
from steplab.findings.rules import (
    data_stall,
    exposed_communication,
    launch_bound,
    many_graph_sizes,
    synchronization,
    unfused_optimizer,
)
from steplab.trace.analyze import analyze
from tests.compare.test_step_tables import make_run
from tests.findings.steps import H200, RecordedOp, cpu_case, gpu_case, mm, rules
from tests.trace.traces import call, kernel, op, range_, trace_of


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


def test_the_profilers_own_cost_is_not_launching():
    """Unprofiled, the same step takes little more than its kernels."""
    done = [RecordedOp("aten::add", 10, late_us=10) for _ in range(40)]
    profiled = gpu_case(done)
    run = make_run(ms=0.42)
    assert launch_bound.RULE(profiled) is not None
    assert launch_bound.RULE(Case(run, profiled.analysis)) is None


def test_launch_bound_without_a_trace():
    run = make_run(ms=10.0)
    wait = replace(run.clock, data_wait=Samples((0.1,), "ms"))
    idle = replace(run, clock=wait, ran=Ran(device_busy_ms=4.0, kernel_launches=3000))
    found = launch_bound.RULE(Case(idle))
    assert found.stake_ms == pytest.approx(5.9) and "3000 launches" in found.evidence[0]
    assert launch_bound.RULE(Case(replace(idle, ran=Ran(device_busy_ms=9.5)))) is None
    assert launch_bound.RULE(Case(replace(idle, ran=Ran()))) is None


def synchronized(late: int) -> Case:
    """A kernel, a wait of the host for it, `late` us of host work, another kernel."""
    events = [
        range_("ProfilerStep#1", 0, (300 + late) * 1000),
        range_("forward", 0, (200 + late) * 1000),
        op("aten::item", 20_000, 85_000),
        call("cudaLaunchKernel", 1_000, 1_000, 1),
        kernel("a", 2_000, 100_000, 1),
        call("cudaStreamSynchronize", 22_000, 82_000),
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


def test_no_wait_no_finding():
    assert synchronization.RULE(gpu_case([mm(64, 64, 64, 100)] * 3)) is None
    assert synchronization.RULE(cpu_case([mm(64, 64, 64, 100)])) is None


def test_the_device_idles_for_a_batch():
    """The host fetches for 300 us while the device has 100 us of work left."""
    done = [mm(64, 64, 64, 100), mm(64, 64, 64, 600, late_us=300)]
    case = gpu_case(done, extra=[range_("data", 4_000, 300_000)])
    found = data_stall.RULE(case)
    assert found.stake_ms == pytest.approx(0.2, abs=0.01) and rules(case)[0] == "data_stall"
    hidden = [mm(64, 64, 64, 900), mm(64, 64, 64, 600, late_us=300)]
    assert data_stall.RULE(gpu_case(hidden, extra=[range_("data", 4_000, 300_000)])) is None


def test_a_cpu_waits_as_long_as_it_fetches():
    run = make_run(ms=10.0)
    stalled = replace(run, clock=replace(run.clock, data_wait=Samples((3.0, 3.0), "ms")))
    assert data_stall.RULE(Case(stalled)).gain_ms == 3.0
    brief = replace(run, clock=replace(run.clock, data_wait=Samples((0.4, 0.4), "ms")))
    assert data_stall.RULE(Case(brief)) is None


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


def test_graphs_captured_while_training():
    captured = [
        call("cudaStreamBeginCapture", 10_000, 1_000),
        call("cudaStreamEndCapture", 400_000, 1_000),
        call("cudaGraphInstantiateWithFlags", 410_000, 90_000),
    ]
    case = gpu_case([mm(64, 64, 64, 300)], extra=captured, until_us=600)
    found = many_graph_sizes.RULE(case)
    assert found.stake_ms == pytest.approx(0.49) and "1 CUDA graphs" in found.claim
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
    assert "forloop" in loop.claim and "aten::addcdiv_ x 5" in loop.evidence[1]
    assert unfused_optimizer.RULE(gpu_case([rest, *adam("aten::_fused_adamw_", 5)])) is None
    assert unfused_optimizer.RULE(gpu_case([rest])) is None


def test_updates_with_no_pass_to_save_are_left_alone():
    """Plain SGD is one operation, and a compiled update is fused already."""
    rest = mm(64, 64, 64, 200)
    run = replace(make_run(ms=0.3), ran=Ran(optimizer="foreach"))
    for name in ("aten::_foreach_add_", "triton_for_fused_0", "aten::add_"):
        assert unfused_optimizer.RULE(gpu_case([rest, *adam(name, 5)], run)) is None
    slow = replace(run, clock=replace(run.clock, phases={"optimizer": Samples((0.2,), "ms")}))
    assert unfused_optimizer.RULE(Case(slow)).gain_ms == pytest.approx(0.13)
    recipe = Recipe({"compile": {"scope": "whole", "optimizer": True}})
    compiled = replace(slow, spec=replace(slow.spec, recipe=recipe))
    assert unfused_optimizer.RULE(Case(compiled)) is None
