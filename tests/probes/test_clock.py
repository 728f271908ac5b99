"""The arithmetic of the clock, with time faked, and the time that threads wait for a core."""

from dataclasses import replace

import pytest

from steplab.probes import clock as clock_module
from steplab.probes.clock import ClockProbe, seconds_without_core
from steplab.step.trial import _with_figures, trial


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


def test_threads_are_summed_and_what_cannot_be_read_is_left_out(tmp_path):
    for thread, text in (("1", "900 2000000000 7"), ("2", "5 500000000 1"), ("3", "broken")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert seconds_without_core(tmp_path) == 2.5


def test_where_the_kernel_does_not_tell(tmp_path):
    assert seconds_without_core(tmp_path) is None


def test_a_contended_run_says_so(tiny_spec):
    run = replace(trial(tiny_spec(steps=2)), notes=())
    for share, told in ((0.14, False), (0.5, True), (None, False)):
        judged = _with_figures(replace(run, clock=replace(run.clock, contended=share)), "fp32")
        notes = [note for note in judged.notes if note.startswith("contended: ")]
        assert bool(notes) is told
        assert not told or "threads waited 50% of the time for a core" in notes[0]
