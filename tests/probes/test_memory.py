"""Memory on a CPU: what a step allocates, not what the process keeps."""

from steplab.probes.allocator import CPU_SOURCE
from steplab.probes.memory import peaks_by_phase
from steplab.step.trial import trial


def test_peaks_of_phases_by_what_was_allocated_and_freed():
    forward = [(1, 30), (2, 50), (3, -50)]
    backward = [(11, 5), (12, -100), (14, 8)]
    ends = [(10, "forward"), (20, "backward")]
    peaks, whole = peaks_by_phase(100, [*forward, *backward], ends)
    assert peaks == {"forward": 180, "backward": 135} and whole == 180


def test_recomputing_blocks_needs_less_memory_on_a_cpu_too(tiny_spec):
    """The resident set was the same for both: `tune --objective memory` chose by accident."""
    found = [
        trial(tiny_spec(recipe, {"layers": 6}, batch=8, steps=1)).memory
        for recipe in ("plain", "plain", "checkpointing=blocks")
    ]
    assert found[0] == found[1] and found[0].source == CPU_SOURCE
    assert found[2].peak < 0.9 * found[0].peak and found[2].before == found[0].before
    assert set(found[0].phase_peaks) == {"forward", "backward", "clip", "optimizer"}
