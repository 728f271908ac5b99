from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steplab
from steplab.core.codec import encode
from steplab.core.errors import Unsupported, UserError
from steplab.meter import reading
from steplab.meter.meter import count_flops_per_token
from steplab.meter.reading import JsonlSink
from steplab.probes.disturbances import note_event
from tests.meter.fakes import FakeClock, install_clock, run_steps, tiny_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_clock(monkeypatch)


# Times, from a clock that is known.


def test_step_host_and_stall_are_exact(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    run_steps(meter, clock, (50, 8), (2, 8), (6, 14))
    summary = meter.summary()
    assert summary.step.values == pytest.approx((8, 10, 20))
    assert summary.host.values == pytest.approx((8, 8, 14))
    assert summary.data_wait.values == pytest.approx((0, 2, 6))
    assert summary.window_ms == pytest.approx(38)
    assert summary.agreement == pytest.approx(1)
    assert summary.source == "perf_counter"
    # Nothing ended before the first step, so the 50 ms before it belong to no period.
    assert "0" in summary.step.marks and "0" in summary.data_wait.marks
    metrics = meter.metrics()
    assert metrics["train/step_time_ms"] == pytest.approx(10)
    assert metrics["train/host_time_ms"] == pytest.approx(8)
    assert metrics["train/data_stall_pct"] == pytest.approx(8 / 38 * 100)
    assert metrics["train/toks_per_sec"] == pytest.approx(100 / 10e-3)


def test_stall_of_every_fourth_step_is_not_hidden(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    run_steps(meter, clock, (0, 10))
    meter.line()
    run_steps(meter, clock, *[(0, 10), (0, 10), (0, 10), (40, 10)] * 2)
    assert meter.metrics()["train/data_stall_pct"] == pytest.approx(50)


def test_rate_follows_the_tokens_of_each_step(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    for tokens in (100, 200, 300):
        run_steps(meter, clock, (0, tokens / 10), tokens=tokens)
    assert meter.metrics()["train/toks_per_sec"] == pytest.approx(10_000)
    assert meter.summary().tokens.values == (100, 200, 300)


def test_phases_add_up_within_a_step(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    for updates in (False, True):
        with meter.step(tokens=10):
            for _ in range(2):
                with meter.phase("forward"):
                    clock.advance(3)
                with meter.phase("backward"):
                    clock.advance(5)
            if updates:
                with meter.phase("optimizer"):
                    clock.advance(4)
    summary = meter.summary()
    assert summary.phases["forward"].values == pytest.approx((6, 6))
    assert summary.phases["backward"].values == pytest.approx((10, 10))
    assert summary.phases["optimizer"].values == pytest.approx((0, 4))
    assert summary.host_phases["forward"].values == pytest.approx((6, 6))
    # A line tells what a phase takes where it happens.
    assert meter.metrics()["train/phase_ms/optimizer"] == pytest.approx(4)


def test_the_times_of_a_reading_add_up(clock: FakeClock) -> None:
    """Medians of every phase over all steps were more than the median step."""
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    for forward, backward in ((90, 10), (10, 95), (80, 30)):
        with meter.step(tokens=10):
            with meter.phase("forward"):
                clock.advance(forward)
            with meter.phase("backward"):
                clock.advance(backward)
            clock.advance(1)
    found = meter.metrics()
    assert found["train/step_time_ms"] == pytest.approx(106)
    assert found["train/phases_ms"] == pytest.approx(105)


def test_a_phase_that_stops_being_entered_is_zero_afterwards(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    with meter.step(tokens=1), meter.phase("warm-up"):
        clock.advance(2)
    meter.line()
    run_steps(meter, clock, (0, 1), (0, 1))
    assert meter.summary().phases["warm-up"].values == pytest.approx((2, 0, 0))
    assert "train/phase_ms/warm-up" not in meter.metrics()


def test_window_reaches_from_one_telling_to_the_next(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    run_steps(meter, clock, (0, 10), (0, 10))
    first = meter.line()
    assert meter.metrics()["train/step_time_ms"] == pytest.approx(10)
    assert meter.line() == first
    run_steps(meter, clock, (0, 30))
    assert meter.metrics()["train/step_time_ms"] == pytest.approx(30)
    assert meter.line().startswith("step 3  30.00 ms")
    assert meter.summary().step.values == pytest.approx((10, 10, 30))


def test_due_counts_steps() -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    assert not meter.due(2)
    seen = []
    for _ in range(5):
        with meter.step(tokens=1):
            pass
        seen.append(meter.due(2))
    assert seen == [False, True, False, True, False]
    with pytest.raises(UserError):
        meter.due(0)


def test_writing_the_log_is_no_data_stall(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None, jsonl=tmp_path / "log.jsonl")
    run_steps(meter, clock, (0, 10))
    monkeypatch.setattr(JsonlSink, "write", lambda *args: clock.advance(7))
    meter.log()
    run_steps(meter, clock, (3, 10))
    assert meter.summary().data_wait.values == pytest.approx((0, 3))
    assert meter.summary().step.values == pytest.approx((10, 20))


# Failures and wrong use.


def test_exception_goes_on_and_the_step_is_not_counted(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    run_steps(meter, clock, (0, 10))
    error = RuntimeError("out of luck")
    with pytest.raises(RuntimeError) as caught, meter.step(tokens=1), meter.phase("forward"):
        clock.advance(500)
        raise error
    assert caught.value is error
    run_steps(meter, clock, (100, 12), (1, 13))
    summary = meter.summary()
    # The failed step's 500 ms and what came before the next one are in no period.
    assert summary.step.values == pytest.approx((10, 12, 14))
    assert set(summary.step.marks) == {"0", "1"}
    assert summary.phases == {}
    assert meter.line().startswith("step 3 ")


def test_a_phase_that_raises_inside_a_step_that_goes_on(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    with meter.step(tokens=1):
        with pytest.raises(ValueError), meter.phase("forward"):
            raise ValueError
        with meter.phase("forward"):
            clock.advance(2)
    assert meter.summary().phases["forward"].values == pytest.approx((2,))


def test_nested_steps_and_phases_outside_are_refused() -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    with pytest.raises(UserError, match="outside a step"), meter.phase("forward"):
        pass
    with pytest.raises(UserError, match="inside a step"), meter.step(1), meter.step(1):
        pass
    with meter.step(tokens=1):
        pass
    assert meter.due(1) and len(meter.summary().step) == 1


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "8", None, torch.tensor(8)])
def test_tokens_must_be_a_positive_int(tokens: Any) -> None:
    with pytest.raises(UserError, match="tokens must be"):
        steplab.Meter(tiny_model()).step(tokens=tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"peak_tflops": 0},
        {"peak_tflops": float("nan")},
        {"flops_per_token": -1},
        {"inspect_step": 0},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        steplab.Meter(tiny_model(), **settings)


def test_models_whose_device_cannot_be_timed() -> None:
    with pytest.raises(UserError, match="no parameters"):
        steplab.Meter(nn.ReLU()).line()
    with pytest.raises(Unsupported, match="meta"):
        steplab.Meter(nn.Linear(2, 2, device="meta")).line()


# Real training.


def train(meter: steplab.Meter | None, model: nn.Module, steps: int) -> list[float]:
    """Train on seeded tokens with two micro-batches a step; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    losses = []

    def one_step(meter: steplab.Meter | None, x_BD: Tensor) -> float:
        for half_BD in x_BD.to(device).chunk(2):
            loss = model(half_BD).square().mean()
            if meter is None:
                loss.backward()
            else:
                with meter.phase("backward"):
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for _ in range(steps):
        x_BD = torch.randn(8, 16, generator=generator)
        if meter is None:
            losses.append(one_step(None, x_BD))
            continue
        with meter.step(tokens=len(x_BD)):
            losses.append(one_step(meter, x_BD))
    return losses


def seeded_model(compiled: bool, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    return torch.compile(model, backend="eager") if compiled else model  # type: ignore[return-value]


@pytest.mark.parametrize("compiled", [False, True])
def test_watched_training_is_the_same_training(compiled: bool, tmp_path: Path) -> None:
    plain = train(None, seeded_model(compiled), 6)
    model = seeded_model(compiled)
    meter = steplab.Meter(model, jsonl=tmp_path / "log.jsonl")
    assert train(meter, model, 6) == plain
    assert meter.formula.startswith("6 x 320 matmul")
    metrics = meter.metrics()
    assert metrics["train/toks_per_sec"] > 0
    assert metrics["train/peak_mem_bytes"] > 2**20
    summary = meter.summary()
    assert len(summary.step) == len(summary.tokens) == 5
    backward = summary.phases["backward"].values
    assert all(0 < b < h for b, h in zip(backward, summary.host.values, strict=True))
    assert json.loads(json.dumps(encode(summary), allow_nan=False))["inspected_step"] == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.window_ms = 0.0


def test_memory_is_unknown_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "status_bytes", lambda key: None)
    assert "peak unknown" in steplab.Meter(tiny_model()).line()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_launches_are_counted_and_nothing_waits() -> None:
    model = nn.Linear(64, 64, device="cuda")
    x_BD = torch.randn(32, 64, device="cuda")
    meter = steplab.Meter(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            with meter.step(tokens=32), meter.phase("forward"):
                model(x_BD).sum()
            meter.line()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    summary = meter.summary()
    assert summary.kernel_launches is not None and summary.kernel_launches >= 2
    assert summary.inspected_step == 3 and len(summary.step) == 5 and summary.dtype == "fp32"
    assert all(p > 0 for p in summary.phases["forward"].values)
    assert summary.memory is not None and summary.memory.source == "cuda allocator"


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_head_counts_once_and_embedding_never(tied: bool) -> None:
    flops, formula = count_flops_per_token(Tied(tied))
    assert flops == 6 * (8 * 8 + 8 * 50)
    assert formula.startswith("6 x 464 matmul")


def test_formula_says_what_it_cannot_know() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    flops, formula = count_flops_per_token(model)
    assert flops == 6 * 16
    assert "48 weights of more than 2 dimensions not counted" in formula
    assert "16 frozen ones counted as trained" in formula
    assert count_flops_per_token(nn.LayerNorm(4))[0] is None
    assert "own modules" not in formula


def test_a_table_of_positions_may_not_be_a_factor() -> None:
    model = nn.Module()
    model.head, model.places = nn.Linear(8, 8), nn.Module()
    assert "own modules" not in count_flops_per_token(model)[1]

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64, 8))

    model.places = Places()
    flops, formula = count_flops_per_token(model)
    assert flops == 6 * (64 + 512) and "512 of them parameters of own modules" in formula


def test_a_much_slower_outlier_is_told_again(clock: FakeClock) -> None:
    meter, lines = steplab.Meter(tiny_model(), inspect_step=None, dtype="fp32"), []
    slow = {5: 20, 15: 30, 25: 400, 35: 500}
    for number in range(40):
        with meter.step(tokens=1):
            clock.advance(2 + slow.get(number, 0))
        if meter.due(10):
            lines.append(meter.line())
    assert ["outliers" in line for line in lines] == [True, False, True, False]


def test_an_outlier_is_told_once_for_each_cause(clock: FakeClock) -> None:
    meter, lines = steplab.Meter(tiny_model(), inspect_step=None, dtype="fp32"), []
    for number in range(40):
        clock.advance(200 if number == 27 else 0)  # before the step: the loader
        with meter.step(tokens=1):
            clock.advance(2)
            if number in (7, 17):
                note_event("captured the CUDA graph")
                clock.advance(100)
        if meter.due(10):
            lines.append(meter.line())
    told = "outliers: 1 of 10 steps took far longer than 2.000 ms"
    assert f"{told}: 102.0 ms (captured the CUDA graph)" in lines[0]
    assert "outliers" not in lines[1], "once for each cause"
    assert f"{told}: 202.0 ms (waited 200.0 ms for data)" in lines[2]
    marks = meter.summary().step.marks
    assert marks["7"] == marks["17"] == "slow, captured the CUDA graph"
    assert marks["27"] == "slow, waited 200.0 ms for data"
