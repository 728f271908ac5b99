"""Rules about what the kernels do: products, attention, casts, copies, memory layout."""

from dataclasses import replace

import pytest

from steplab.core import Finding, Ran
from steplab.findings import Case, is_note
from steplab.findings.rules import (
    attention_unfused,
    autocast_casts,
    copies,
    fp32_matmul,
    full_logits,
    transposed_norm,
    unaligned_matmul,
)
from steplab.trace.analyze import analyze
from tests.compare.test_step_tables import make_run
from tests.findings.steps import BF16, FP32, RecordedOp, cpu_case, gpu_case, mm, rules, tensors
from tests.trace.traces import op, range_, trace_of

SGEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_cublas"
SCORES = [8, 64, 64]


def by_hand(us: int = 100, **changes) -> list[RecordedOp]:
    """Attention of 8 heads, 64 queries and keys, 32 wide, operator by operator."""
    return [
        mm(64, 32, 64, 50, batch=8, **changes),
        RecordedOp(
            "aten::mul", us, args=tensors(SCORES, []), line="model.py(7): attend", **changes
        ),
        RecordedOp("aten::_softmax", us, args=tensors([2, 4, 64, 64]), line="model.py(7): attend"),
        mm(64, 64, 32, 50, batch=8, **changes),
        mm(4096, 4096, 4096, 200),
    ]


def test_attention_by_hand_is_unfused():
    found = attention_unfused.RULE(gpu_case(by_hand()))
    assert found.stake_ms == pytest.approx(0.25) and found.gain_ms == pytest.approx(0.2)
    assert "by hand" in found.evidence[0] and "model.py:7 (attend)" in found.evidence[1]
    assert rules(gpu_case(by_hand()))[0] == "attention_unfused"


def test_the_math_path_tells_why():
    def fallen_back(query: list[int], dtype: str = BF16, mask: bool = False):
        shapes = [query] * 3 + ([query[-2:] * 1] if mask else [])
        outer = tensors(*shapes, dtype=dtype)
        inside = {"inside": "aten::_scaled_dot_product_attention_math", "outer": outer}
        return attention_unfused.RULE(gpu_case(by_hand(**inside))).evidence[0]

    assert "256" in fallen_back([2, 4, 64, 320])
    assert "no multiple of 8" in fallen_back([2, 4, 64, 12])
    assert "fp64" in fallen_back([2, 4, 64, 32], "double")
    assert "mask" in fallen_back([2, 4, 64, 32], mask=True)
    assert "no reason in the trace" in fallen_back([2, 4, 64, 32])


def test_fused_attention_needs_its_last_dimension_in_order():
    """On a CPU heads of any width are taken; of a transposed tensor none."""

    def on_cpu(width: int, *strides: int) -> Finding:
        outer = tensors(*[[2, 4, 64, width]] * 3)
        outer["strides"] = [list(strides)] * 3
        inside = {"inside": "aten::_scaled_dot_product_attention_math", "outer": outer}
        return attention_unfused.RULE(cpu_case(by_hand(**inside)))

    found = on_cpu(12, 3072, 768, 1, 64)
    assert "transposed in memory" in found.evidence[0] and ".contiguous()" in found.remedy
    assert "no reason in the trace" in on_cpu(12, 3072, 768, 12, 1).evidence[0]


def test_a_cpu_has_no_fused_dropout():
    outer = tensors(*[[2, 4, 64, 32]] * 3, values=["", "", "", "", "0.10000000000000001", "False"])
    inside = {"inside": "aten::_scaled_dot_product_attention_math", "outer": outer}
    drop = RecordedOp("aten::native_dropout", 50, args=tensors(SCORES))
    found = attention_unfused.RULE(cpu_case([*by_hand(**inside), drop]))
    assert "p is 0.1" in found.evidence[0] and found.remedy.count("dropout") == 1
    assert "no reason" in attention_unfused.RULE(gpu_case(by_hand(**inside))).evidence[0]


