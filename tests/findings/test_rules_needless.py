"""Rules about work that is done twice or for nothing, and memory that is held for nothing."""

from dataclasses import replace

import pytest

from steplab.core import Allocation, Dataflow, Finding, Memory, Profile, Work
from steplab.core.dataflow import (
    EqualWeights,
    FrozenCasts,
    IdleBuffers,
    IdleCopies,
    IdleGradients,
    IdleState,
)
from steplab.core.run import FORCE_EAGER, MEMORY_BUDGET, TRACEMALLOC
from steplab.findings import Case, explain
from steplab.findings.rules import (
    attention_unfused,
    broadcast_blowup,
    constant_rebuilt,
    copied_over,
    dense_embedding,
    explicit_inverse,
    forward_unused,
    fp32_stream,
    frozen_in_fp32,
    gathered_matrices,
    graph_memory,
    idle_buffers,
    idle_gradients,
    index_gradient,
    kept_memory,
    long_convolution,
    masked_scores,
    padded_batch,
    partly_used,
    prefix_recomputed,
    product_order,
    repeated_work,
    slow_switch,
    small_operators,
    unfused_chain,
    unused_work,
    weight_penalty,
    wide_dtype,
    written_out,
    zero_fills,
    zero_products,
)
from steplab.trace.analyze import analyze
from tests.compare.sides import run_of
from tests.findings.steps import BF16, FP32, RecordedOp, cpu_case, gpu_case, mm, rules, tensors
from tests.findings.test_rules_measurement import GIB, remembered
from tests.trace.traces import call, kernel, op, python, range_, trace_of

STREAM = [64, 128]


def two_forwards(second_learns: bool, name: str = "nn.Module: Net_0") -> Case:
    """A model is called twice; the first call has a backward."""
    events = [range_("ProfilerStep#1", 0, 1_000_000), python("train.py(5): step", 0, 1_000_000)]
    for number, start in enumerate((10_000, 400_000)):
        called = "nn.Module: Net_0" if number == 0 else name
        events += [python(called, start, 200_000)]
        events += [op("aten::mm", start + 1_000, 150_000, sequence=number + 1)]
    for number in range(1 + second_learns):
        backward = f"autograd::engine::evaluate_function: MmBackward{number}"
        start = 700_000 + 100_000 * number
        events += [op(backward, start, 90_000, sequence=number + 1, forward_thread=1)]
    return Case(None, analyze(trace_of(events)))


def test_a_forward_that_nothing_is_learned_from():
    found = forward_unused.RULE(two_forwards(second_learns=False))
    assert "1 of 2 calls of Net_0" in found.claim and "train.py:5 (step)" in found.evidence[0]
    assert found.gain_ms == pytest.approx(0.15)
    assert forward_unused.RULE(two_forwards(second_learns=True)) is None  # two micro-batches
    teacher = two_forwards(second_learns=False, name="nn.Module: Net_1")
    assert forward_unused.RULE(teacher) is None


@pytest.mark.parametrize(("letter", "found"), [("h", True), ("u", True), (".", False)])
def test_a_forward_that_the_update_needs_is_a_target(letter, found):
    profile = Profile((0, 1, 1, 1), (), dataflow=Dataflow(("aten::mm",), (0, 0), f".{letter}"))
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    case = replace(two_forwards(second_learns=False), run=run)
    assert (forward_unused.RULE(case) is not None) == found


@pytest.mark.parametrize(("share", "found"), [(0.0, False), (0.2, False), (0.4, True)])
def test_what_the_mask_of_a_batch_leaves_out_is_padding(share, found):
    run = replace(run_of([1.0]), work=Work(64, None, None, None, padding=share))
    finding = padded_batch.RULE(cpu_case([mm(64, 64, 64, 800, FP32)], run))
    assert bool(finding) is found
    if finding:
        assert finding.gain_ms == pytest.approx(0.4 * 0.8) and "begin anew" in finding.remedy


def test_a_mask_of_positions():
    line = "model.py(7): mask"
    triangle = RecordedOp("aten::triu", 50, args=tensors([256, 256]), line=line)
    fill = RecordedOp("aten::fill_", 30, args=tensors([256, 256]), line=line)
    beyond = RecordedOp("aten::add", 40, args=tensors([8, 256, 256]), line=line)
    rest = mm(64, 64, 64, 800, FP32)
    found = constant_rebuilt.RULE(cpu_case([triangle, fill, beyond, rest]))
    assert found.gain_ms == pytest.approx(0.08) and "model.py:7 (mask)" in found.evidence[1]
    positions = {"shapes": [[256, 1], [1, 256]], "dtypes": ["long int"] * 2}
    compared = RecordedOp("aten::ge", 50, args=positions, line=line)
    assert constant_rebuilt.RULE(cpu_case([compared, rest])).gain_ms == pytest.approx(0.05)
    lengths = {"shapes": [[8, 1], [1, 256]], "dtypes": ["long int"] * 2}
    of_batch = RecordedOp("aten::lt", 50, args=lengths, line=line)
    assert constant_rebuilt.RULE(cpu_case([of_batch, rest])) is None


def summed(first: str, second: str, **changes) -> RecordedOp:
    args = {"shapes": [STREAM, STREAM], "dtypes": [first, second]}
    return RecordedOp("aten::add", 100, args=args, line="model.py(3): forward", **changes)


def test_an_fp32_stream_in_a_16_bit_model():
    products = [mm(64, 128, 512, 300), mm(64, 512, 128, 300)]
    wide = gpu_case([*products, summed(FP32, BF16), summed(FP32, FP32)])
    found = fp32_stream.RULE(wide)
    assert found.stake_ms == pytest.approx(0.2) and found.gain_ms == pytest.approx(0.1)
    assert "model.py:3" in found.evidence[1] and rules(wide)[0] == "fp32_stream"
    cast = {"shapes": [STREAM, STREAM], "dtypes": [FP32, BF16]}
    made = RecordedOp("aten::copy_", 5, args=cast, line="norm.py(4): forward")
    found = fp32_stream.RULE(gpu_case([made, *products, summed(FP32, BF16)]))
    assert "cast to fp32 at norm.py:4 (forward)" in found.evidence[2]
    assert fp32_stream.RULE(gpu_case([*products, summed(BF16, BF16)])) is None
    weight = {"shapes": [[128, 512], [128, 512]], "dtypes": [BF16, FP32]}
    autocast = RecordedOp("aten::copy_", 5, args=weight)
    assert fp32_stream.RULE(gpu_case([autocast, *products, summed(FP32, BF16)])) is None


def test_fills_of_gradients_of_slices():
    outer = {"inside": "aten::select_backward", "outer": tensors([4, 64])}
    filled = RecordedOp("aten::zero_", 10, args=tensors([4, 512, 64]), phase="backward", **outer)
    found = zero_fills.RULE(cpu_case([filled] * 50 + [mm(64, 64, 64, 500, FP32)]))
    assert found.gain_ms == pytest.approx(0.5) and "unbind" in found.remedy
    plain = RecordedOp("aten::zero_", 10, args=tensors([4, 512, 64]))
    # A fill of backward whose operator nobody knows is the gradient of a loss.
    loss = RecordedOp("aten::fill_", 500, phase="backward")
    assert zero_fills.RULE(cpu_case([loss, mm(64, 64, 64, 500, FP32)])) is None
    other = zero_fills.RULE(cpu_case([plain] * 50 + [mm(64, 64, 64, 500, FP32)]))
    assert "unbind" not in other.remedy
    assert zero_fills.RULE(cpu_case([plain, mm(64, 64, 64, 500, FP32)])) is None


def test_a_mask_changes_the_fused_kernel():
    kernel = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128"

    def attended(*mask: list[int]) -> Case:
        outer = tensors(*[[2, 4, 64, 32]] * 3, *mask, dtype=BF16)
        fused = {"inside": "aten::scaled_dot_product_attention", "outer": outer}
        done = RecordedOp("aten::_cudnn_attention_forward", 600, kernel, **fused)
        return gpu_case([done, mm(64, 64, 64, 400)])

    found = attention_unfused.RULE(attended([64, 64]))
    assert found.gain_ms == pytest.approx(0.4) and "is_causal" in found.remedy
    assert attention_unfused.RULE(attended()) is None
    assert attention_unfused.RULE(attended([2, 4, 64, 64])) is None  # a bias of every head


def test_tensors_that_outlive_their_step():
    blocks = (Allocation(2 * GIB, "other", line="train.py:9 (step)", op="aten::mm"),)
    kept = {"kept": blocks, "kept_bytes": 2 * GIB, "peak_bytes": 10 * GIB, "peak_by_kind": {}}
    case = remembered(**kept)
    found = kept_memory.RULE(case)
    assert found.stake_bytes == 2 * GIB and "train.py:9 (step)" in found.evidence[0]
    assert "grows" not in found.claim and rules(case) == ["kept_memory"]
    growing = kept_memory.RULE(remembered(**kept, growth_bytes=2 * GIB))
    assert "graph" in growing.why and "detach()" in growing.remedy
    plain = {**kept, "kept_state_bytes": kept["kept_bytes"]}
    views = kept_memory.RULE(remembered(**plain, growth_bytes=2 * GIB))
    assert "graph" not in views.why and ".clone()" in views.remedy
    assert growing.claim.startswith("memory grows by 2.00 GiB a step")
    assert kept_memory.RULE(remembered(**{**kept, "kept_bytes": 0})) is None
    # A CPU's allocator does not round: 1 MiB of 10 that is left behind in every step counts.
    small = {"kept_bytes": 2**20, "growth_bytes": 2**20, "peak_bytes": 12 * 2**20}
    assert kept_memory.RULE(remembered(**{**kept, **small}, device="cpu")) is not None
    assert kept_memory.RULE(remembered(**{**kept, **small}, device="cuda")) is None
    # Gradients that live on where the last step had none are growth, but nothing is kept.
    first = {**kept, "kept_bytes": 0, "kept": (), "growth_bytes": 2 * GIB}
    # A queue that every step replaces is there on purpose; one that grows is not.
    queue = {**kept, "kept_state_bytes": 2 * GIB}
    assert kept_memory.RULE(remembered(**queue)) is None
    assert kept_memory.RULE(remembered(**queue, growth_bytes=2 * GIB)) is not None
    assert kept_memory.RULE(remembered(**first)) is None
    # What gloo's threads free, no profiler sees; what a user keeps has a holder.
    ranks = replace(case.run, spec=replace(case.run.spec, ranks=2, device="cpu"))
    assert kept_memory.RULE(replace(case, run=ranks)) is None
    held = replace(case.timeline, kept_by=("my_loop.py:7 (outputs)",))
    profile = replace(ranks.profile, memory=held)
    assert kept_memory.RULE(replace(case, run=replace(ranks, profile=profile))) is not None


