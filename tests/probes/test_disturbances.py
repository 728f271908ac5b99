"""Slow steps and why they were slow: planted causes, with time faked."""

import gc
from time import sleep

import pytest
import torch

from steplab.core import Samples
from steplab.probes import clock, disturbances
from steplab.probes.clock import ClockProbe
from steplab.probes.compiled_calls import running_line
from steplab.probes.disturbances import UNDISTURBED, AllocatorCalls, Disturbances, note_event
from tests.kernels.triton_on_cpu import compile_for_hopper, needs_no_gpu


class FakeStep:
    watch = staticmethod(lambda phase: None)


class FakeSubject:
    on_cuda = False
    step = FakeStep()


class Loop:
    """Eight steps of 10 ms of fake time; in the sixth something happens."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        for module in (clock, disturbances):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        # The machine that runs the tests may be busy: no thread waits for a core here.
        monkeypatch.setattr(Disturbances, "_core_wait_ms", lambda _: self.core_wait_ms)
        self.core_wait_ms = 0.0

    def pass_ms(self, ms):
        self.now += ms / 1e3

    def collect(self, ms):
        """Let the garbage collector run for so long."""

        def pause(when, info):
            self.pass_ms(ms if when == "start" else 0)

        gc.callbacks.append(pause)
        gc.collect()
        gc.callbacks.remove(pause)

    def run(self, in_step=lambda: None, in_fetch=lambda: None):
        probe, subject = ClockProbe(line_of=running_line), FakeSubject()
        gc.disable()  # one that nobody has planted would take no time, but be counted
        try:
            probe.open_window(subject)
            for number in range(8):
                with probe.fetching():
                    if number == 5:
                        in_fetch()
                with probe.stepping():
                    self.pass_ms(10)
                    if number == 5:
                        in_step()
            probe.close_window(subject)
        finally:
            gc.enable()
        assert probe.disturbances._on_gc not in gc.callbacks
        return probe.result()


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_a_garbage_collection_with_its_milliseconds(loop):
    seen = loop.run(lambda: loop.collect(30))
    assert seen.step.marks == {"5": "slow, garbage collection took 30.00 ms"}
    assert seen.collector_ms == pytest.approx(30 / 8) and seen.collector_median_ms == 0
    (line, ms), *others = seen.collector_lines.items()
    assert "test_disturbances.py" in line and line.endswith("(collect)") and not others
    assert ms == pytest.approx(30 / 8) and not loop.run().collector_lines
    assert seen.cautions()[-1] == (
        "outliers: 1 of 8 steps took far longer than 10.00 ms: "
        "40.00 ms (garbage collection took 30.00 ms)"
    )


def test_a_collection_too_short_to_be_the_cause_is_none(loop):
    def collect():
        loop.collect(2)
        loop.pass_ms(60)

    assert loop.run(collect).step.marks == {"5": "slow, no cause seen"}


def test_a_recompilation(loop):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2))

    def recompile():
        compiled(torch.ones(3))
        loop.pass_ms(500)

    assert loop.run(recompile).step.marks == {"5": "slow, compiled 1 graph"}


def test_a_wait_for_data_and_a_sleep(loop):
    waited = loop.run(in_fetch=lambda: loop.pass_ms(90))
    assert waited.step.marks == {"5": "slow, waited 90.00 ms for data"}
    assert loop.run(lambda: loop.pass_ms(90)).step.marks == {"5": "slow, no cause seen"}


def test_threads_without_a_core(loop):
    def wait():
        loop.core_wait_ms += 40
        loop.pass_ms(40)

    assert loop.run(wait).step.marks == {"5": "slow, waited 40.00 ms for a core"}


def test_a_capture_and_what_came_with_it(loop):
    def capture():
        note_event("captured the CUDA graph")
        loop.pass_ms(900)

    assert loop.run(capture).step.marks == {"5": "slow, captured the CUDA graph"}


def test_calls_of_the_allocator(monkeypatch):
    calls = dict.fromkeys(AllocatorCalls._fields, 10)
    monkeypatch.setattr(disturbances, "allocator_calls", lambda: AllocatorCalls(**calls))
    watch = Disturbances(on_cuda=True)
    watch.open()
    monkeypatch.setattr(watch, "_core_wait_ms", lambda: 0.0)
    watch.next_step()
    assert watch.next_step() is UNDISTURBED
    calls["mallocs"] += 2
    assert watch.next_step().causes(50, 0) == ["allocated device memory 2 times"]
    calls["frees"] += 1  # by an empty_cache() in the loop
    assert watch.next_step().causes(50, 0) == ["freed device memory 1 time"]
    calls["pinned"] += 1
    assert watch.next_step().causes(50, 0) == ["allocated pinned memory 1 time"]
    for name in ("mallocs", "frees", "retries"):
        calls[name] += 1
    full = "the allocator was full and freed its cache"
    assert watch.next_step().causes(50, 0) == [full, "allocated device memory 1 time"]
    watch.close()


KERNEL_COMPILED_AT_A_LAUNCH = """
from steplab.kernels.adamw import Hyperparameters, ParameterState, triton_update
from steplab.probes.disturbances import Disturbances

def update(weight_decay):
    param, *others = (torch.empty(4096) for _ in range(4))
    weight = ParameterState(param, None, *others, torch.zeros(()))
    rate = torch.zeros((), dtype=torch.float64)
    triton_update.update(weight, Hyperparameters(0.9, 0.95, 1e-8, weight_decay), rate, None)

watch = Disturbances(on_cuda=False)
watch.open()
update(0.1)
print(watch.next_step().kernels)
update(0.2)
update(0.0)
print(watch.next_step().kernels)
watch.close()
"""


@needs_no_gpu
def test_a_kernel_that_a_launch_compiles_is_counted_and_a_schedule_of_the_decay_compiles_none():
    assert compile_for_hopper(KERNEL_COMPILED_AT_A_LAUNCH).split() == ["1", "0"]


def test_a_compiled_kernel_is_a_cause(loop):
    def compile_kernel():
        disturbances._note_kernel(repr="adamw_kernel")
        loop.pass_ms(270)

    assert loop.run(compile_kernel).step.marks == {"5": "slow, compiled 1 Triton kernel"}


@pytest.mark.gpu
def test_calls_of_the_allocator_are_seen():
    watch = Disturbances(on_cuda=True)
    torch.cuda.empty_cache()
    watch.open()
    kept = torch.empty(2**28, device="cuda")
    assert watch.next_step().mallocs >= 1
    del kept
    torch.empty(2**28, device="cuda")
    assert watch.next_step().mallocs == 0
    torch.cuda.empty_cache()
    torch.empty(2**24).pin_memory()
    seen = watch.next_step()
    assert seen.frees >= 1 and seen.pinned >= 1
    watch.close()


def test_waits_for_a_core_are_read_from_the_kernel():
    watch = Disturbances(on_cuda=False)
    watch.open()
    before = watch._core_wait_ms()
    sleep(0.01)
    assert watch._core_wait_ms() >= before >= 0
    watch.close()


def test_only_slow_steps_are_told_and_the_slowest_first():
    values = (10.0,) * 20 + (11.0, 16.0, 99.0, 40.0, 30.0)
    marks = {"20": "slow, a", "21": "slow, b", "22": "slow, c", "23": "slow, d", "24": "slow, e"}
    assert Samples(values, "ms", marks).outliers == (
        "outliers: 4 of 25 steps took far longer than 10.00 ms: "
        "99.00 ms (c), 40.00 ms (d), 30.00 ms (e), ..."
    )
    assert Samples(values[:21], "ms", {"20": "slow, a"}).outliers == ""
