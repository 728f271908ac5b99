from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

import steplab
from steplab.core.errors import Unsupported, UserError
from steplab.meter.reading import TensorBoardSink, write_to_sinks
from tests.meter.fakes import FakeClock, install_clock, run_steps, tiny_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_clock(monkeypatch)


def test_jsonl_is_appended_by_two_meters(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    for _ in range(2):
        meter = steplab.Meter(
            tiny_model(), peak_tflops=1e-4, dtype="fp32", inspect_step=None, jsonl=path
        )
        for _ in range(2):
            run_steps(meter, clock, (0, 10))
            assert meter.log() == meter.line()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 1, 2]
    assert all(record["train/mfu"] == pytest.approx(0.3072) for record in records)
    assert records[0]["formula"].startswith("6 x 512 matmul parameters")
    assert records[0]["peak_source"] == "given by the user" and records[0]["dtype"] == "fp32"


def test_jsonl_carries_the_warning_once(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    meter = steplab.Meter(
        tiny_model(), peak_tflops=1979, dtype="bf16", inspect_step=None, jsonl=path
    )
    for _ in range(2):
        run_steps(meter, clock, (0, 10))
        meter.log()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert "sparse" in first["notes"][0] and "notes" not in second


def test_disk_that_fills_up_ends_no_training(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    meter = steplab.Meter(tiny_model(), inspect_step=None, jsonl=path)
    path.unlink()
    path.mkdir()
    with meter.step(tokens=1):
        pass
    assert f"warning: {path} was not written: Is a directory" in meter.log()


def test_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("jsonl", "tensorboard"):
        with pytest.raises(UserError, match="Cannot write"):
            steplab.Meter(tiny_model(), **{name: tmp_path / "file" / "below"})


def test_tensorboard_reads_the_scalars_back(clock: FakeClock, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    meter = steplab.Meter(tiny_model(), inspect_step=None, tensorboard=tmp_path)
    run_steps(meter, clock, (0, 10))
    meter.log()
    run_steps(meter, clock, (0, 20))
    meter.log()
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    scalars = reader.Scalars("train/step_time_ms")
    assert [(event.step, event.value) for event in scalars] == [
        (1, pytest.approx(10)),
        (2, pytest.approx(20)),
    ]
    assert "train/toks_per_sec" in reader.Tags()["scalars"]


def test_missing_tensorboard_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(Unsupported, match="pip install tensorboard"):
        steplab.Meter(tiny_model(), tensorboard=tmp_path)


def test_half_a_record_is_taken_back(tmp_path: Path) -> None:
    """A full disk cuts a record off: it is a warning, and what follows can be read."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    size = next(tmp_path.iterdir()).stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limit[1]))
    try:
        warnings = write_to_sinks([sink], 1, {"loss": 1.0}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(warnings) == 1 and "No space left" in warnings[0]
    assert write_to_sinks([sink], 2, {"loss": 2.0}, {}) == []
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(2, 2.0)]