def test_double_precision_is_seen_in_shapes_and_in_names_of_kernels():
    wide = {"shapes": [[64, 512], [512]], "dtypes": [FP32, "double"]}
    added = RecordedOp("aten::add", 100, args=wide, line="model.py(3): forward")
    found = wide_dtype.RULE(gpu_case([mm(64, 64, 64, 400), added]))
    assert found.gain_ms == pytest.approx(0.05) and "meets a narrower" in found.evidence[1]
    lines = {"float64": ("loop.py:4 (make)",)}
    run = replace(remembered(device="cpu").run, clock=None)
    run = replace(run, profile=Profile((0, 1, 1, 1), (), setup_lines=lines))
    asked = wide_dtype.RULE(cpu_case([mm(64, 64, 64, 400), added], run))
    assert "asked for at loop.py:4 (make)" in asked.evidence
    # A CPU multiplies in double half as fast as in single precision.
    product = mm(64, 64, 64, 400, "double")
    assert wide_dtype.RULE(cpu_case([product], run)).gain_ms == pytest.approx(0.5 * 0.4)
    assert wide_dtype.RULE(gpu_case([product])).gain_ms == pytest.approx(0.85 * 0.4)
    kinds = ["c10::complex<float>", "c10::complex<double>"]
    spectra = {"shapes": [[64, 64]] * 2, "dtypes": kinds}
    promoted = RecordedOp("aten::mul", 100, args=spectra, line="net.py(5): forward")
    found = wide_dtype.RULE(cpu_case([promoted, mm(64, 64, 64, 400)], run))
    assert "narrower tensor at net.py:5 (forward)" in found.evidence[1]
    named = RecordedOp("", 100, "elementwise_kernel<128, 4, CUDAFunctor_add<double>, float>")
    assert wide_dtype.RULE(gpu_case([mm(64, 64, 64, 400), named])).stake_ms == pytest.approx(0.1)
    graph = RecordedOp("CompiledFunction", 300, args=tensors([4096, 4096], dtype="double"))
    stats = "kernel<3, batch_norm_stats(at::Tensor const&, double, long)::{lambda(float)#1}>"
    clean = [mm(64, 64, 64, 400), graph, RecordedOp("", 100, stats)]
    assert wide_dtype.RULE(gpu_case(clean)) is None
    fused = (
        "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>, float const*, double, double>"
    )
    update = RecordedOp("aten::_fused_adamw_", 100, fused, phase="optimizer")
    assert wide_dtype.RULE(gpu_case([mm(64, 64, 64, 400), update])) is None


def test_gradients_of_an_index_are_put_back_one_by_one():
    put = {"shapes": [[1000, 64], [], [4096, 64], [], []], "dtypes": ["float", "", "float", "", ""]}
    node = "autograd::engine::evaluate_function: IndexBackward0"

    def taken(by: str) -> Case:
        events = [
            range_("ProfilerStep#1", 0, 1_000_000),
            op(by, 0, 100_000, sequence=7),
            op(node, 100_000, 300_000, sequence=7, forward_thread=1),
            op("aten::_index_put_impl_", 110_000, 280_000, values=["", "", "", "True", "1"], **put),
            op("aten::mm", 500_000, 400_000),
        ]
        return Case(None, analyze(trace_of(events)))

    found = index_gradient.RULE(taken("aten::index"))
    # With the 10 us that its node takes before it.
    assert found.gain_ms == pytest.approx(0.7 * 0.29) and "index_select" in found.remedy
    assert index_gradient.RULE(taken("aten::gather")) is None


def test_a_chain_that_is_written_out():
    wide = tensors([64, 1024], dtype=FP32)
    names = ("pow", "mul", "add", "tanh", "mul", "add")
    chain = [RecordedOp(f"aten::{n}", 50, args=wide, line="net.py(9): gelu") for n in names]
    product = mm(64, 64, 64, 500, FP32, line="net.py(20): forward")
    found = unfused_chain.RULE(cpu_case([product, *chain]))
    assert "net.py:9 (gelu)" in found.claim and found.stake_ms == pytest.approx(0.3)
    assert found.gain_ms == pytest.approx(0.15)  # three of six kernels remain
    assert unfused_chain.RULE(cpu_case([product, *chain[:3]])) is None
    own = [replace(one, inside="aten::rms_norm") for one in chain]  # torch's, on a CPU
    assert unfused_chain.RULE(cpu_case([product, *own])) is None


def test_larger_tensors_beside_a_chain_are_none_of_it():
    """Messages along the edges of a graph, and a few short operators on its nodes."""
    nodes, edges = tensors([64, 1024]), tensors([1280, 1024])
    names = ("add", "div", "mul", "add", "tanh")
    chain = [RecordedOp(f"aten::{n}", 10, args=nodes, line="net.py(9): spread") for n in names]
    message = RecordedOp("aten::mul", 300, args=edges, line="net.py(9): spread")
    product = mm(64, 64, 64, 500, FP32, line="net.py(20): forward")
    assert unfused_chain.RULE(cpu_case([product, message, *chain])) is None
    longer = [replace(one, us=40) for one in chain]
    found = unfused_chain.RULE(cpu_case([product, message, *longer]))
    assert found.stake_ms == pytest.approx(0.2)


def test_activations_of_several_forwards_live_at_once():
    node = "autograd::engine::evaluate_function: MmBackward0"

    def called(times: int, first_backward: int, learns: bool = True) -> Case:
        events = [range_("ProfilerStep#1", 0, 1_000_000)]
        for number in range(times):
            start = 10_000 + 100_000 * number
            events += [python("nn.Module: Net_0", start, 90_000)]
            events += [op("aten::mm", start + 1_000, 80_000, sequence=number + 1)]
        starts = [first_backward, *(850_000 + 5_000 * n for n in range(1, times if learns else 1))]
        for number, start in enumerate(starts, 1):
            events += [op(node, start, 4_000, sequence=number, forward_thread=1)]
        memory = Memory(2 * GIB, 10 * GIB, None, None, "cuda allocator")
        run = replace(remembered(device="cpu").run, memory=memory)
        return Case(run, analyze(trace_of(events)))

    claims = [one.claim for one in graph_memory.RULE(called(4, 800_000, learns=False))]
    assert not any("forward passes" in claim for claim in claims)  # three of them without gradients
    (found,) = graph_memory.RULE(called(4, 800_000))
    assert found.stake_bytes == 6 * GIB and "4 forward passes" in found.claim
    assert graph_memory.RULE(called(4, 102_000)) == ()  # a backward after the first
    assert graph_memory.RULE(called(2, 800_000)) == ()
    case = called(4, 800_000)
    cell = Profile((0, 1, 1, 1), (), dataflow=Dataflow((), (), "", feeds_itself=True))
    assert graph_memory.RULE(replace(case, run=replace(case.run, profile=cell))) == ()


def test_a_backward_that_is_recorded_though_nothing_goes_back_through_it():
    node = "autograd::engine::evaluate_function: MmBackward0"
    memory = Memory(2 * GIB, 10 * GIB, None, None, "cuda allocator")
    lines = {"create_graph": ("loop.py:7 (step)",)}
    profile = Profile((0, 1, 1, 1), (), setup_lines=lines)
    run = replace(remembered(device="cpu").run, memory=memory, profile=profile)

    def went_back(numbers: list[int], again: int = -1, inside: str = "loop.py(7): step") -> Case:
        """`numbers`: of what the backward records; `again`: one of these that is gone through."""
        events = [range_("ProfilerStep#1", 0, 1_000_000), op("aten::mm", 0, 9_000, sequence=1)]
        events += [op(node, 100_000, 90_000, sequence=1, forward_thread=1)]
        for place, number in enumerate(numbers):
            events += [op("aten::mm", 110_000 + 9_000 * place, 8_000, sequence=number)]
        events += [op(node, 500_000, 9_000, sequence=again, forward_thread=1)]
        events += [python(inside, 0, 600_000)]
        return Case(run, analyze(trace_of(events)))

    (found,) = graph_memory.RULE(went_back([2, 3]))
    assert "backward pass is recorded" in found.claim and "loop.py:7" in found.evidence[1]
    assert graph_memory.RULE(went_back([-1, -1])) == ()
    assert graph_memory.RULE(went_back([2, 3], again=3)) == ()  # a penalty on gradients
    # torch.func.grad records for those who differentiate it again, and nobody can forbid it.
    transform = "torch/_functorch/eager_transforms.py(1413): grad_and_value_impl"
    assert graph_memory.RULE(went_back([2, 3], inside=transform)) == ()


def test_pools_of_graphs_that_run_one_after_the_other():
    memory = Memory(2 * GIB, 10 * GIB, None, None, "cuda allocator")
    profile = Profile((0, 1, 1, 1), (), graph_pools=(3 * GIB, 2 * GIB, 2 * GIB))
    run = replace(remembered().run, memory=memory, profile=profile)
    (found,) = graph_memory.RULE(Case(run))
    assert found.stake_bytes == 4 * GIB and "3 CUDA graphs" in found.claim
    one = replace(run, profile=replace(profile, graph_pools=(3 * GIB,)))
    assert graph_memory.RULE(Case(one)) == ()
    nothing = replace(
        run, memory=replace(memory, before=0, peak=0), profile=Profile((0, 1, 1, 1), ())
    )
    assert graph_memory.RULE(Case(nothing)) == ()  # a step that takes no memory