def test_a_cpu_takes_masks_of_two_or_four_dimensions():
    def masked(*mask: int) -> Finding:
        outer = tensors(*[[2, 4, 64, 32]] * 3, list(mask))
        inside = {"inside": "aten::_scaled_dot_product_attention_math", "outer": outer}
        return attention_unfused.RULE(cpu_case(by_hand(**inside)))

    assert "attn_mask[None]" in masked(4, 64, 64).remedy
    assert "3 dimensions" in masked(4, 64, 64).evidence[0]
    # Of four dimensions it is taken, unless it asks for a gradient.
    learned = masked(1, 4, 64, 64)
    assert learned.gain_ms == 0 and "gradient of a mask" in learned.remedy


def test_a_table_as_large_as_the_scores_is_none_of_them():
    lookup = RecordedOp("aten::embedding", 400, args=tensors([9, 8], [64, 64, 8]))
    found = attention_unfused.RULE(gpu_case([lookup, *by_hand()]))
    assert found.stake_ms == pytest.approx(0.25)
    biased = RecordedOp("aten::add", 400, args=tensors(SCORES, [1, 64, 64]))
    assert attention_unfused.RULE(gpu_case([biased, *by_hand()])).stake_ms == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (SCORES, True),
        ([2, 64, 64, 4], True),  # heads last
        ([512, 64], True),  # one row for each query
        ([8, 64, 8, 8], False),  # of 8 neighbors in 8 channels
    ],
)
def test_a_softmax_of_as_many_numbers_that_are_no_scores(weights, found):
    product, scaled, _, *rest = by_hand()
    case = gpu_case(
        [*(product, scaled), RecordedOp("aten::_softmax", 100, args=tensors(weights)), *rest]
    )
    assert (attention_unfused.RULE(case) is not None) == found


def test_remedies_of_attention_keep_the_model():
    """No causal mask where there is none, no lost dropout, no kernel that does not exist."""
    plain = attention_unfused.RULE(gpu_case(by_hand())).remedy
    assert plain == "F.scaled_dot_product_attention(q, k, v)"
    mask = RecordedOp("aten::masked_fill", 50, args=tensors(SCORES, [64, 64]))
    drop = RecordedOp("aten::native_dropout", 50, args=tensors(SCORES))
    found = attention_unfused.RULE(gpu_case([*by_hand(), mask, drop]))
    assert (
        "(q, k, v, attn_mask, dropout_p=p), or is_causal=True instead of the mask if"
        in found.remedy
    )
    bert = cpu_case([*by_hand(), drop])
    found = attention_unfused.RULE(bert)
    assert "no dropout" in found.remedy and found.gain_ms == 0 and is_note(found, bert)
    assert "is_causal" not in found.remedy
    outer = tensors(*[[2, 4, 64, 320]] * 3, dtype=BF16)
    inside = {"inside": "aten::_scaled_dot_product_attention_math", "outer": outer}
    wide = attention_unfused.RULE(gpu_case(by_hand(**inside)))
    assert wide.remedy.startswith("no remedy keeps the model") and wide.gain_ms == 0


def masked(dtype: str = "bf16", mask: bool = True, width: int = 32) -> list[RecordedOp]:
    """The memory-efficient kernel for 600 of 1000 us, as torch calls it."""
    kernel = f"fmha_cutlassF_{dtype}_aligned_64x64_rf_sm80(Params)"
    outer = tensors(*[[2, 4, 64, width]] * 3, *[[64, 64]] * mask, dtype=BF16)
    path = "aten::_scaled_dot_product_efficient_attention"
    fused = {"inside": path, "outer": outer, "line": "model.py(9): attend"}
    op, inputs = "aten::_efficient_attention_forward", tensors([2, 64, 4, width], dtype=BF16)
    return [RecordedOp(op, 600, kernel, args=inputs, **fused), mm(64, 64, 64, 400)]


def test_the_memory_efficient_kernel_is_named_where_flash_would_do():
    found = attention_unfused.RULE(gpu_case(masked()))
    assert found.stake_ms == pytest.approx(0.6) and found.gain_ms == pytest.approx(0.6 * 2.3 / 3.3)
    assert "memory-efficient path: a mask of 64x64 is given" in found.evidence[0]
    assert "model.py:9 (attend)" in found.evidence[1] and "is_causal" in found.remedy
    assert rules(gpu_case(masked()))[0] == "attention_unfused"
    assert "no reason" in attention_unfused.RULE(gpu_case(masked(mask=False))).evidence[0]


