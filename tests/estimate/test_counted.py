"""Steps counted on tensors without data, against ranks and against a card."""

from dataclasses import replace

import pytest

from steplab.core import RunSpec
from steplab.core.errors import Unsupported
from steplab.estimate.cluster import Cluster
from steplab.estimate.counted import count
from steplab.estimate.kernels import find_named, shipped_times
from steplab.estimate.ledger import Kernel
from steplab.estimate.predict import CONTEXT_BYTES, StepCounts, largest_batch, predict
from steplab.hardware.links import find_link
from steplab.kernels.triton_runtime import HAS_TRITON
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import requested_workload
from tests.estimate.specs import H200, spec_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "context", "measured_gib"),
    # benchmarks/gpt_h200.csv, batch 4; compiled within 6 %
    [("precision=fp32", 256, 2.5073), ("precision=fp32", 512, 3.4334)],
)
def test_peak_memory_is_that_of_a_card(recipe, context, measured_gib):
    counted = count(spec_of(recipe, size="small", batch=4, context=context), H200)
    peak = counted.peak_bytes + shipped_times().workspace_bytes
    assert peak / 2**30 == pytest.approx(measured_gib, rel=0.01)
    assert sum(counted.kinds.values()) == counted.peak_bytes


def test_autocast_multiplies_in_16_bits_and_keeps_the_loss_wide():
    counted = count(spec_of("precision=bf16", layers=2), H200)
    kinds = {entry.call.kind for entry in counted.entries if isinstance(entry, Kernel)}
    assert "product bf16" in kinds and "product fp32" not in kinds
    assert "_log_softmax fp32" in kinds


def test_checkpointing_keeps_less_and_computes_more():
    plain, repeated = (
        count(spec_of(recipe, size="small", layers=4, batch=8), H200)
        for recipe in ("precision=bf16", "precision=bf16,checkpointing=blocks")
    )
    assert repeated.kinds["activations"] < plain.kinds["activations"]
    assert len(repeated.entries) > len(plain.entries)


def test_a_sharded_rank_holds_a_part_of_weights_and_state():
    whole, part = (
        count(spec_of(recipe, ranks, size="small", layers=2), H200)
        for recipe, ranks in (("optimizer=fused", 1), ("optimizer=fused,parallel=fsdp", 8))
    )
    assert part.own_parameters < 0.13 * whole.parameters
    assert part.held_bytes < 0.2 * whole.held_bytes


def test_an_update_whose_rates_are_on_the_device_is_counted():
    counted = count(spec_of("optimizer=one-pass,precision=bf16-weights", layers=1), H200)
    kernels = [entry for entry in counted.entries if isinstance(entry, Kernel)]
    assert "optimizer" in {kernel.phase for kernel in kernels}
    if HAS_TRITON:
        updates = [k.call for k in kernels if k.call.kind.endswith("adamw_kernel")]
        # Of each weight 2 bytes, 4 of its master, 2 of its gradient and 8 of its moments.
        moved = sum(call.bytes for call in updates)
        assert moved == pytest.approx(16 * counted.parameters, rel=1e-4)
        assert sum(call.kind == "triton small_adamw_kernel" for call in updates) == 2  # groups


def test_an_op_that_needs_values_is_named_with_its_line(tmp_path):
    file = tmp_path / "my_model.py"
    file.write_text(
        "import torch, steplab\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            yield torch.randn(size, 4)\n"
        "    def loss(model, x):\n"
        "        y = model(x)\n"
        "        return y.sum() * y.max().item()\n"
        "    return steplab.UserModel(torch.nn.Linear(4, 4), batches, loss)\n"
    )
    entry = requested_workload(f"{file}:make")
    spec = RunSpec(entry.name, entry.resolve("", {}), device="cuda", source=entry.source)
    with pytest.raises(Unsupported, match=r"_local_scalar_dense.*my_model\.py:8"):
        count(spec, H200)


def test_a_prediction_has_an_interval_and_more_ranks_send_more():
    cluster = Cluster(find_link("nvlink4"), find_link("ndr"))
    one, many = (
        predict(StepCounts(spec_of(recipe, ranks, layers=2), H200, shipped_times()), cluster)
        for recipe, ranks in (("plain", 1), ("parallel=fsdp", 64))
    )
    assert one.low_ms < one.step_ms < one.high_ms
    assert one.sent_bytes == 0 < many.sent_bytes
    assert many.tokens == 64 * one.tokens


WIDE = """
import torch, steplab
def make():
    def batches(size):
        while True:
            yield torch.randn(size, 8192)
    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(3)])
    return steplab.UserModel(model, batches, lambda m, x: m(x).square().mean())
"""


def test_weights_that_are_gathered_as_one_have_nothing_to_hide_behind(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    entry = requested_workload(f"{tmp_path / 'wide.py'}:make")
    plain = RunSpec(entry.name, {}, batch=8192, device="cuda", ranks=8, source=entry.source)
    cluster = Cluster(find_link("nvlink4"), find_link("ndr"))
    share = {}
    for scheme in ("fsdp", "naive", "bucket"):
        spec = replace(plain, recipe=parse_recipe(f"parallel={scheme}"))
        found = predict(StepCounts(spec, H200, shipped_times()), cluster)
        share[scheme] = found.exposed_ms / sum(one.ms for one in found.sent)
    # One group of blocks: the first product waits for the all-gather, the update for the
    # reduce-scatter. Of three buckets the last has only the copies of the others beside it.
    assert 0.9 < share["fsdp"] <= 1 and 0.9 < share["naive"] <= 1
    assert 0.1 < share["bucket"] < 1 / 3


def test_a_cpu_has_no_launches_to_hide_communication_behind():
    cluster = Cluster(find_link("pcie4"), find_link("ndr"))
    share = {}
    for device in ("cuda", "cpu"):
        spec = spec_of("parallel=fsdp", 2, layers=2, device=device)
        found = predict(StepCounts(spec, H200, shipped_times()), cluster)
        share[device] = found.exposed_ms / found.communication_ms
    assert share["cuda"] < 0.1 and share["cpu"] > 0.5  # on the card it waits for its host anyway


def test_the_largest_batch_fits_and_is_not_a_guess():
    spec = spec_of("precision=bf16", size="small", layers=2, context=1024)
    card = find_named("a10")
    counts = StepCounts(spec, card, shipped_times())
    most = largest_batch(counts)
    room = card.board.memory_bytes - CONTEXT_BYTES
    assert counts.reserved(most) <= room < counts.reserved(most + 1)


def test_scaling_to_another_card_follows_its_peak_and_bandwidth():
    times = shipped_times()
    entries = count(spec_of("precision=bf16", layers=2), H200).entries
    slower = find_named("a100-80gb-sxm")
    for entry in entries:
        if isinstance(entry, Kernel):
            assert times.time(entry.call, slower).us > times.time(entry.call, H200).us


def test_recurrent_layers_are_not_guessed_at():
    entry = requested_workload("examples/own_model.py:recurrent")
    spec = RunSpec(entry.name, {}, batch=2, device="cuda", source=entry.source)
    with pytest.raises(Unsupported, match=r"nn\.GRU cannot be estimated"):
        count(spec, H200)


def test_fp8_is_not_guessed_at():
    with pytest.raises(Unsupported, match="what its casts cost is not modeled"):
        count(spec_of("precision=fp8"), H200)
