"""Rules about the numbers themselves and about memory."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.core import (
    Allocation,
    Compilation,
    Counters,
    Memory,
    MemoryTimeline,
    Profile,
    Ran,
    Samples,
)
from steplab.core.run import OWN_LOOP
from steplab.findings import Case, explain
from steplab.findings.rules import (
    activation_memory,
    bulky_activations,
    fragmentation,
    full_logits,
    noisy_measurement,
    power_bound,
    sparse_peak,
    warmup_counted,
)
from tests.compare.test_step_tables import make_run
from tests.findings.steps import RecordedOp, cpu_case, gpu_case, mm, rules, tensors

GIB = 2**30


def timed(*samples: float, **changes):
    run = make_run()
    return replace(run, clock=replace(run.clock, step=Samples(samples, "ms")), **changes)


def test_a_slow_beginning_was_counted():
    found = warmup_counted.RULE(Case(timed(40.0, 30.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0)))
    assert found.stake_ms == pytest.approx(50 / 8) and "first 2 of 8" in found.claim
    assert "--warmup 7" in found.remedy
    own = timed(40.0, 30.0, *[10.0] * 6, notes=(OWN_LOOP,))
    assert warmup_counted.RULE(Case(own)).remedy == "steplab.profile(step, warmup=7)"


def test_a_slow_beginning_is_seen_on_a_machine_with_other_work():
    found = warmup_counted.RULE(Case(timed(60.0, 50.0, *[10.0] * 9, 30.0, *[10.0] * 9)))
    assert "first 2 of 21" in found.claim


@pytest.mark.parametrize(
    "samples",
    [
        (10.0,) * 8,
        (15.0, 10.0, 10.0, 10.0, 10.0, 10.0),
        (40.0, 10.0, 10.0, 40.0, 10.0, 10.0),
        (40.0, *[10.0] * 18, 40.0),  # one at the beginning as well as one at the end
        (10.0, 10.0, 10.0, 40.0),
        (40.0, 10.0),
    ],
)
def test_steady_noisy_or_few_samples_are_no_warm_up(samples):
    assert warmup_counted.RULE(Case(timed(*samples))) is None


def test_a_single_slow_sample_is_a_note_unless_it_is_very_slow():
    assert warmup_counted.RULE(Case(timed(35.0, *[10.0] * 9))).ordinary
    assert not warmup_counted.RULE(Case(timed(80.0, *[10.0] * 9))).ordinary
    assert not warmup_counted.RULE(Case(timed(35.0, 30.0, *[10.0] * 9))).ordinary


def test_a_busy_machine_and_compilations_are_no_warm_up():
    slow = timed(40.0, 30.0, *[10.0] * 6)
    busy = replace(slow, clock=replace(slow.clock, contended=0.5))
    assert warmup_counted.RULE(Case(busy)) is None
    compiled = replace(slow, compilation=Compilation(4, graphs_in_window=3))
    assert rules(Case(compiled))[0] == "recompiles" and "warmup_counted" not in rules(
        Case(compiled)
    )


def test_no_gain_exceeds_the_step():
    slow = timed(*[500.0] * 3, *[10.0] * 9)
    (found, *_) = explain(Case(slow))
    assert found.rule == "warmup_counted" and found.gain_ms == 10.0


def test_a_clock_held_back_is_a_note():
    counters = Counters(
        sm_clock_mhz=Samples((1485.0,), "MHz"),
        sm_clock_max_mhz=1980.0,
        held_back={"its power limit": 1.0},
    )
    held = Case(timed(10.0, 10.1, 9.9, counters=counters))
    assert rules(held) == ["power_bound"] and explain(held).record().findings == ()
    found = power_bound.RULE(gpu_case([mm(1024, 1024, 1024, 8000)], held.run))
    assert "1485 of 1980 MHz" in found.claim and found.stake_ms == pytest.approx(2.0, rel=0.01)
    assert power_bound.RULE(Case()) is None


def test_a_wide_spread_is_a_note():
    noisy = Case(timed(8.0, 10.0, 14.0, 9.0, 13.0))
    found = noisy_measurement.RULE(noisy)
    assert found.stake_ms == 0 and "steplab compare A B --rerun" in found.remedy
    assert rules(noisy) == ["noisy_measurement"]
    own = noisy_measurement.RULE(Case(replace(noisy.run, notes=(OWN_LOOP,))))
    assert "--rerun" not in own.remedy  # no command can run it
    assert noisy_measurement.RULE(Case(timed(10.0, 10.1, 10.0, 9.9, 10.0))) is None
    assert noisy_measurement.RULE(Case()) is None


def peaked(tflops: float | None, **dtypes: int):
    run = make_run(peak_tflops=tflops)
    return Case(replace(run, ran=Ran(matmul_dtypes=dtypes)))


def test_a_sparse_peak():
    found = sparse_peak.RULE(peaked(1979.0, **{"c10::BFloat16": 9, "float": 1}))
    assert "sparse peak of the H100 SXM5; dense is 989.4" in found.claim and found.stake_ms == 0
    assert sparse_peak.RULE(peaked(1979.0, float=9)) is not None
    for right in (989.4, 312.0, 50.0, None):
        assert sparse_peak.RULE(peaked(right, **{"c10::BFloat16": 9})) is None


def remembered(capacity: int = 100 * GIB, device: str = "cuda", **changes) -> Case:
    fields = {
        **{"times_ms": (0.0,), "bytes_by_kind": {}, "phases_ms": {}, "peak_ms": 0.0},
        **{"peak_bytes": 90 * GIB, "peak_by_kind": {"activations": 70 * GIB}},
        **{
            "at_peak": (),
            "largest": (),
            "saved_by_module": {"blocks.0": 20 * GIB, "blocks.1": 40 * GIB},
        },
    }
    run = make_run(device=device)
    memory = Memory(0, 90 * GIB, None, capacity, "cuda allocator")
    profile = Profile((0, 1, 1, 1), (), memory=MemoryTimeline(**{**fields, **changes}))
    environment = replace(run.environment, memory_bytes=capacity)
    return Case(replace(run, memory=memory, profile=profile, environment=environment))


@pytest.mark.parametrize(
    ("op", "dtype", "saved", "said"),
    [
        ("aten::repeat", "float32", 40 * GIB, "let it broadcast"),
        ("aten::zeros", "int64", 35 * GIB, "torch.bool"),
        ("aten::zeros", "float32", 0, ""),
        ("aten::sort", "int64", 0, ""),  # an index
    ],
)
def test_activations_that_hold_copies_or_wide_masks(op, dtype, saved, said):
    block = Allocation(20 * GIB, "activations", (4,), dtype, "net.py:5 (f)", "layers.0", op)
    found = bulky_activations.RULE(remembered(at_peak=(block, block)))
    assert [one.stake_bytes for one in found] == ([saved] if saved else [])
    for one in found:
        assert said in one.remedy and "net.py:5 (f): 40.0 GiB" in one.evidence
    small = replace(block, bytes=2 * GIB)
    assert bulky_activations.RULE(remembered(at_peak=(small,))) == ()
    assert bulky_activations.RULE(remembered(at_peak=(replace(block, kind="temporaries"),))) == ()


def test_activations_that_fill_the_device():
    found = activation_memory.RULE(remembered())
    assert found.stake_bytes == 70 * GIB and "blocks.*: 60.0 GiB" in found.evidence[1]
    assert "checkpointing=blocks" in found.remedy
    assert rules(remembered()) == ["activation_memory"]
    assert activation_memory.RULE(remembered(capacity=200 * GIB)) is None
    assert activation_memory.RULE(remembered(peak_by_kind={"weights": 80 * GIB})) is None
    assert activation_memory.RULE(Case(make_run())) is None


def test_memory_in_pieces():
    pieces = {"reserved_bytes": 95 * GIB, "peak_bytes": 60 * GIB, "largest_free_block": 2 * GIB}
    found = fragmentation.RULE(remembered(**pieces))
    assert found.stake_bytes == 35 * GIB and rules(remembered(**pieces)) == ["fragmentation"]
    assert fragmentation.RULE(remembered(**{**pieces, "largest_free_block": 30 * GIB})) is None
    assert fragmentation.RULE(remembered(**{**pieces, "peak_bytes": 90 * GIB})) is None
    assert fragmentation.RULE(remembered()) is None
    # A step that replays a graph takes nothing: the pieces are left from the warm-up before it.
    held = {**pieces, "bytes_by_kind": {"weights": (60 * GIB,), "other": (0,)}}
    assert fragmentation.RULE(remembered(**held)) is None
    taken = {"bytes_by_kind": {"weights": (20 * GIB, 20 * GIB), "activations": (0, 40 * GIB)}}
    assert fragmentation.RULE(remembered(**{**pieces, **taken})) is not None
    # What only the watched step reserved, the timed ones never had.
    case = remembered(**pieces)
    for reserved, found in ((62 * GIB, False), (90 * GIB, True)):
        timed_memory = Memory(GIB, 60 * GIB, reserved, 100 * GIB, "cuda allocator")
        said = fragmentation.RULE(replace(case, run=replace(case.run, memory=timed_memory)))
        assert (said is not None) == found
        assert said is None or said.stake_bytes == 30 * GIB


def test_logits_are_found_among_what_lives_at_the_peak():
    one = 2048 * 50_000 * 4
    blocks = [Allocation(one, "activations"), Allocation(one + 64, "temporaries")]
    blocks += [Allocation(one // 2, "other"), Allocation(one, "weights"), Allocation(99, "other")]
    held = remembered(device="cpu", at_peak=tuple(blocks), capacity=10 * GIB)
    loss = RecordedOp("aten::_log_softmax", 100, args=tensors([2048, 50_000]))
    case = Case(held.run, cpu_case([loss]).analysis)
    assert full_logits.RULE(case).stake_bytes == 2 * one + 64 + one // 2
    freed = replace(held.run.profile.memory, at_peak=(Allocation(99, "other"),))
    run = replace(held.run, profile=replace(held.run.profile, memory=freed))
    assert full_logits.RULE(Case(run, case.analysis)) is None


def test_activations_as_large_as_16_bit_logits_are_no_logits():
    """4,096 x 1,024 logits in fp32, and 16 activations of 4,096 x 512."""
    one = 4096 * 1024 * 4
    blocks = [Allocation(one, "activations", (4096, 1024), "float32", module="loss")]
    blocks += [Allocation(one, "temporaries", op="aten::nll_loss_backward")]
    blocks += [Allocation(one, "temporaries", op="aten::_log_softmax_backward_data")]
    blocks += [Allocation(one // 2, "activations", (32, 128, 512), "float32")] * 16
    loss = RecordedOp("aten::_log_softmax", 100, args=tensors([4096, 1024]))
    run = remembered(device="cpu", at_peak=tuple(blocks)).run
    found = full_logits.RULE(Case(run, cpu_case([loss]).analysis))
    assert found.stake_bytes == 3 * one
    unknown = (*blocks, *[Allocation(one // 2, "other")] * 4)
    run = remembered(device="cpu", at_peak=unknown).run
    assert full_logits.RULE(Case(run, cpu_case([loss]).analysis)).stake_bytes == 3 * one


def slow_beginning_one_by_one(samples):
    for count in range(len(samples) // 2, 0, -1):
        rest = samples[count:]
        limit = warmup_counted.SLOW * statistics.median(rest)
        accidents = sum(value >= limit for value in rest)
        allowed = len(rest) // 10 if count > 1 else 0
        if min(samples[:count]) > limit and accidents <= allowed:
            return count
    return 0


SLOW_FIRST = st.tuples(
    st.lists(st.sampled_from([0.0, 10.0, 21.0, 30.0, 45.0]), max_size=8),
    st.lists(st.sampled_from([0.0, 5.0, 9.0, 10.0, 11.0, 20.0, 30.0]), min_size=4, max_size=40),
)


@given(SLOW_FIRST)
def test_a_slow_beginning_is_found_as_by_trying_every_length(parts):
    samples = [*parts[0], *parts[1]]
    assert warmup_counted.slow_beginning(samples) == slow_beginning_one_by_one(samples)
