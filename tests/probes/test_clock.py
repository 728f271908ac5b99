"""The clock's arithmetic, with time itself faked."""

import pytest

from steplab.probes import clock as clock_module
from steplab.probes.clock import ClockProbe


class FakeStep:
    watch = staticmethod(lambda phase: None)


class FakeSubject:
    on_cuda = False
    step = FakeStep()


@pytest.fixture
def time(monkeypatch):
    """A clock that moves only when told to, in milliseconds."""

    class Time:
        now = 0.0

        def pass_ms(self, ms):
            self.now += ms / 1e3

    source = Time()
    monkeypatch.setattr(clock_module, "perf_counter", lambda: source.now)
    return source


def run_steps(probe, subject, time, steps):
    probe.open_window(subject)
    for data, forward, backward, rest in steps:
        with probe.fetching():
            time.pass_ms(data)
        with probe.stepping():
            for share in (0.25, 0.75):  # two micro-batches
                with subject.step.watch("forward"):
                    time.pass_ms(forward * share)
                with subject.step.watch("backward"):
                    time.pass_ms(backward * share)
            time.pass_ms(rest)
    probe.close_window(subject)
    return probe.result()


def test_periods_phases_and_waits_are_exact(time):
    steps = [(1, 4, 8, 2), (3, 4, 8, 2), (1, 4, 8, 2)]
    subject = FakeSubject()
    before = subject.step.watch
    clock = run_steps(ClockProbe(), subject, time, steps)
    assert clock.step.values == pytest.approx([15, 17, 15])
    assert clock.host.values == pytest.approx([14, 14, 14])
    assert clock.data_wait.values == pytest.approx([1, 3, 1])
    assert clock.phases["forward"].values == pytest.approx([4, 4, 4])
    assert clock.phases["backward"].values == pytest.approx([8, 8, 8])
    assert clock.window_ms == pytest.approx(47) and clock.agreement == pytest.approx(1)
    assert subject.step.watch is before


def test_a_slow_step_is_marked_and_kept(time):
    steps = [(0, 4, 8, 1)] * 9 + [(0, 4, 8, 60)]
    clock = run_steps(ClockProbe(), FakeSubject(), time, steps)
    assert len(clock.step) == 10 and set(clock.step.marks) == {"9"}


def test_garbage_collection_is_named_as_the_cause(time):
    import gc

    probe, subject = ClockProbe(), FakeSubject()
    probe.open_window(subject)
    for index in range(8):
        with probe.stepping():
            time.pass_ms(10)
            if index == 5:
                gc.collect()
                time.pass_ms(30)
    probe.close_window(subject)
    assert probe.result().step.marks == {"5": "slow, garbage collection"}
    assert probe._on_gc not in gc.callbacks