@pytest.mark.parametrize(("window", "found"), [(5, True), (2, False)])
def test_windows_that_overlap_are_a_broadcast(window, found):
    values = ["", f"[{window}, {window}]", "[1, 1]", "[0, 0]", "[1, 1]"]
    taken = {**tensors([8, 16, 64, 64]), "values": values}
    spread = tensors([8, 16 * window**2, 64 * 64])
    done = [
        RecordedOp("aten::im2col", 300, args=taken, line="net.py(6): forward"),
        RecordedOp("aten::mean", 200, args=spread, line="net.py(7): forward"),
        mm(64, 64, 64, 500, FP32),
    ]
    said = broadcast_blowup.RULE(cpu_case(done))
    assert (said is not None) == found
    if said is not None:
        assert "unfold" in said.remedy and "net.py:6 (forward)" in " ".join(said.evidence)


def upsampled(channels: int, side: int, us: int = 200) -> RecordedOp:
    """A tensor of (2, channels, side, side) is enlarged to twice the side."""
    args = tensors([2, channels, side, side], values=["", f"[{2 * side}, {2 * side}]"])
    return RecordedOp("aten::upsample_nearest2d", us, args=args, line="net.py(8): forward")


def convolved(channels: int, side: int, out: int, us: int = 300, window: int = 1) -> RecordedOp:
    args = tensors([2, channels, side, side], [out, channels, window, window])
    return RecordedOp("aten::mkldnn_convolution", us, args=args, line="net.py(9): forward")


def joined(channels: tuple[int, int], side: int) -> RecordedOp:
    sizes = [[2, each, side, side] for each in channels]
    listed = {"shapes": [sizes, []], "dtypes": ["TensorList", "Scalar"]}
    return RecordedOp("aten::cat", 100, args=listed)


def elementwise(name: str, channels: int, side: int) -> RecordedOp:
    return RecordedOp(f"aten::{name}", 100, args=tensors([2, channels, side, side]))


@pytest.mark.parametrize("left", [4, 48])
def test_channels_that_are_enlarged_before_they_are_dropped(left):
    rest = mm(64, 64, 64, 500, FP32)
    found = product_order.RULE(cpu_case([upsampled(64, 32), convolved(64, 64, left), rest]))
    assert (found is not None) == (left < 32)
    if found is not None:
        assert "makes 2 x 64 x 64 x 64 values" in found.claim and f"keeps {left} of" in found.claim
        assert "net.py:9 (forward)" in found.evidence[0]
        assert found.stake_ms == pytest.approx(0.5)


UNET = [  # channels double with every level, so tensors of several levels have as many elements
    *(convolved(3, 64, 24, window=3), convolved(24, 32, 48, window=3)),
    *(convolved(48, 16, 96, window=3), upsampled(96, 16), joined((96, 48), 32)),
    *(convolved(144, 32, 48, window=3), upsampled(48, 32), joined((48, 24), 64)),
    *(convolved(72, 64, 24, window=3), convolved(24, 64, 4)),
]
RESIDUAL_UNET = [  # blocks with a 1 x 1 convolution of what they take
    *(convolved(3, 32, 32, window=3), convolved(32, 16, 64, window=3)),
    *(upsampled(64, 8), joined((64, 64), 16), convolved(128, 16, 32, window=3)),
    *(convolved(128, 16, 32), upsampled(32, 16), joined((32, 32), 32)),
    *(convolved(64, 32, 32, window=3), convolved(64, 32, 16)),
]
PYRAMID = [  # sums of what was enlarged go through a ReLU
    *(convolved(32, 48, 32), upsampled(32, 24), elementwise("add", 32, 48)),
    *(elementwise("relu", 32, 48), convolved(32, 48, 12)),
]


@pytest.mark.parametrize("done", [UNET, RESIDUAL_UNET, PYRAMID])
def test_what_is_joined_or_bent_before_the_convolution_does_not_commute(done):
    assert product_order.RULE(cpu_case(done)) is None


def test_products_whose_rows_are_mostly_zeros():
    flow = Dataflow(("aten::mm",), (0, 0), "8.")
    profile = Profile((0, 1, 1, 1), (), dataflow=flow)
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    done = [mm(512, 64, 1024, 600, line="net.py(5): head"), mm(64, 64, 64, 400)]
    (found,) = zero_products.RULE(cpu_case(done, run))
    assert found.gain_ms == pytest.approx(0.8 * 0.6) and "net.py:5" in found.evidence[0]
    # A loss at one position leaves the gradient of all others zero: 5 % of a step, and no fault.
    short = [replace(done[0], us=60), replace(done[1], us=940)]
    (brief,) = zero_products.RULE(cpu_case(short, run))
    assert brief.ordinary and not found.ordinary
    usual = replace(run, profile=replace(profile, dataflow=replace(flow, verdicts="..")))
    assert zero_products.RULE(cpu_case(done, usual)) == ()
    both = replace(run, profile=replace(profile, dataflow=replace(flow, verdicts="8z")))
    assert len(zero_products.RULE(cpu_case(done, both))) == 2


def watched(done: list[RecordedOp], letters: str) -> Case:
    """A step of products, with what each is for."""
    names = tuple(dict.fromkeys(one.op for one in done))
    flow = Dataflow(names, tuple(names.index(one.op) for one in done), letters)
    profile = Profile((0, 1, 1, 1), (), dataflow=flow)
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    return cpu_case(done, run)


def test_gradients_that_another_backward_had_computed():
    done = [mm(64, 64, 64, us, line="net.py(5): f", phase="backward") for us in (400, 600)]
    (found,) = repeated_work.RULE(watched(done, ".q"))
    assert found.gain_ms == pytest.approx(0.6) and "same gradients again" in found.claim
    assert "autograd.grad(loss, list(weights))" in found.remedy
    # Derivatives of derivatives share the slopes of activations, and no product.
    slopes = [done[0], RecordedOp("aten::mul", 600, phase="backward", line="net.py(5): f")]
    assert repeated_work.RULE(watched(slopes, ".q")) == ()


@pytest.mark.parametrize(("letters", "gain"), [("x.", 0.4), ("..", None)])
def test_a_layer_of_which_a_where_takes_nothing(letters, gain):
    done = [mm(64, 64, 64, us, line="net.py(5): f") for us in (400, 600)]
    found = unused_work.RULE(watched(done, letters))
    assert [one.gain_ms for one in found] == ([pytest.approx(gain)] if gain else [])
    elementwise = [RecordedOp("aten::exp", 400, args=tensors([512, 512])), done[1]]
    assert unused_work.RULE(watched(elementwise, "x.")) == ()  # a formula for rare values


def test_an_inverse_of_which_only_a_product_is_read():
    line = {"line": "net.py(5): likelihood"}
    inverse = RecordedOp("aten::linalg_inv", 600, args=tensors([384, 384]), **line)
    done = [inverse, mm(384, 384, 1, 100), mm(64, 64, 64, 300)]
    found = explicit_inverse.RULE(watched(done, "..."))
    assert found.gain_ms == pytest.approx(0.72 * 0.6) and "linalg.solve" in found.remedy
    assert any("net.py:5 (likelihood)" in seen for seen in found.evidence)
    whole = [inverse, mm(384, 384, 384, 100), mm(64, 64, 64, 300)]
    assert explicit_inverse.RULE(watched(whole, "...")) is None
    small = [replace(inverse, args=tensors([8, 8])), mm(8, 8, 1, 100), mm(64, 64, 64, 300)]
    assert explicit_inverse.RULE(watched(small, "...")) is None


@pytest.mark.parametrize(("asked", "told"), [(("train.py:3 (main)",), True), ((), False)])
@pytest.mark.parametrize("switch", [FORCE_EAGER, "TORCHDYNAMO_DISABLE=1"])
def test_what_keeps_code_from_being_compiled_is_the_cause_of_its_chains(switch, asked, told):
    """Only where something is to be compiled. The chain that it leaves is no second finding."""
    line = {"line": "net.py(5): loss"}
    many = [RecordedOp("aten::exp", 40, args=tensors([512, 512]), **line) for _ in range(20)]
    case = watched([*many, mm(64, 64, 64, 200)], "." * 21)
    lines = {"torch.compile": asked, switch.partition("=")[0]: ("train.py:9 (main)",)}
    profile = replace(case.run.profile, switches=(switch,), setup_lines=lines)
    case = replace(case, run=replace(case.run, profile=profile))
    found = slow_switch.RULE(case)
    assert bool(found) == told
    if told:
        assert found[0].gain_ms == pytest.approx(0.78 * 0.8)
        assert "set at train.py:9 (main)" in found[0].evidence
        assert "unfused_chain" not in rules(case)


def test_a_convolution_of_samples_with_zeros_between_them():
    """With its gradients, and told apart from products with rows of zeros."""
    args = tensors([4, 64, 512], [64, 64, 3])
    conv = RecordedOp("aten::convolution", 600, args=args, line="net.py(5): up")
    (found,) = zero_products.RULE(watched([conv, mm(64, 64, 64, 400)], "7."))
    assert found.gain_ms == pytest.approx(0.7 * 0.6) and "transposed" in found.remedy
    assert "samples in convolutions" in found.claim
    (product,) = zero_products.RULE(watched([mm(64, 64, 64, 600), mm(64, 64, 64, 400)], "7."))
    assert "rows in products" in product.claim and "transposed" not in product.remedy


def test_states_that_a_recurrent_layer_stacks_by_itself():
    """Of which the last is read: the early ones, and their gradients, are needed for it."""
    node = "autograd::engine::evaluate_function: MmBackward0"

    def recurrent(stacks: str) -> Case:
        events = [
            range_("ProfilerStep#1", 0, 1_000_000),
            op("aten::gru", 0, 400_000),
            op("aten::mm", 1_000, 300_000, sequence=1),
            op(stacks, 310_000, 80_000),
            op("aten::cat", 311_000, 70_000),
            op(node, 400_000, 600_000, sequence=1, forward_thread=1),
            op("aten::mm", 401_000, 590_000),
        ]
        flow = Dataflow(("aten::mm", "aten::cat"), (0, 1, 0), ".Z.")
        profile = Profile((0, 1, 1, 1), (), dataflow=flow)
        run = replace(remembered(device="cpu").run, clock=None, profile=profile)
        return Case(run, analyze(trace_of(events)))

    assert partly_used.RULE(recurrent("aten::stack")).stake_ms < 0.1
    # Of two directions that are put side by side, the gradients of one are for nothing.
    assert partly_used.RULE(recurrent("aten::concat")).stake_ms > 0.6