def test_the_memory_efficient_kernel_is_right_for_fp32_wide_heads_and_older_cards():
    assert attention_unfused.RULE(gpu_case(masked("f32"))) is None
    assert attention_unfused.RULE(gpu_case(masked(width=320))) is None
    for name in ("Tesla T4", "Some GPU"):
        card = {"deviceProperties": [{"id": 0, "name": name}]}
        assert attention_unfused.RULE(gpu_case(masked(), card=card)) is None


def test_fused_attention_routers_and_experts_are_no_unfused_attention():
    flash = RecordedOp("aten::_flash_attention_forward", 100, "pytorch_flash::flash_fwd_kernel")
    router = RecordedOp("aten::_softmax", 100, args=tensors([4, 512, 64]))
    experts = [mm(64, 32, 128, 50, batch=8), mm(64, 128, 32, 50, batch=8)]
    assert attention_unfused.RULE(gpu_case([flash, router, *experts])) is None


def test_fp32_products_on_a_card_with_tensor_cores():
    slow = gpu_case([mm(512, 512, 512, 800, FP32, kernel=SGEMM), mm(512, 512, 512, 200)])
    found = fp32_matmul.RULE(slow)
    assert found.stake_ms == pytest.approx(0.8) and rules(slow)[0] == "fp32_matmul"
    assert found.gain_ms == pytest.approx(0.8 * (1 - 66.9 / 494.7))
    assert fp32_matmul.RULE(gpu_case([mm(512, 512, 512, 800)])) is None
    assert found.remedy == "precision=bf16 or precision=tf32"
    v100 = {"deviceProperties": [{"id": 0, "name": "Tesla V100-SXM2-16GB"}]}
    old = gpu_case([mm(512, 512, 512, 800, FP32, kernel=SGEMM)], card=v100)
    assert fp32_matmul.RULE(old).remedy == "precision=fp16"
    unknown = {"deviceProperties": [{"id": 0, "name": "Some GPU"}]}
    strange = gpu_case([mm(512, 512, 512, 800, FP32, kernel=SGEMM)], card=unknown)
    assert fp32_matmul.RULE(strange) is None


def cast(us: int, into: str = BF16, source: str = FP32, **changes) -> RecordedOp:
    args = {"shapes": [[64, 64], [64, 64], []], "dtypes": [into, source, "Scalar"]}
    kernel = "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::T)>"
    return RecordedOp("aten::copy_", us, kernel, args=args, **changes)


def test_casts_and_norms_of_mixed_dtypes():
    mixed = {"inside": "aten::rms_norm", "module": "blocks.0.norm"}
    mixed["outer"] = {"shapes": [[64, 64], [], [64]], "dtypes": [BF16, "ScalarList", FP32]}
    steps = [cast(100, line="net.py(3): f"), RecordedOp("aten::pow", 40, **mixed), mm(9, 9, 9, 500)]
    backward = RecordedOp("aten::mul", 60, phase="backward", module="blocks.0.norm")
    found = autocast_casts.RULE(gpu_case([*steps, backward]))
    assert found.stake_ms == pytest.approx(0.2) and "1 casts a step, 100.0 us" in found.evidence[0]
    assert "norms of mixed dtypes: 100.0 us" in found.evidence[1]
    assert found.gain_ms == pytest.approx(0.1 + 0.1 * 2 / 3)
    assert rules(gpu_case([*steps, backward]))[0] == "autocast_casts"


def test_few_casts_and_norms_of_one_dtype_are_left_alone():
    alike = {"shapes": [[64, 64], [], [64]], "dtypes": [BF16, "ScalarList", BF16]}
    norm = RecordedOp("aten::pow", 300, inside="aten::rms_norm", outer=alike, module="norm")
    assert autocast_casts.RULE(gpu_case([cast(20), norm, mm(9, 9, 9, 700)])) is None


def copied(us: int, strides: list[int], **changes) -> RecordedOp:
    args = tensors([8, 4, 16], [8, 4, 16], strides=[[64, 16, 1], strides])
    return RecordedOp("aten::copy_", us, args=args, **changes)


def copies_in(case: Case) -> Finding | None:
    found = copies.RULE(case)
    return found[0] if found else None


