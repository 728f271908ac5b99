import json

from steplab.train.log import StepReport, TrainingLog

METER = {
    "train/toks_per_sec": 134_339.4,
    "train/step_time_ms": 487.84,
    "train/data_stall_pct": 0.5,
    "train/data_wait_ms": 2.44,
    "train/phases_ms": 483.4,
    "train/phase_ms/forward": 650.0,
    "train/phase_ms/backward": 835.4,
    "train/tflops": 190.3,
    "train/mfu": 0.1923,
    "train/kernel_launches_per_step": 1714,
}
REPORT = StepReport(
    80, 0.2335, {"pred": 0.2135, "aux": 1.0024}, 8e-6, METER,
    {"sm_util_pct": 100.0, "mem_ctrl_util_pct": 76.0},
)  # fmt: skip


def test_lines():
    assert REPORT.line(perf=False) == (
        "step=80 loss=0.2335 pred=0.2135 aux=1.0024 lr=8.00e-06 toks/s=134,339"
    )
    assert REPORT.line(perf=True).endswith(
        "toks/s=134,339 tflops=190.30 mfu=19.23% step_ms=487.84 sm_util=100.0% hbm_util=unknown "
        "mem_ctrl_util=76.0% launches=1,714"
    )
    # The parts add up, whatever the medians of the phases over all steps are.
    assert REPORT.timing() == (
        "timing data=2.44ms model=483.40ms other=2.00ms step=487.84ms data_of_all_steps=0.5%"
    )


def test_metrics_have_their_names():
    metrics = REPORT.metrics()
    names = "toks_per_sec step_time_ms tflops mfu sm_util_pct mem_ctrl_util_pct loss pred aux lr"
    for name in [*names.split(), "kernel_launches_per_step"]:
        assert f"train/{name}" in metrics
    assert "train/hbm_util_pct" not in metrics


def test_a_log_appends_and_says(tmp_path):
    said = []
    for _ in range(2):
        log = TrainingLog(said.append, tmp_path, perf=False)
        log.open()
        log.report(REPORT)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[0])["train/loss"] == 0.2335
    assert len(said) == 4 and said[1].startswith("timing")