def test_memory_of_passes_that_are_needless_is_told_with_them():
    """Five passes of one model that compute the same: the time is the finding."""
    memory = Memory(2 * GIB, 10 * GIB, None, None, "cuda allocator")
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [range_("ProfilerStep#1", 0, 1_000_000)]
    for number in range(5):
        start = 100_000 * number
        events += [python("nn.Module: Net_0", start, 90_000)]
        events += [op("aten::mm", start + 1_000, 80_000, sequence=number + 1)]
    for number in range(5):
        start = 600_000 + 50_000 * number
        events += [op(node, start, 40_000, sequence=number + 1, forward_thread=1)]

    def memory_of(letters: str) -> tuple[Finding, ...]:
        flow = Dataflow(("aten::mm",), (0,) * 5, letters)
        profile = Profile((0, 1, 1, 1), (), dataflow=flow)
        run = replace(remembered(device="cpu").run, clock=None, memory=memory, profile=profile)
        return graph_memory.RULE(Case(run, analyze(trace_of(events))))

    assert "5 forward passes" in memory_of(".....")[0].claim
    assert memory_of(".rrrr") == ()


def test_running_means_as_products_with_a_triangle():
    done = [mm(512, 512, 64, 600, line="net.py(5): average"), mm(64, 64, 64, 400)]
    (found,) = zero_products.RULE(watched(done, "t."))
    assert found.gain_ms == pytest.approx(0.9 * 0.6) and "cumsum" in found.remedy
    assert "net.py:5 (average)" in found.evidence[0]
    assert zero_products.RULE(watched(done, "..")) == ()


def test_lookups_of_which_only_the_mean_is_read():
    line = {"line": "net.py(5): text"}
    done = [
        RecordedOp("aten::embedding", 400, args=tensors([4000, 64], [512, 32]), **line),
        RecordedOp("aten::mean", 200, args=tensors([512, 32, 64]), **line),
        mm(64, 64, 64, 400),
    ]
    found = dense_embedding.RULE(watched(done, "p.."))
    assert found.gain_ms == pytest.approx(0.2 + 0.5 * 0.4) and "EmbeddingBag" in found.remedy
    assert "net.py:5 (text)" in found.evidence[0]
    assert product_order.RULE(watched(done, "p..")) is None  # no linear layer
    assert dense_embedding.RULE(watched(done, "...")) is None


def test_results_of_which_most_is_dropped():
    done = [mm(512, 64, 1024, 600, line="net.py(5): head"), mm(64, 64, 64, 400)]
    found = partly_used.RULE(watched(done, "Y."))
    assert found.gain_ms == pytest.approx(0.8 * 0.6) and "net.py:5" in found.evidence[1]
    assert partly_used.RULE(watched(done, "..")) is None
    assert "head(x[:, -1])" in found.remedy
    by_torch = [replace(done[0], phase="backward"), done[1]]  # in the formula of a gradient
    assert partly_used.RULE(watched(by_torch, "Y.")) is None
    order = RecordedOp("aten::sort", 600, args=tensors([256, 4096]), line="net.py(5): nearest")
    assert "torch.topk" in partly_used.RULE(watched([order, done[1]], "Z.")).remedy


def test_weights_that_the_loss_adds_up():
    square = RecordedOp("aten::pow", 300, args=tensors([768, 768]), line="train.py(5): step")
    added = RecordedOp("aten::sum", 100, args=tensors([768, 768]), line="train.py(5): step")
    found = weight_penalty.RULE(watched([square, added, mm(64, 64, 64, 600)], "dd."))
    assert found.gain_ms == pytest.approx(0.4) and "train.py:5 (step)" in found.evidence[1]
    assert "weight_decay" in found.remedy
    assert weight_penalty.RULE(watched([square, added, mm(64, 64, 64, 600)], "...")) is None


def test_what_is_multiplied_by_zero_is_for_nothing():
    done = [mm(512, 64, 1024, 600, line="net.py(5): aux"), mm(64, 64, 64, 400)]
    (found,) = unused_work.RULE(watched(done, "n."))
    assert found.gain_ms == pytest.approx(0.6) and "multiplied by zero" in found.evidence[0]
    assert not found.ordinary


@pytest.mark.parametrize(("us", "ordinary"), [(60, True), (300, False)])
def test_a_loop_may_look_at_itself_for_a_tenth_of_the_step(us, ordinary):
    metric = RecordedOp("aten::mean", us, args=tensors([64, 64]), line="net.py(5): log")
    (found,) = unused_work.RULE(watched([metric, mm(64, 64, 64, 1000 - us)], "h."))
    assert found.ordinary == ordinary and "net.py:5 (log)" in found.evidence[1]


def test_the_gradient_of_an_input_that_nobody_reads():
    backward = RecordedOp("aten::convolution_backward", 600, phase="backward", line="net.py(5): f")
    case = watched([backward, mm(64, 64, 64, 400)], "g.")
    profile = replace(case.run.profile, setup_lines={"requires_grad": ("net.py:9 (step)",)})
    (found,) = unused_work.RULE(replace(case, run=replace(case.run, profile=profile)))
    assert found.gain_ms == pytest.approx(0.3) and "asked for at net.py:9" in found.evidence[0]
    assert unused_work.RULE(watched([backward, mm(64, 64, 64, 400)], "..")) == ()


def test_the_gradients_of_weights_beside_that_of_an_input():
    """An attack calls backward for the image alone; a convolution's bias has a sum of its own."""
    conv = RecordedOp("aten::convolution_backward", 400, phase="backward", line="net.py(5): f")
    bias = replace(conv, op="aten::sum", us=100, inside="aten::convolution_backward")
    update = replace(conv, us=100)
    done = [conv, bias, update, mm(64, 64, 64, 400)]
    flow = Dataflow(("aten::convolution_backward", "aten::mm"), (0, 0, 0, 1), "ii..")
    profile = Profile((0, 1, 1, 1), (), dataflow=flow)
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    (found,) = unused_work.RULE(cpu_case(done, run))
    assert found.gain_ms == pytest.approx(0.3) and "dropped before the update" in found.claim
    assert "for nothing, of a weight: 400.0 us" in found.evidence[1]
    assert "torch.autograd.grad(loss, inputs)" in found.remedy
    # No other convolution of the line learns: a network that no optimizer has.
    relu = RecordedOp("aten::threshold_backward", 50, phase="backward", line="net.py(5): f")
    (found,) = unused_work.RULE(watched([conv, relu, mm(64, 64, 64, 400)], "i.."))
    assert "no optimizer uses" in found.claim and "requires_grad_(False)" in found.remedy
    assert unused_work.RULE(watched([conv, update, mm(64, 64, 64, 400)], "...")) == ()


@pytest.mark.parametrize(("node", "found"), [("BmmBackward0", 1), ("EuclideanDistBackward0", 0)])
def test_a_gradient_that_torch_computes_unasked_is_no_fault(node, found):
    """The formula of cdist has both sides in one: nobody can leave the batch's out."""
    dropped = mm(64, 8, 64, 300, phase="backward", inside=node, line="net.py(5): loss")
    case = watched([dropped, mm(64, 64, 64, 700)], "u.")
    assert len(unused_work.RULE(case)) == found


def test_tensors_that_are_computed_anew_and_copied_over_the_old_ones():
    size = tensors([512, 512], [512, 512])
    mean = [RecordedOp("aten::mul", 100, args=size, line="ema.py(5): update")] * 2
    done = [*mean, RecordedOp("aten::add", 100, args=size), RecordedOp("aten::copy_", 100)]
    found = copied_over.RULE(watched([*done, mm(64, 64, 64, 600)], "kkkk."))
    # Nine passes over the weights, where three would do.
    assert found.gain_ms == pytest.approx(0.4 * (1 - 3 / 9)) and "1 tensors" in found.claim
    assert "ema.py:5 (update)" in found.evidence[1] and "lerp_" in found.remedy
    assert copied_over.RULE(watched([*done, mm(64, 64, 64, 600)], ".....")) is None


@pytest.mark.parametrize(("letter", "gain"), [("P", 0.4), ("R", 0.8)])
def test_scores_that_a_mask_leaves_out(letter, gain):
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    attention = RecordedOp(name, 800, args=tensors([1, 2, 512, 32]), line="net.py(5): attend")
    found = masked_scores.RULE(watched([attention, mm(64, 64, 64, 200)], f"{letter}."))
    assert found.gain_ms == pytest.approx(gain * 0.8) and "net.py:5 (attend)" in found.evidence[1]
    assert "flex" not in found.remedy  # it has no backward on a CPU
    assert masked_scores.RULE(watched([attention, mm(64, 64, 64, 200)], "..")) is None


def test_masked_scores_that_are_stored():
    scores = mm(512, 32, 512, 300, FP32, batch=2)
    softmax = RecordedOp("aten::_softmax", 200, args=tensors([2, 512, 512]))
    rest = mm(64, 64, 64, 500, FP32)
    found = masked_scores.RULE(watched([scores, softmax, rest], ".R."))
    assert found.stake_ms == pytest.approx(0.5)  # the product that makes the scores, too


@pytest.mark.parametrize(("copies", "found"), [(512, True), (8, False)])
def test_a_matrix_that_is_copied_for_every_row(copies, found):
    picked = RecordedOp("aten::index", 300, args=tensors([8, 64, 128]), line="moe.py(5): forward")
    product = mm(1, 64, 128, 300, FP32, batch=copies, line="moe.py(6): forward")
    said = gathered_matrices.RULE(cpu_case([picked, product, mm(64, 64, 64, 400, FP32)]))
    assert (said is not None) == found
    if said is not None:
        assert said.stake_ms == pytest.approx(0.6) and "8 matrices are copied to 512" in said.claim
        assert "moe.py:5 (forward)" in " ".join(said.evidence)