def test_copies_with_their_line_and_layout():
    steps = [copied(200, [64, 1, 4], line="net.py(30): forward"), mm(9, 9, 9, 800, FP32)]
    found = copies_in(cpu_case(steps))
    assert found.stake_ms == pytest.approx(0.2) and "net.py:30 (forward)" in found.evidence[0]
    assert "transposed" in found.evidence[1] and rules(cpu_case(steps))[0] == "copies"
    back = cpu_case([copied(200, [64, 1, 4], phase="backward"), mm(9, 9, 9, 800, FP32)])
    assert copies_in(back).stake_ms == pytest.approx(0.2)
    clone = cpu_case([copied(200, [64, 16, 1]), mm(9, 9, 9, 800, FP32)])
    assert copies_in(clone).stake_ms == pytest.approx(0.2)


@pytest.mark.parametrize("growing", [True, False])
def test_a_tensor_that_grows_in_a_loop_is_copied_whole(growing):
    def joined(turn: int) -> RecordedOp:
        sizes = [[8, turn if growing else 4, 16], [8, 1, 16]]
        args = {"shapes": [sizes, []], "dtypes": ["TensorList", "Scalar"]}
        return RecordedOp("aten::cat", 30, args=args, line="net.py(7): forward")

    found = copies_in(cpu_case([*map(joined, range(1, 13)), mm(9, 9, 9, 800, FP32)]))
    assert found.stake_ms == pytest.approx(0.36) and ("list" in found.remedy) == growing
    assert ("parts" in found.remedy) != growing and "views" not in found.remedy


@pytest.mark.parametrize("contended", [0.0, 0.5])
def test_a_copy_that_waits_for_a_core_is_not_long(contended):
    """A copy of 50 us that another process holds up in two steps of three."""
    events = []
    for step, us in enumerate((600, 50, 600)):
        start = step * 2_000_000
        events += [range_(f"ProfilerStep#{step}", start, 1_900_000)]
        events += [op("aten::copy_", start, us * 1000, **tensors([512, 512], [512, 512]))]
        events += [op("aten::mm", start + 700_000, 1_000_000, **tensors([64, 64], [64, 64]))]
    run = make_run(ms=1.9)
    run = replace(run, clock=replace(run.clock, contended=contended))
    found = copies_in(Case(run, analyze(trace_of(events))))
    assert (found is None) == bool(contended)


def test_casts_small_copies_and_copies_inside_products_are_no_copies():
    products = {"inside": "aten::addmm", "outer": tensors([9], [9, 9], [9, 9])}
    inside = copied(400, [0, 0, 1], **products)
    assert copies_in(cpu_case([inside, cast(200), mm(9, 9, 9, 400, FP32)])) is None
    autograd = copied(400, [64, 16, 1], phase="backward")
    assert copies_in(cpu_case([autograd, mm(9, 9, 9, 400, FP32)])) is None
    assert copies_in(cpu_case([copied(40, [64, 1, 4]), mm(9, 9, 9, 960, FP32)])) is None


def test_copies_from_pageable_memory():
    from tests.trace.traces import call, copy

    far = "Memcpy HtoD (Pageable -> Device)"
    extra = [call("cudaMemcpyAsync", 900_000, 500_000, 99), copy(far, 900_000, 490_000, 99, 2**20)]
    found = copies_in(gpu_case([mm(512, 512, 512, 800)], extra=extra, until_us=1400))
    assert found is not None and "Pageable" in found.evidence[0]


def test_remedies_of_copies_say_which_copies():
    reordered = RecordedOp("aten::cudnn_convolution", 300, "batched_transpose_16x64_pack_1x4_half")
    product = mm(512, 512, 512, 800)
    assert "channels_last" in copies_in(gpu_case([product, reordered])).remedy
    moved = RecordedOp("aten::copy_", 300, "direct_copy_kernel_cuda", args=tensors([512, 512]))
    remedy = copies_in(gpu_case([product, moved])).remedy
    assert "views" in remedy and "pin" not in remedy


