import gc

import pytest
import torch

from steplab.bench import op_measure as module
from steplab.bench.op_measure import (
    BoundOp,
    TimingOptions,
    measure_memory,
    time_forward,
    time_op,
    use_dtype,
)
from steplab.bench.op_results import KEPT


class Scripted:
    """An op whose phases take given times on a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        self.leaves = {"x": torch.zeros(1)}
        self.dout = torch.zeros(1)
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def forward(self):
        self.calls.append("forward")
        self.now += 2.0
        return "out"

    def backward(self, out):
        assert out == "out"
        self.calls.append("backward")
        self.now += 5.0


def test_each_phase_is_measured_separately(monkeypatch):
    call = Scripted(monkeypatch)
    clock = time_op(call, TimingOptions(repeats=3, warmup=1, seconds=1e9))
    assert clock.phases["forward"].values == (2000.0,) * 3
    assert clock.phases["backward"].values == (5000.0,) * 3
    assert clock.step.values == (7000.0,) * 3
    assert clock.source == "perf_counter"
    per_turn = ["forward", "backward", "forward", "backward"]
    assert call.calls == per_turn * 4  # a warm-up and three


def test_both_is_not_a_sum(monkeypatch):
    call = Scripted(monkeypatch)
    seconds = iter([2, 5, 6, 2, 5, 6])  # forward, backward, both of a warm-up and a turn
    timer_calls = []
    original = module.HostTimer.timed

    def timed(self, phase, work):
        timer_calls.append(phase)
        before = call.now
        done = original(self, phase, work)
        self.host_ms[phase][-1] = next(seconds)
        call.now = before
        return done

    monkeypatch.setattr(module.HostTimer, "timed", timed)
    clock = time_op(call, TimingOptions(repeats=1, warmup=1, seconds=1.0))
    assert timer_calls == ["forward", "backward", "both"] * 2
    assert clock.step.values == (6,) and clock.phases["backward"].values == (5,)


def test_a_slow_op_has_fewer_samples_but_enough_for_an_interval(monkeypatch):
    clock = time_op(Scripted(monkeypatch), TimingOptions(repeats=50, warmup=1, seconds=0.0))
    assert len(clock.step) == module.MIN_REPEATS


def test_the_forward_can_be_timed_alone(monkeypatch):
    call = Scripted(monkeypatch)
    clock = time_forward(call, TimingOptions(4, 1, 1e9))
    assert len(clock.phases["forward"]) == 4 and not clock.step.values
    assert "backward" not in call.calls


class FakeCuda:
    """Notes in which order a device would be asked for what."""

    def __init__(self):
        self.log = log = []

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                log.append("event")

            def elapsed_time(self, end):
                return 0.5

        class Buffer:
            def zero_(self):
                log.append("write")

        self.Event, self.int8 = Event, torch.int8
        self.cuda, self.L2_cache_size = self, 2**25
        self.synchronize = lambda: log.append("wait")
        self.get_device_properties = lambda index: self
        self.empty = lambda size, dtype, device: log.append(size) or Buffer()


def test_on_a_device_the_cache_is_emptied_before_the_first_event(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(module, "torch", fake)
    timer = module.DeviceTimer(cover_ms=0.12)  # a write takes 0.05 ms on this clock
    assert fake.log[0] == 2**26 and timer.writes == 1 + 3
    del fake.log[:]
    assert timer.timed("forward", lambda: fake.log.append("work") or 7) == 7
    assert fake.log == ["write"] * 4 + ["event", "work", "event"]
    assert timer.device_ms("forward") == [0.5] and len(timer.host_ms["forward"]) == 1


def test_garbage_collection_is_on_again_after_a_failure(monkeypatch):
    call = Scripted(monkeypatch)
    turns = iter([lambda: None, lambda: 1 / 0])  # the warm-up, then the first sample
    call.backward = lambda out: next(turns)()
    monkeypatch.setattr(
        module, "_time_phases", lambda s, timer: timer.timed("both", lambda: s.backward(0))
    )
    with pytest.raises(ZeroDivisionError):
        time_op(call, TimingOptions(3, 1, 1.0))
    assert gc.isenabled()


def exp_call(n):
    x = torch.zeros(n, requires_grad=True)
    return BoundOp(lambda: x.exp(), {"x": x}, torch.ones(n))


def test_results_have_the_names_of_the_leaves():
    results = exp_call(3).results()
    assert list(results) == ["out", "dx"]
    assert results["dx"].tolist() == [1.0, 1.0, 1.0] and not results["out"].requires_grad


def test_memory_of_exp_is_its_output_and_gradient():
    """exp keeps its output; its gradient is one more tensor."""
    memory = measure_memory(exp_call(250_000))
    assert memory.phase_peaks == {"forward": 10**6, KEPT: 10**6, "backward": 2 * 10**6}
    assert memory.peak - memory.before == 2 * 10**6


def test_tf32_is_refused_on_a_cpu():
    from steplab.core.errors import Unsupported

    with pytest.raises(Unsupported, match="tf32"):
        use_dtype("tf32", torch.device("cpu"))
    assert use_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    assert torch.get_float32_matmul_precision() == "highest"