@pytest.mark.parametrize(("stride", "found"), [(0, True), (192 * 192, False)])
def test_a_matrix_that_is_expanded_to_all_samples(stride, found):
    """96 small products at a tenth of the speed of a large one."""
    strides = [[stride, 192, 1], [192 * 8, 8, 1]]
    args = tensors([96, 192, 192], [96, 192, 8], strides=strides, values=["", ""])
    shared = RecordedOp("aten::bmm", 1_000, args=args, line="mix.py(5): forward")
    quick = mm(768, 192, 192, 100, FP32)  # as many FLOPs
    said = gathered_matrices.RULE(cpu_case([shared, quick]))
    assert (said is not None) == found
    if said is not None:
        assert said.stake_ms == pytest.approx(1.0) and said.gain_ms == pytest.approx(0.9)
        assert "each of 96 samples" in said.claim and "mix.py:5 (forward)" in said.evidence[1]


def sampling(lengths: list[int], us: int = 50) -> list[RecordedOp]:
    """Two layers for all positions of each turn."""
    line = "model.py(7): forward"
    layers = [[mm(n, 64, 64, us, FP32, line=line)] * 2 for n in lengths]
    return [one for turn in layers for one in turn]


def test_prefixes_that_are_computed_again():
    done = sampling([100, 101, 102, 103, 104, 105])
    # Training on all of it follows, through the same line.
    found = prefix_recomputed.RULE(cpu_case([*done, *sampling([105]), mm(64, 64, 64, 300)]))
    assert "each of 6 turns" in found.claim and "100, 101, ... 105 rows" in found.evidence[0]
    assert "model.py:7 (forward)" in found.evidence[1] and "KV cache" in found.remedy
    # Ten calls after the first turn, of which 102 parts of 103 were known; 3 us stay for each.
    assert found.gain_ms == pytest.approx(10 * 0.047 * 102 / 103, rel=0.01)
    assert prefix_recomputed.RULE(gpu_case(done)).gain_ms == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("turns", "found"), [(6, False), (9, True)])
def test_prefixes_with_gradients(turns, found):
    """Six micro-batches may well be sorted by length."""
    events, start = [], 0
    for number in range(1, turns + 1):
        events += [python("model.py(7): forward", start, 50_000)]
        args = tensors([100 + number, 64], [64, 64], values=["", ""])
        events += [op("aten::mm", start, 50_000, sequence=number, **args)]
        start += 50_000
    for number in range(1, turns + 1):
        node = "autograd::engine::evaluate_function: MmBackward0"
        events += [op(node, start, 40_000, sequence=number, forward_thread=1)]
        events += [op("aten::mm", start, 40_000)]
        start += 50_000
    case = Case(None, analyze(trace_of([range_("ProfilerStep#1", 0, start), *events])))
    said = prefix_recomputed.RULE(case)
    assert (said is not None) == found
    if said is not None:
        assert "causal mask" in said.remedy


@pytest.mark.parametrize(
    "lengths",
    [
        [100] * 6,
        [100, 101, 102, 103],  # few
        [100, 117, 103, 140, 102, 131],  # batches of any length
        [16, 32, 64, 128, 256, 512],  # stages
        [8, 16, 24, 32],  # few, and half of each is new
    ],
)
def test_inputs_that_are_no_prefixes_of_each_other(lengths):
    assert prefix_recomputed.RULE(cpu_case(sampling(lengths))) is None


@pytest.mark.parametrize(("taps", "found"), [(5_000, True), (31, False)])
def test_a_filter_that_is_as_long_as_the_signal(taps, found):
    args = tensors([1, 8, 17_799], [8, 1, taps])
    echo = RecordedOp("aten::convolution", 800, args=args, line="room.py(5): echo")
    said = long_convolution.RULE(cpu_case([echo, mm(64, 64, 64, 200, FP32)]))
    assert (said is not None) == found
    if said is not None:
        assert "5,000 taps" in said.claim and "room.py:5 (echo)" in said.evidence[0]
        assert 0.9 * 0.8 < said.gain_ms < 0.8
    # The sines and cosines of a spectrogram; the gradient of the weight would be the eleventh.
    bank = tensors([4, 1, 8192], [514, 1, 512], values=["", "", "", "[128]"])
    steps = mm(64, 64, 64, 200, FP32)
    spectrum = RecordedOp("aten::convolution", 800, args=bank, line="mel.py(5): forward")
    said = long_convolution.RULE(cpu_case([spectrum, steps]))
    assert "514 fixed filters of 512 taps" in said.claim and "torch.stft" in said.remedy
    shapes = [[4, 514, 61], [4, 1, 8192], [514, 1, 512], *[[]] * 8]
    types = [FP32] * 3 + ["ScalarList"] * 8
    learned = {"shapes": shapes, "dtypes": types, "values": [""] * 10 + ["[False, True, False]"]}
    backward = RecordedOp("aten::convolution_backward", 100, phase="backward", args=learned)
    assert long_convolution.RULE(cpu_case([spectrum, backward, steps])) is None
    sparse = {**args, "values": ["", "", "", "[4096]"]}  # four samples of the result
    few = RecordedOp("aten::convolution", 800, args=sparse)
    assert long_convolution.RULE(cpu_case([few, mm(64, 64, 64, 200, FP32)])) is None


@pytest.mark.parametrize("kind", ["unread", "copies"])
def test_buffers_that_no_step_needs(kind):
    held = Dataflow((), (), "", buffers=(IdleBuffers("Attention.bias", **{kind: 4 * GIB}),))
    case = remembered(peak_bytes=10 * GIB, peak_by_kind={})
    memory = Memory(before=5 * GIB, peak=10 * GIB, reserved=None, total=None, source="")
    lines = {"register_buffer": ("net.py:5 (__init__)",)}
    profile = replace(case.run.profile, dataflow=held, setup_lines=lines)
    (found,) = idle_buffers.RULE(Case(replace(case.run, memory=memory, profile=profile)))
    assert found.stake_bytes == 4 * GIB and "Attention.bias: 4.00 GiB" in found.evidence[0]
    assert "registered at net.py:5" in found.evidence[1]
    assert found.remedy.startswith("drop" if kind == "unread" else "register it once")
    large = replace(memory, peak=80 * GIB)
    assert idle_buffers.RULE(Case(replace(case.run, memory=large, profile=profile))) == ()


def test_a_checkpoint_that_is_still_held():
    copies = IdleCopies(4 * GIB, ("checkpoint, written at train.py:9 (main)",))
    case = remembered(peak_bytes=10 * GIB, peak_by_kind={})
    memory = Memory(before=5 * GIB, peak=10 * GIB, reserved=None, total=None, source="")
    held = Dataflow((), (), "", idle_copies=copies)
    profile = replace(case.run.profile, dataflow=held)
    (found,) = idle_buffers.RULE(Case(replace(case.run, memory=memory, profile=profile)))
    assert found.stake_bytes == 4 * GIB and "held by checkpoint" in found.evidence[0]
    large = replace(memory, peak=80 * GIB)
    assert idle_buffers.RULE(Case(replace(case.run, memory=large, profile=profile))) == ()


