"""Time without a core: by the kernel's counters, and told where it spoils a measurement."""

from dataclasses import replace

from steplab.probes.clock import seconds_without_core
from steplab.step.trial import MAX_CONTENTION, _with_figures, trial


def test_threads_are_summed_and_what_cannot_be_read_is_left_out(tmp_path):
    for thread, text in (("1", "900 2000000000 7"), ("2", "5 500000000 1"), ("3", "broken")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert seconds_without_core(tmp_path) == 2.5


def test_where_the_kernel_does_not_tell(tmp_path):
    assert seconds_without_core(tmp_path) is None


def test_a_contended_run_says_so(tiny_spec):
    run = replace(trial(tiny_spec(steps=2)), notes=())
    for share, told in ((0.9 * MAX_CONTENTION, False), (0.5, True), (None, False)):
        judged = _with_figures(replace(run, clock=replace(run.clock, contended=share)), "fp32")
        notes = [note for note in judged.notes if note.startswith("contended: ")]
        assert bool(notes) is told
        assert not told or "threads waited 50% of the time for a core" in notes[0]