def test_attention_owns_both_of_its_products():
    """Rows of 3,137 scores are off the grid; a fused kernel stores none of them."""
    score, weigh = mm(3137, 64, 3137, 900, batch=12), mm(3137, 3137, 64, 900, batch=12)
    softmax = RecordedOp("aten::_softmax", 3000, args=tensors([12, 3137, 3137], dtype=BF16))
    aligned = mm(4096, 1024, 1024, 30)
    assert rules(gpu_case([score, softmax, weigh, aligned])) == ["attention_unfused"]


def test_no_product_is_faster_than_its_bytes():
    """A product of one row reads its matrix, in any precision: 67 MB take 14 us.

    So do the distances of points in space: 1 GB for 2.7 GFLOP.
    """
    simt = {"kernel": "ampere_sgemm_128x64_nn", "dtype": FP32}
    square, row = mm(4096, 4096, 4096, 1000, **simt), mm(1, 4096, 4096, 20, **simt)
    assert fp32_matmul.RULE(gpu_case([square])).gain_ms > 0.8
    assert fp32_matmul.RULE(gpu_case([row])) is None
    distances = mm(2048, 5, 2048, 460, batch=64, **simt)
    assert fp32_matmul.RULE(gpu_case([distances, square])).stake_ms == pytest.approx(1.0)
    assert fp32_matmul.RULE(gpu_case([distances])) is None


def test_rows_off_the_grid():
    head = mm(4096, 1024, 50_257, 2000)
    aligned = mm(4096, 1024, 50_304, 700)
    found = unaligned_matmul.RULE(gpu_case([head, aligned]))
    assert "50257" in found.claim and "50304" in found.remedy
    assert found.stake_ms == pytest.approx(2.0) and 1.2 < found.gain_ms < 1.5
    assert rules(gpu_case([head, aligned]))[0] == "unaligned_matmul"
    assert unaligned_matmul.RULE(gpu_case([aligned, mm(4096, 1024, 1, 50)])) is None
    assert unaligned_matmul.RULE(cpu_case([head])) is None


def test_a_dimension_that_is_no_row_may_be_odd():
    """1,023 tokens: rows of both factors and of the result are still 1,024 long."""
    assert unaligned_matmul.RULE(gpu_case([mm(1023, 1024, 1024, 500)])) is None
    # The gradient of a weight sums over them, but reads rows of 1,024 all the same.
    strides = [[1, 1024], [1024, 1]]
    weight = mm(1024, 1023, 1024, 500)
    weight.args["strides"] = strides
    assert unaligned_matmul.RULE(gpu_case([weight])) is None


def test_chunks_of_logits_are_offered_where_the_model_can_have_them():
    done = [RecordedOp("aten::_log_softmax", 100, args=tensors([16_384, 100_000]))]
    stranger = make_run()
    ours = replace(stranger, ran=Ran({"cross_entropy": ("whole",)}))
    assert "impl.cross_entropy=triton_chunked" in full_logits.RULE(gpu_case(done, ours)).remedy
    remedy = full_logits.RULE(gpu_case(done, stranger)).remedy
    assert "substitute=loss" in remedy and "impl." not in remedy


def test_logits_of_the_whole_batch():
    loss = RecordedOp(
        "aten::_log_softmax", 100, args=tensors([16_384, 100_000]), line="loss.py(4): loss"
    )
    found = full_logits.RULE(gpu_case([loss, mm(64, 64, 64, 900)]))
    assert found.stake_bytes == 3 * 16_384 * 100_000 * 4
    assert "LinearCrossEntropy" in found.remedy and "substitute" not in found.remedy
    assert rules(gpu_case([loss, mm(64, 64, 64, 900)]))[0] == "full_logits"
    small = RecordedOp("aten::_log_softmax", 100, args=tensors([128, 1024]))
    case = gpu_case([small, mm(64, 64, 64, 900)])
    assert full_logits.RULE(case) is None  # 1.5 MiB
    classes = RecordedOp("aten::_log_softmax", 100, args=tensors([16_384, 10]))
    assert full_logits.RULE(gpu_case([classes])) is None