def test_a_second_copy_of_frozen_weights():
    place = "reference, written at train.py:9 (main)"
    case = held(equal_weights=EqualWeights(12, 3 * GIB, ("blocks.*.up.weight",), (place,)))
    (found,) = idle_buffers.RULE(case)
    assert found.stake_bytes == 3 * GIB and "12 frozen weights" in found.claim
    assert f"held by {place}" in found.evidence and "copied at train.py:9 (main)" in found.evidence
    small = held(equal_weights=EqualWeights(1, GIB // 2, ("head.weight",), ()))
    assert idle_buffers.RULE(small) == ()


def test_the_state_of_an_optimizer_that_no_step_calls():
    place = "warmup, written at train.py:9 (main)"
    (found,) = idle_buffers.RULE(held(idle_state=IdleState(("AdamW",), 3 * GIB, (place,))))
    assert found.stake_bytes == 3 * GIB and "AdamW" in found.claim
    assert f"held by {place}" in found.evidence and "del optimizer" in found.remedy
    assert idle_buffers.RULE(held(idle_state=IdleState(("SGD",), GIB // 2, ()))) == ()


def held(**found) -> Case:
    """A step of 10 GiB with these records."""
    case = remembered(peak_bytes=10 * GIB, peak_by_kind={})
    memory = Memory(before=5 * GIB, peak=10 * GIB, reserved=None, total=None, source="")
    lines = {"requires_grad": ("train.py:9 (main)",), "float32": ("train.py:3 (main)",)}
    lines |= {"deepcopy": ("train.py:9 (main)",)}
    flow = Dataflow((), (), "", **found)
    profile = replace(case.run.profile, dataflow=flow, setup_lines=lines)
    return Case(replace(case.run, memory=memory, profile=profile))


@pytest.mark.parametrize(
    ("asked", "remedy"), [(False, "model.zero_grad"), (True, "requires_grad_")]
)
def test_gradients_that_no_optimizer_uses_hold_memory(asked, remedy):
    idle = (IdleGradients("a.*.weight", 5, 2 * GIB, asked), IdleGradients("b", 1, 0, True))
    found = idle_gradients.RULE(held(idle_gradients=idle))
    assert found.stake_bytes == 2 * GIB and "5 weights" in found.claim
    assert "a.*.weight: 2.00 GiB" in found.evidence and found.remedy.startswith(remedy)
    assert "requires_grad is set at train.py:9 (main)" in found.evidence
    small = (IdleGradients("a.*.weight", 5, GIB // 2, asked),)
    assert idle_gradients.RULE(held(idle_gradients=small)) is None


@pytest.mark.parametrize(
    ("copies", "saved", "ordinary"), [(GIB, 2 * GIB, False), (GIB // 64, GIB, True)]
)
def test_frozen_weights_in_fp32(copies, saved, ordinary):
    """Two bytes of four are enough, and where a copy is kept it is all that is needed."""
    casts = FrozenCasts(8, 2 * GIB, copies, ("blocks.*.weight",))
    found = frozen_in_fp32.RULE(held(frozen_casts=casts))
    assert found.stake_bytes == pytest.approx(saved, rel=0.02) and found.ordinary == ordinary
    assert "8 frozen weights" in found.claim and "blocks.*.weight" in found.evidence
    assert "fp32 is asked for at train.py:3 (main)" in found.evidence
    assert frozen_in_fp32.RULE(held(frozen_casts=replace(casts, bytes=GIB // 8, copies=0))) is None
    assert frozen_in_fp32.RULE(held()) is None


def test_weights_that_autocast_casts_again():
    weight = {"shapes": [[128, 512], [128, 512]], "dtypes": [BF16, FP32]}
    cast = RecordedOp("aten::copy_", 100, args=weight, inside="aten::linear", line="net.py(5): f")
    done = [replace(cast, outer=tensors([4, 128])), mm(64, 64, 64, 400)]
    (found,) = repeated_work.RULE(watched(done, "w."))
    assert "casts the same weights" in found.claim and "net.py:5 (f)" in found.evidence[1]
    assert repeated_work.RULE(watched(done, "r.")) == ()  # activations: autocast's own


@pytest.mark.parametrize(("us", "ordinary"), [(40, True), (100, False)])
def test_a_cast_that_the_code_asks_for_after_autocast_made_it(us, ordinary):
    states = {"shapes": [[128, 512], [128, 512]], "dtypes": [BF16, FP32]}
    cast = RecordedOp("aten::copy_", us, args=states, inside="aten::to", line="net.py(5): f")
    done = [replace(cast, outer=tensors([128, 512])), mm(64, 64, 64, 1000 - us)]
    (found,) = repeated_work.RULE(watched(done, "r."))
    assert found.ordinary == ordinary and "cast it once" in found.remedy
    tables = replace(done[0], op="aten::cos", inside="", args=tensors([128, 512]))
    (found,) = repeated_work.RULE(watched([tables, done[1]], "r."))
    assert not found.ordinary and "a buffer for tables" in found.remedy


@pytest.mark.parametrize(
    ("rest_us", "learned", "found"), [(0, True, True), (90, True, False), (0, False, False)]
)
def test_a_short_lookup_that_is_repeated_has_a_long_gradient(rest_us, learned, found):
    """`rest_us`: what the operator around the second lookup does beside it.

    `learned`: whether the first has a gradient too; else that of the second is not one too many.
    """
    node = "autograd::engine::evaluate_function: EmbeddingBackward0"
    events = [
        range_("ProfilerStep#1", 0, 1_000_000),
        op("aten::embedding", 0, 10_000, sequence=1),
        op("aten::bag", 20_000, 12_000 + 1_000 * rest_us, sequence=2),
        op("aten::embedding", 21_000, 10_000),
        op("aten::tanh", 31_000, 1_000 + 1_000 * rest_us),
        op(node, 190_000, 9_000, sequence=1 if learned else 0, forward_thread=1),
        op("aten::embedding_dense_backward", 191_000, 7_000),
        op(node, 200_000, 300_000, sequence=2, forward_thread=1),
        op("aten::embedding_dense_backward", 210_000, 280_000),
        op("aten::mm", 500_000, 400_000),
    ]
    names = ("aten::embedding", "aten::tanh", "aten::embedding_dense_backward", "aten::mm")
    profile = Profile((0, 1, 1, 1), (), dataflow=Dataflow(names, (0, 0, 1, 2, 2, 3), ".r...."))
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    said = repeated_work.RULE(Case(run, analyze(trace_of(events))))
    assert bool(said) == found
    if found:
        assert said[0].gain_ms > 0.28


@pytest.mark.parametrize(
    ("strides", "found"), [([0, 64, 1], True), ([4096, 64, 1], False), ([], False)]
)
def test_one_thing_that_is_computed_for_every_sample(strides, found):
    shared = tensors([32, 64, 64]) | ({"strides": [strides]} if strides else {})
    factor = RecordedOp("aten::linalg_cholesky_ex", 500, args=shared, line="net.py(5): loss")
    said = repeated_work.RULE(cpu_case([factor, mm(64, 64, 64, 500)]))
    assert bool(said) == found
    if found:
        assert "each of 32 samples" in said[0].claim and "net.py:5 (loss)" in said[0].evidence[1]


def test_rows_that_are_computed_for_each_of_their_copies():
    copy = RecordedOp("aten::clone", 20, args=tensors([4, 64]), line="net.py(4): forward")
    product = mm(512, 64, 1024, 600, line="net.py(5): forward")
    done = [copy, product, mm(64, 64, 64, 380)]
    (found,) = repeated_work.RULE(watched(done, "mC."))
    assert found.gain_ms == pytest.approx(0.6 * 7 / 8) and "8 times or more" in found.claim
    assert "made at net.py:4 (forward)" in found.evidence[0] and "net.py:5" in found.evidence[1]
    assert repeated_work.RULE(watched(done, "...")) == ()


def test_a_loop_that_torch_has_is_no_loop_in_python():
    inside = RecordedOp("aten::add", 4, inside="aten::gru", line="net.py(5): forward")
    alone = [replace(inside, inside="") for _ in range(40)]
    assert "net.py:5" in small_operators.RULE(cpu_case([*alone, mm(64, 64, 64, 40)])).claim
    events = [op("aten::gru", 0, 160_000)]
    hidden = cpu_case([*alone, mm(64, 64, 64, 40)], extra=events)
    assert small_operators.RULE(hidden) is None


def test_heads_that_run_one_after_the_other():
    heads = [
        mm(4096, 1024, 64, 20, module=f"layers.0.heads.{n}.query", late_us=30) for n in range(8)
    ]
    rest = mm(4096, 1024, 4096, 300, module="layers.0.up")
    found = small_operators.RULE(gpu_case([*heads, rest]))
    assert "layers.*.heads.*" in found.claim and "8 in a row" in found.evidence[0]
    wide = [mm(4096, 1024, 1024, 20, module=f"layers.0.blocks.{n}.up") for n in range(8)]
    assert small_operators.RULE(gpu_case([*wide, rest])) is None
    # On a CPU too: 8 products of 67 MFLOP take 400 us, the wide one has 1 GFLOP in 600.
    slow = [mm(256, 512, 64, 50, FP32, module=f"layers.0.heads.{n}.query") for n in range(8)]
    large = mm(256, 2048, 1024, 600, FP32, module="layers.0.up")
    found = small_operators.RULE(cpu_case([*slow, large]))
    assert found.gain_ms == pytest.approx(0.4 - 1.5 * 0.6 / 8, rel=0.01)
    quick = [replace(one, us=10) for one in slow]  # as quick as the large one
    assert small_operators.RULE(cpu_case([*quick, large])) is None
    # A router in every layer is as narrow, but does not follow another.
    routers = [part for one in slow for part in (one, replace(large, us=75))]
    assert small_operators.RULE(cpu_case(routers)) is None
    # In a loop of one's own, modules have no names: the line counts.
    unnamed = [replace(one, module="", line="net.py(7): forward") for one in slow]
    assert "net.py:7 (forward)" in small_operators.RULE(cpu_case([*unnamed, large])).claim


def test_one_model_that_is_called_again_is_no_row_of_heads():
    """An attack calls a network eight times: its head is narrow, and convolutions lie between."""
    head = mm(256, 512, 10, 50, FP32, line="net.py(7): forward")
    rest = mm(256, 2048, 1024, 600, FP32, line="net.py(9): up")
    between = RecordedOp("aten::cudnn_convolution", 50, args=tensors([8, 8, 8, 8], [8, 8, 3, 3]))
    back = mm(256, 10, 512, 50, FP32, phase="backward")
    assert small_operators.RULE(cpu_case([head] * 8 + [rest])) is not None
    for other in (between, back):
        assert small_operators.RULE(cpu_case([head, other] * 8 + [rest])) is None


def test_a_product_of_several_kernels_is_one():
    """Two kernels each, a sum in pieces: four products are too few for heads in a loop."""
    head = mm(4096, 1024, 64, 20, line="net.py(7): forward", late_us=30)
    rest = mm(4096, 1024, 4096, 300, line="net.py(9): up")

    def case(heads: int) -> Case:
        more = []
        for number in range(heads):
            # The host comes 30 us later for each, and an operator takes it 4.
            launched, again = (number + 1) * 30_000 + number * 4_000 + 2_500, 100 + number
            more.append(call("cudaLaunchKernel", launched, 500, again))
            more.append(kernel("splitKreduce_kernel", launched + 22_000, 5_000, again))
        return gpu_case([head] * heads + [rest], extra=more)

    assert small_operators.RULE(case(4)) is None
    assert "8 in a row" in small_operators.RULE(case(8)).evidence[0]


def test_anomaly_mode_costs_its_checks_and_its_stacks():
    """Each gradient is compared with itself inside isnan; a view takes as long as its stack."""
    parts = ("aten::ne", "aten::isnan"), ("aten::any", "aten::_is_any_true")
    done = [RecordedOp("aten::view", 20, phase="forward"), mm(64, 64, 64, 600)]
    done += [RecordedOp(op, 100, inside=around, phase="backward") for op, around in parts]
    profile = Profile((0, 1, 1, 1), (), switches=("anomaly mode",))
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    (found,) = slow_switch.RULE(cpu_case(done, run))
    assert found.gain_ms == pytest.approx(0.22, rel=0.01)


def test_updates_that_change_nothing():
    done = [
        RecordedOp("aten::_foreach_lerp_", 600, line="net.py(5): average"),
        mm(64, 64, 64, 400),
    ]
    (found,) = unused_work.RULE(watched(done, "N."))  # eight tenths
    assert found.gain_ms == pytest.approx(0.8 * 0.6) and "net.py:5" in found.evidence[1]
    assert "trained" in found.remedy and unused_work.RULE(watched(done, "..")) == ()


@pytest.mark.parametrize(("fresh", "us", "found"), [(1, 40, 1), (0, 40, 0), (0, 400, 1)])
def test_what_two_steps_find_as_it_was(fresh, us, found):
    """Where every step has one batch, what is computed of it is the same as well."""
    case = watched([mm(64, 64, 64, us, line="net.py(5): tower"), mm(64, 64, 64, 600)], "s.")
    flow = replace(case.run.profile.dataflow, fresh=bool(fresh))
    case = replace(case, run=replace(case.run, profile=replace(case.run.profile, dataflow=flow)))
    said = constant_rebuilt.RULE(case)
    assert (said is not None) == found
    if said is not None:
        assert said.gain_ms == pytest.approx(us / 1000) and "net.py:5" in said.evidence[0]


def test_masks_are_judged_by_their_shape_only_where_no_values_were_followed():
    """A mask of documents depends on the batch, which its shape does not tell."""
    made = {"shapes": [[512, 512]], "dtypes": [FP32]}
    done = [RecordedOp("aten::tril", 300, args=made, line="net.py(5): mask"), mm(64, 64, 64, 500)]
    assert constant_rebuilt.RULE(cpu_case(done)) is not None
    assert constant_rebuilt.RULE(watched(done, "..")) is None


def test_sums_and_kernels_of_zeros():
    zeros = tensors([32, 1024, 64])
    done = [
        RecordedOp("aten::scatter", 200, args=zeros, line="net.py(5): combine"),
        RecordedOp("aten::sum", 200, args=zeros, line="net.py(5): combine"),
        mm(64, 64, 64, 600),
    ]
    (found,) = zero_products.RULE(watched(done, "zz."))
    assert found.gain_ms == pytest.approx(0.9 * 0.4) and "index_add" in found.remedy
    assert "net.py:5" in found.evidence[1]


def copied(
    strides: list[int], taken_by: str, peak: int = 10 * 2**20, asked: str = "aten::repeat"
) -> Case:
    """A mask of every head, copied out of a tensor with these strides."""
    heads, mask = [2, 8, 256, 256], {"strides": [[524_288, 65_536, 256, 1], strides]}
    done = [
        RecordedOp(
            "aten::copy_",
            20,
            args={**tensors(heads, heads), **mask},
            line="net.py(3): f",
            inside=asked,
        ),
        RecordedOp(taken_by, 400, args=tensors(heads, heads)),
        mm(64, 64, 64, 580),
    ]
    run = replace(remembered(device="cpu").run, clock=None)
    return cpu_case(done, replace(run, memory=Memory(2**20, peak, None, None, "profiler")))


def test_copies_that_are_written_out_where_a_view_would_do():
    attention = "aten::scaled_dot_product_attention"
    found = written_out.RULE(copied([256, 0, 0, 1], attention))
    assert found.stake_bytes == 4 * 2**20 and "net.py:3 (f)" in found.evidence[0]
    assert written_out.RULE(copied([256, 0, 0, 1], "aten::add")) is not None
    assert written_out.RULE(copied([256, 0, 0, 1], "aten::convolution")) is None  # takes rows
    assert written_out.RULE(copied([524_288, 65_536, 256, 1], attention)) is None
    assert written_out.RULE(copied([0, 0, 0, 0], attention)) is None  # a fill
    assert written_out.RULE(copied([256, 0, 0, 1], attention, asked="aten::addmm")) is None
    assert written_out.RULE(copied([256, 0, 0, 1], attention, peak=100 * 2**20)) is None


def test_a_forward_that_is_recorded_though_nothing_goes_back_through_it():
    node = "autograd::engine::evaluate_function: MmBackward0"
    memory = Memory(2 * GIB, 10 * GIB, None, None, "cuda allocator")
    run = replace(remembered(device="cpu").run, memory=memory)

    def taught(*sequences: int) -> Case:
        """A teacher, whose operators have these numbers, and a student of half its size."""
        events = [
            range_("ProfilerStep#1", 0, 1_000_000),
            python("nn.Module: Teacher_0", 0, 90_000),
            op("aten::mm", 1_000, 40_000, sequence=sequences[0], **tensors([128, 64], [64, 64])),
            op("aten::mm", 41_000, 40_000, sequence=sequences[1], **tensors([128, 64], [64, 64])),
            python("nn.Module: Student_0", 100_000, 90_000),
            op("aten::mm", 101_000, 80_000, sequence=5, **tensors([128, 64], [64, 64])),
            op(node, 300_000, 9_000, sequence=5, forward_thread=1),
        ]
        return Case(run, analyze(trace_of(events)))

    (found,) = graph_memory.RULE(taught(2, 3))
    assert found.stake_bytes == pytest.approx(8 * GIB * 2 / 3) and "no_grad" in found.remedy
    assert graph_memory.RULE(taught(-1, -1)) == ()
    # Frozen layers on data: not recorded, each is shown with the number that the student takes.
    assert graph_memory.RULE(taught(5, 5)) == ()


def gone_back_twice(given_at: int) -> Case:
    """One graph, by backward() or by autograd.grad() first, then by backward().

    A weight is given its gradient at that time (us), too.
    """
    node = "autograd::engine::evaluate_function: MmBackward0"
    give = "torch::autograd::AccumulateGrad"
    events = [range_("ProfilerStep#1", 0, 1_000_000), op("aten::mm", 0, 9_000, sequence=2)]
    for start in (100_000, 400_000):
        # First a node of the loss alone, made after the others.
        number = 3 if start < 400_000 else 4
        events += [op(node, start - 20_000, 10_000, sequence=number, forward_thread=1)]
        events += [op(node, start, 200_000, sequence=2, forward_thread=1)]
        events += [op("aten::mm", start + 1_000, 190_000)]
    events += [op(give, time, 1_000) for time in (650_000, given_at * 1000)]
    return Case(None, analyze(trace_of(events)))


def test_a_pass_for_gradients_of_its_own_is_no_second_backward():
    (found,) = repeated_work.RULE(gone_back_twice(given_at=350))
    # 190 us of the product, 50 between the passes.
    assert "gone back through twice" in found.claim and found.gain_ms == pytest.approx(0.24)
    assert repeated_work.RULE(gone_back_twice(given_at=660)) == ()
    # By the second pass itself, which began 20 us before: the first was for an input.
    assert repeated_work.RULE(gone_back_twice(given_at=391)) == ()


@pytest.mark.parametrize(("lookups", "found"), [(6, True), (2, False)])
def test_lookups_in_a_loop_have_a_dense_gradient_each(lookups, found):
    put = {**tensors([4, 64], [4]), "values": ["", "", "20000", "-1", "False"]}
    one = RecordedOp(
        "aten::embedding_dense_backward", 100, args=put, phase="backward", line="net.py(4): turn"
    )
    case = watched([*[one] * lookups, mm(64, 64, 64, 400)], "." * (lookups + 1))
    flow = replace(case.run.profile.dataflow, tied_tables=(20_000 * 64,))
    tied = replace(case, run=replace(case.run, profile=replace(case.run.profile, dataflow=flow)))
    said = dense_embedding.RULE(tied)
    assert (said is not None) == found
    if said is not None:
        assert said.gain_ms == pytest.approx(5 / 6 * 0.6) and "all indices at once" in said.remedy
    few = dense_embedding.RULE(case)
    assert few is not None and ("SparseAdam" in few.remedy) != found


def test_inputs_that_are_expanded_first_are_broadcast():
    """F.cosine_similarity expands both sides by itself, and divides each by its norms."""
    whole, norms = [512, 512, 128], [512, 512, 1]
    strides = [[0, 128, 1], [512, 1, 1]]
    divided = RecordedOp(
        "aten::div", 300, line="net.py(6): similar", args=tensors(whole, norms, strides=strides)
    )
    summed = RecordedOp("aten::sum", 200, args=tensors(whole), line="net.py(6): similar")
    product = mm(64, 64, 64, 500, FP32)
    found = broadcast_blowup.RULE(cpu_case([divided, summed, product]))
    assert found.stake_ms == pytest.approx(0.5) and "net.py:6 (similar)" in " ".join(found.evidence)
    # The gradient of a mean is one number for many: torch expands it, and divides it by a number.
    backward = replace(divided, phase="backward")
    assert broadcast_blowup.RULE(cpu_case([backward, summed, product])) is None
    by_number = {**tensors(whole, [], strides=[[128, 0, 1], []])}
    scaled = replace(divided, args=by_number)
    assert broadcast_blowup.RULE(cpu_case([scaled, summed, product])) is None
    full = replace(divided, args=tensors(whole, norms, strides=[[65_536, 128, 1], [512, 1, 1]]))
    assert broadcast_blowup.RULE(cpu_case([full, summed, product])) is None


def test_angles_of_an_encoding_are_needed_one_by_one():
    """Points times frequencies: nothing sums over them, but for the gradient of the points."""
    spread, angles = tensors([24_576, 3, 1], [16]), tensors([24_576, 48])
    done = [RecordedOp("aten::mul", 300, args=spread), RecordedOp("aten::sin", 300, args=angles)]
    back = RecordedOp("aten::sum", 300, args=angles, phase="backward")
    assert broadcast_blowup.RULE(cpu_case([*done, back])) is None
    assert broadcast_blowup.RULE(cpu_case([*done, replace(back, phase="forward")])) is not None


def test_documents_mask_is_no_broadcast_that_a_product_could_replace():
    mask = [8, 512, 512]
    done = [
        RecordedOp("aten::eq", 300, args=tensors([8, 1, 512], [8, 512, 1], dtype="long int")),
        RecordedOp("aten::sum", 100, args=tensors(mask)),
        mm(64, 64, 64, 500),
    ]
    assert broadcast_blowup.RULE(cpu_case(done)) is not None
    attends = RecordedOp("aten::scaled_dot_product_attention", 200, args=tensors(mask))
    assert broadcast_blowup.RULE(cpu_case([*done, attends])) is None


def newton_schulz(m: int, k: int, between: RecordedOp) -> list[RecordedOp]:
    """A polynomial of x x^T times x, of eight matrices of m rows."""
    gram, square = mm(m, k, m, 400, FP32, 8), mm(m, m, m, 800, FP32, 8, line="muon.py(5): f")
    gram.args["strides"] = [[m * k, k, 1], [m * k, 1, k]]
    square.args["strides"] = [[m * m, m, 1]] * 2
    last = mm(m, m, k, 400, FP32, 8)
    last.args["strides"] = [[m * m, m, 1], [m * k, k, 1]]
    return [
        gram,
        between,
        square,
        RecordedOp("aten::add", 100, args=tensors(*[[8, m, m]] * 2)),
        last,
    ]


def test_tall_matrices_times_their_own_transpose():
    m, k = 256, 64
    scaled = RecordedOp("aten::mul", 100, args=tensors([8, m, m], []))
    found = product_order.RULE(cpu_case(newton_schulz(m, k, scaled)))
    left = k * k * (2 * m + k) / (m * m * (2 * k + m))
    assert found.gain_ms == pytest.approx(1.6 * (1 - left) + 0.2 * (1 - 1 / 16))
    assert "x has 256 rows and 64 columns" in found.evidence[0] and "muon.py:5" in str(found)
    assert product_order.RULE(cpu_case(newton_schulz(k, m, scaled))) is None  # a wide matrix
    for other in ("aten::relu", "aten::_softmax"):  # no polynomial: scores
        between = RecordedOp(other, 100, args=tensors([8, m, m]))
        assert product_order.RULE(cpu_case(newton_schulz(m, k, between))) is None
    masked = RecordedOp("aten::mul", 100, args=tensors([8, m, m], [8, m, m]))
    assert product_order.RULE(cpu_case(newton_schulz(m, k, masked))) is None


def test_a_linear_layer_whose_results_are_only_averaged():
    done = [mm(512, 64, 1024, 600, line="net.py(5): forward"), mm(64, 64, 64, 400)]
    found = product_order.RULE(watched(done, "p."))
    assert found.gain_ms == pytest.approx(0.9 * 0.6) and "net.py:5" in found.evidence[0]
    assert product_order.RULE(watched(done, "..")) is None


def test_python_that_is_traced_is_slow_everywhere():
    done = [mm(64, 64, 64, 400), replace(mm(64, 64, 64, 400), late_us=800, line="net.py(5): f")]
    case = cpu_case(done)
    run = replace(remembered(device="cpu").run, clock=None)
    profile = Profile((0, 1, 1, 1), (), switches=(TRACEMALLOC,))
    traced = replace(case, run=replace(run, profile=profile))
    (found,) = slow_switch.RULE(traced)
    assert found.gain_ms == pytest.approx(0.28 * 0.8) and "tracemalloc.start" in found.remedy
    assert "host_stall" not in rules(traced)


@pytest.mark.parametrize(
    ("other", "dropped"), [("net.py(5): forward", True), ("b.py(1): f", False)]
)
def test_gradients_that_are_dropped_are_told_from_those_of_frozen_weights(other, dropped):
    back = {"phase": "backward"}
    done = [
        mm(64, 64, 64, 500, line="net.py(5): forward", **back),
        mm(64, 64, 32, 500, line=other, **back),
    ]
    (found,) = unused_work.RULE(watched(done, "u."))
    assert ("dropped before the update" in found.claim) == dropped
    assert ("once for each update" in found.remedy) == dropped


def test_gradients_of_weights_that_no_optimizer_has_are_not_dropped():
    """A model of a library: all of it has the line that calls it."""
    done = [mm(64, 64, n, 500, line="net.py(5): step", phase="backward") for n in (64, 32)]
    case = watched(done, "u.")
    profile = case.run.profile
    idle = (IdleGradients("embeddings.weight", 1, 0, asked=True),)
    lines = {"requires_grad": ("train.py:9 (main)",)}
    flow = replace(profile.dataflow, idle_gradients=idle)
    profile = replace(profile, dataflow=flow, setup_lines=lines)
    (found,) = unused_work.RULE(replace(case, run=replace(case.run, profile=profile)))
    assert "no optimizer uses" in found.claim and found.remedy.startswith("requires_grad_(False)")
    assert "no optimizer has embeddings.weight" in found.evidence
    assert "requires_grad is set at train.py:9 (main)" in found.evidence


NODE = "autograd::engine::evaluate_function: CompiledFunctionBackward"


@pytest.mark.parametrize(
    ("strides", "node", "found"),
    [
        ([[64, 1], [1, 64]], NODE, True),
        ([[64, 1], [64, 1]], NODE, False),
        ([[64, 1], [1, 64]], "", False),
    ],
)
def test_products_that_a_compiled_backward_computes_again(strides, node, found):
    """A gradient takes the weight, or the input, the other way around; a product has two."""
    forward = mm(64, 64, 64, 500, FP32)
    forward.args["strides"] = [[64, 1], [1, 64]]
    again, *gradients = (
        mm(64, 64, 64, 500, FP32, phase="backward", inside=node, line="net.py(5): f")
        for _ in range(3)
    )
    again.args["strides"] = strides
    for one, order in zip(gradients, ([[64, 1], [64, 1]], [[1, 64], [64, 1]]), strict=True):
        one.args["strides"] = order
    profile = Profile((0, 1, 1, 1), (), switches=("activation_memory_budget=0",))
    profile = replace(profile, setup_lines={MEMORY_BUDGET: ("train.py:9 (main)",)})
    run = replace(remembered(device="cpu").run, clock=None, memory=None, profile=profile)
    case = cpu_case([forward, again, *gradients], run)
    said = repeated_work.RULE(case)
    assert bool(said) == found and "slow_switch" not in rules(case)
    if found:
        assert said[0].gain_ms == pytest.approx(0.5) and "forward again" in said[0].claim
        assert "activation_memory_budget is set at train.py:9 (main)" in said[0].evidence


def test_the_logarithm_of_a_softmax():
    logits = tensors([256, 4096])
    at = {"args": logits, "line": "net.py(5): loss"}
    done = [
        RecordedOp("aten::_softmax", 200, **at),
        RecordedOp("aten::log", 150, **at),
        mm(64, 64, 64, 650),
    ]
    found = unfused_chain.RULE(cpu_case(done))
    assert found.gain_ms == pytest.approx(0.15) and "log_softmax" in found.remedy
    assert "net.py:5 (loss)" in found.evidence[0]
    assert unfused_chain.RULE(cpu_case([done[1], done[2]])) is None


def test_a_loop_that_computes_what_its_earlier_turns_did():
    """The repetition is the cause: of the loop remains what it computes first."""
    turn = RecordedOp("aten::add", 1, late_us=6, line="loss.py(5): ratio")
    done = [*[turn] * 48, mm(64, 64, 64, 100)]
    run = watched(done, "." * 8 + "r" * 40 + ".").run
    first, second = explain(gpu_case(done, run))[:2]
    assert first.rule == "repeated_work" and "once before the loop" in first.remedy
    assert second.rule == "small_operators" and second.gain_ms < first.gain_ms / 4
    fresh = explain(gpu_case(done, watched(done, "." * 49).run))
    assert fresh[0].rule == "small_operators"
    assert all(finding.rule != "repeated_work" for finding in fresh)


def test_gradients_of_what_is_repeated_count_beside_data_without_gradients():
    """A sum of data and one of predictions, each twice; only the second has a gradient."""
    node = "autograd::engine::evaluate_function: SumBackward0"
    shape = {"shapes": [[16, 320]], "dtypes": ["float"]}
    events = [range_("ProfilerStep#1", 0, 1_000_000)]
    for number, start in enumerate((0, 40_000), 1):
        events += [op("aten::sum", start, 10_000, **shape)]
        events += [op("aten::sum", start + 20_000, 8_000, sequence=number, **shape)]
        begun = 100_000 * number
        events += [op(node, begun, 90_000, sequence=number, forward_thread=1)]
        events += [op("aten::mul", begun + 1_000, 80_000)]
    names = ("aten::sum", "aten::mul")
    flow = Dataflow(names, (0, 0, 0, 0, 1, 1), "..rr..")
    profile = Profile((0, 1, 1, 1), (), dataflow=flow)
    run = replace(remembered(device="cpu").run, clock=None, profile=profile)
    (found,) = repeated_work.RULE(Case(run, analyze(trace_of(events))))
    assert found.gain_ms > 0.018 + 0.08


def looked_up(strides: list[int], next_op: RecordedOp) -> Case:
    """128 rows for each of 384 samples, and what follows."""
    ids = {
        "shapes": [[5000, 64], [384, 128]],
        "strides": [[64, 1], strides],
        "dtypes": ["float", "long int"],
    }
    lookup = RecordedOp(
        "aten::index_select", 200, inside="aten::embedding", outer=ids, line="net.py(4): forward"
    )
    return cpu_case([lookup, next_op, mm(384, 512, 512, 500, FP32)])


def test_rows_that_are_looked_up_for_every_sample():
    """An index that is expanded has the same rows for all; one product could take them."""
    each = mm(128, 64, 1, 250, FP32, batch=384, line="net.py(5): forward")
    (found,) = repeated_work.RULE(looked_up([0, 1], each))
    assert "each of 384 samples" in found.claim and found.stake_ms == pytest.approx(0.45)
    assert 0.4 < found.gain_ms < 0.45
    assert {"net.py:5", "net.py:4"} <= {line.split(" ")[0] for line in found.evidence[1:]}
    assert repeated_work.RULE(looked_up([128, 1], each)) == ()


def test_positions_that_are_looked_up_for_every_sample_and_added():
    """Later products of such a form are none of it: each sample has something of its own."""
    shape = [384, 128, 64]
    added = RecordedOp("aten::add", 100, args=tensors(shape, shape), line="net.py(5): forward")
    case = looked_up([0, 1], added)
    (found,) = repeated_work.RULE(case)
    assert found.stake_ms == pytest.approx(0.2)


@pytest.mark.parametrize(("letters", "found"), [("z.", False), ("zz", True), ("8.", False)])
def test_a_gradient_of_zeros_in_one_of_two_layers_is_that_of_a_loss_that_reads_little(
    letters, found
):
    """Both run one line of code, which cannot take the rows of one of them."""
    layer = mm(512, 64, 1024, 300, phase="backward", line="net.py(5): forward")
    done = [layer, layer, mm(64, 64, 64, 400)]
    assert bool(zero_products.RULE(watched(done, f"{letters}."))) == found
    head = replace(layer, line="net.py(9): head")
    (kept,) = zero_products.RULE(watched([head, layer, done[2]], f"{letters}."))[:1]
    assert "net.py:9" in " ".join(kept.evidence)
