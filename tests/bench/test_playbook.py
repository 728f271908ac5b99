"""The playbook: its folders, its file names, its summary, and the EMA path that ran."""

import csv
import json

import pytest
import torch

from steplab.bench import playbook_cell as cell_module
from steplab.bench.playbook import COLUMNS, Playbook, playbook_cells
from steplab.cli.main import main
from steplab.core.errors import MeasurementError
from steplab.profiling.plan import ProfilePlan

SMALL = "--preset tiny --layers 1 --modes 2 --device cpu"


def lines(folder):
    with (folder / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def labels(path):
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_folders_and_file_names(tmp_path, capsys):
    out = tmp_path / "profile"
    words = f"profile megalodon --seq-lens 40 --schedule 0 1 1 2 --ema fft --out {out} {SMALL}"
    assert main(words.split()) == 0
    folder = out / "fp32" / "float32_auto_L40"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("ema_fft.json", "ema_seq.json", "reports", "speed_step2.json", "speed_step4.json")
    ]
    assert sorted(path.name for path in (folder / "reports").iterdir()) == [
        *("key_averages_cuda_time.txt", "key_averages_mem.txt"),
        *("ms_per_step.txt", "peak_mem_gb.txt"),
    ]
    assert {"FORWARD", "BACKWARD", "OPTIMIZER"} <= labels(folder / "speed_step2.json")
    assert "EMA_FFT_L40" in labels(folder / "ema_fft.json")
    assert "EMA_SEQ_L40" in labels(folder / "ema_seq.json")
    table = (folder / "reports" / "key_averages_cuda_time.txt").read_text()
    forward = next(line for line in table.splitlines() if line.split()[:1] == ["FORWARD"])
    assert forward.split()[-1] == "2"  # both cycles are in the table
    (line,) = lines(out)
    assert (line["dtype"], line["ema"], line["status"]) == ("float32", "fft", "ok")
    assert float(line["ms_per_step"]) == pytest.approx(
        float((folder / "reports" / "ms_per_step.txt").read_text()), rel=1e-3
    )
    assert "1 line more" in capsys.readouterr().out


def test_lines_are_appended_and_inference_has_its_own_folder(tmp_path):
    out = tmp_path / "profile"
    words = f"profile megalodon --seq-lens 8 --schedule 0 0 1 1 --forward-only --out {out} {SMALL}"
    words += " --ema sequential --train-use-cache"
    assert main(words.split()) == 0 == main(words.split())
    first, second = lines(out)
    assert first["mode"] == second["mode"] == "forward" and first["use_cache"] == "True"
    assert tuple(first) == COLUMNS and first["backward_ms"] == ""
    folder = out / "forward" / "float32_auto_L8"
    assert "FORWARD_INFER" in labels(folder / "forward_trace_step1.json")
    assert (folder / "reports" / "latency_ms.txt").exists()


def test_a_failed_cell_is_a_line(tmp_path, monkeypatch):
    def fail(*_):
        raise MeasurementError("no luck")

    monkeypatch.setattr(cell_module, "assemble", fail)
    out = tmp_path / "profile"
    assert main(f"profile megalodon --seq-lens 8 16 --out {out} {SMALL}".split()) == 4
    assert [line["status"] for line in lines(out)] == ["no luck", "no luck"]


def test_figures_of_a_step_stay_when_tracing_ema_alone_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cell_module, "trace_ema_alone", fail)
    out = tmp_path / "profile"
    words = f"profile megalodon --seq-lens 8 --schedule 0 0 1 1 --out {out} {SMALL}"
    assert main(words.split()) == 4
    (line,) = lines(out)
    assert line["status"] == "oom" and float(line["ms_per_step"]) > 0
    assert (out / "fp32" / "float32_auto_L8" / "reports" / "ms_per_step.txt").exists()


def test_an_ema_path_other_than_the_one_asked_for_is_an_error():
    class Module:
        op, ran = "ema", "fft"

    class Model:
        def modules(self):
            return [Module()]

    assert cell_module._ema_path(Model(), "auto") == "fft"
    with pytest.raises(MeasurementError, match="scan was asked for, but fft ran"):
        cell_module._ema_path(Model(), "scan")


def test_a_sweep_has_both_reductions(tmp_path):
    book = Playbook([512, 2048], ProfilePlan(), tmp_path, "bf16", bf16_sweep=True)
    names = [cell.folder.relative_to(tmp_path).as_posix() for cell in playbook_cells(book)]
    assert names == [
        f"bf16/bfloat16_{reduction}_L{length}"
        for length in (512, 2048)
        for reduction in ("on", "off")
    ]
    assert playbook_cells(book)[0].spec.size == "playbook"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dtype fp16", "Use fp32 or bf16"),
        ("--bf16-sweep", "Add --dtype bf16"),
        ("--bf16-sweep --dtype bf16 --device cpu", "cuBLAS"),
        ("--seq-lens 0", "at least 1"),
        ("--seq-lens 8 --ema fftt", "There is no --ema"),
        ("--seq-lens 8 --recipe compile=blocks", "does not take --recipe"),
        ("--seq-lens 8 --context 9", "Leave --context out"),
        ("--seq-lens 8 --preset huge", "no size 'huge'"),
    ],
)
def test_bad_values_are_refused(words, message, capsys):
    assert main(f"profile megalodon {words}".split()) in (2, 3)
    assert message in capsys.readouterr().err


def test_a_summary_with_other_columns_is_left_alone(tmp_path, capsys):
    (tmp_path / "summary.csv").write_text("mine\n1\n")
    assert main(f"profile megalodon --seq-lens 8 --out {tmp_path} {SMALL}".split()) == 2
    assert "other columns" in capsys.readouterr().err