@pytest.mark.parametrize(("strides", "found"), [([1, 200_000], 1), ([64, 1], 0)])
def test_rows_of_a_table_that_lies_column_by_column(strides, found):
    table = {"shapes": [[200_000, 64], []], "dtypes": ["float", ""], "strides": [strides, []]}
    taken = RecordedOp("aten::index", 300, args=table, line="loop.py(9): step")
    said = copies.RULE(cpu_case([taken, mm(9, 9, 9, 700, FP32)]))
    assert len(said) == found
    if said:
        assert said[0].gain_ms == pytest.approx(0.9 * 0.3) and "loop.py:9" in said[0].evidence[0]


def normed(us: int, dims: list[int], strides: list[int], **changes) -> RecordedOp:
    """A norm's gradient; of 64 x 256 x 4096 in bf16 three times 134 MB take 84 us."""
    args = tensors(dims, dims, dtype=BF16, strides=[strides, strides])
    kernel = "void at::native::batch_norm_backward_kernel<c10::BFloat16, float, float, int>"
    return RecordedOp("aten::native_batch_norm_backward", us, kernel, args=args, **changes)


def test_a_norm_of_a_transposed_tensor():
    line = {"line": "net.py(7): forward"}
    across = [1_048_576, 1, 256]
    slow = normed(2000, [64, 256, 4096], across, **line)
    args = tensors([64, 4096, 256], [64, 4096, 256], dtype=BF16)
    ordered = {**args, "strides": [[1_048_576, 256, 1], [1_048_576, 1, 4096]]}
    moved = RecordedOp("aten::copy_", 500, "direct_copy_kernel_cuda", args=ordered, **line)
    rest = mm(4096, 4096, 4096, 300)
    (found,) = transposed_norm.RULE(gpu_case([slow, moved, rest]))
    assert found.stake_ms == pytest.approx(2.5) and 2.0 < found.gain_ms < 2.3
    assert "64x256x4096 in strides of 1048576x1x256" in found.evidence[1]
    assert "1 copies a step" in found.evidence[2] and "net.py:7 (forward)" in found.evidence[3]
    assert rules(gpu_case([slow, moved, rest]))[0] == "transposed_norm"
    others = {
        "rows": normed(2000, [262_144, 256], [256, 1]),
        "an image in channels_last": normed(2000, [64, 256, 64, 64], [1_048_576, 1, 16_384, 256]),
        "as fast as its bytes": normed(400, [64, 256, 4096], across),
        "small": normed(2000, [64, 16, 256], [4096, 1, 16]),
    }
    for what, other in others.items():
        assert transposed_norm.RULE(gpu_case([other, moved, rest])) == (), what
    assert transposed_norm.RULE(cpu_case([slow, moved, rest])) == ()


@pytest.mark.parametrize("make", [cpu_case, gpu_case])
def test_a_loss_whose_classes_are_not_the_last_dimension(make):
    """Logits (batch, time, class) that are transposed for the loss, and those that are made so."""
    shape, rows, across = [16, 8192, 32], [262_144, 32, 1], [262_144, 1, 8192]
    line = {"line": "loss.py(7): loss", "inside": "aten::cross_entropy_loss"}

    def softmax(strides: list[int], dims: list[int] = shape, dim: str = "1") -> RecordedOp:
        args = tensors(dims, strides=[strides], values=["", dim, "False"])
        return RecordedOp("aten::_log_softmax", 300, "softmax_kernel", args=args, **line)

    def copied(to: list[int], source: list[int]) -> RecordedOp:
        args = tensors(shape, shape, strides=[to, source], values=["", "", "False"])
        return RecordedOp("aten::copy_", 200, "direct_copy_kernel_cuda", args=args, **line)

    rest = mm(512, 64, 8192, 500, FP32)
    done = [copied(rows, across), softmax(across), copied(across, rows), rest]
    (found,) = transposed_norm.RULE(make(done))
    assert found.gain_ms == pytest.approx(0.4, rel=0.05)
    assert found.stake_ms == pytest.approx(0.7, rel=0.05)
    assert "16x8192x32" in found.evidence[0] and "loss.py:7 (loss)" in found.evidence[1]
    assert rules(make(done))[0] == "transposed_norm"
    in_order = [copied(rows, across), softmax(rows), rest]  # a convolution makes them like this
    assert transposed_norm.RULE(make(in_order)) == ()
    flat = softmax([8192, 1], [512, 8192])
    assert transposed_norm.RULE(make([copied(rows, across), flat, rest])) == ()
