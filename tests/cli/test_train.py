from pathlib import Path

import pytest
import torch

from steplab.cli.main import main
from steplab.cli.train import _ranks
from steplab.store import Store

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FIRST_SMALL = """--dataset-path time300b_selected --steps-per-epoch 80 --epochs 1 --batch-size 4
--seq-max-len 4096 --seq-stride 4096 --hidden-size 384 --n-decoder-layers 12 --num-experts 8
--num-expert-layers 1 --hidden-size 384 --d-ff 1536 --d-expert 192 --k 2 --n-head 12 --log-every 10
--checkpoint-every 0 --log-perf-metrics --mfu-peak-tflops 1671""".split()
FLAGSHIP = """--dataset-path time300b_selected --steps-per-epoch 80 --epochs 1 --batch-size 16
--seq-max-len 4096 --seq-stride 4096 --num-expert-layers 1 --hidden-size 768 --n-head 12
--n-decoder-layers 12 --num-experts 8 --k 2 --num-expert-layers 1 --d-ff 3072 --d-expert 3072
--log-every 10 --checkpoint-every 0 --log-perf-metrics --mfu-peak-tflops 1979""".split()
TINY = """--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8
--seq-max-len 40 --horizons 1,8 --batch-size 2 --steps-per-epoch 4 --log-every 2
--validation-batches 1""".split()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (FIRST_SMALL, "params total=35.50M (35,495,145) active=24.88M (24,878,313)"),
        (FLAGSHIP, "params total=538.13M (538,130,793) active=198.39M (198,392,169)"),
        ([*FLAGSHIP, "--compile"], "(538,130,793)"),
        ([*FLAGSHIP, "--no-amp"], "(538,130,793)"),
        ([*FLAGSHIP, "--profile"], "(538,130,793)"),
    ],
)
def test_command_lines_run_as_written(words, line, capsys):
    """The last flag wins: 0 steps builds, says the size and ends."""
    assert main(["train", *words, "--steps-per-epoch", "0"]) == 0
    assert line in capsys.readouterr().out


def test_train_says_where_its_checkpoint_is_and_resumes(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    assert main(["train", *TINY, *folder]) == 0
    out = capsys.readouterr().out
    assert "step=4 loss=" in out and f"checkpoint {tmp_path / 'c'}/step-00000004" in out
    assert "next: steplab train --resume" in out
    assert main(["train", "--resume", *folder, "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "resumed" in out and "step-00000008" in out


def test_perf_metrics_line(tmp_path, capsys):
    words = [*TINY, "--checkpoint-every", "0", "--log-perf-metrics", "--mfu-peak-tflops", "1979"]
    assert main(["train", *words, "--amp", "--checkpoint-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "tflops=" in out and "mfu=0.00%" in out and "hbm_util=unknown" in out
    assert "no checkpoint was written" in out
    assert [path.name for path in tmp_path.iterdir()] == ["steplab-runs"]


def test_two_trainings_are_compared_by_their_runs(tmp_path, capsys):
    """A training left no Run; it did not say what ran, and named a formula of ours the user's."""
    words = ["--checkpoint-every", "0", "--store", str(tmp_path / "runs")]
    assert main(["train", *TINY, *words, "--steps-per-epoch", "12", "--log-perf-metrics"]) == 0
    out = capsys.readouterr().out
    assert "no checkpoints and no metrics.jsonl" in out and "ran attention=" in out
    assert "flops 6 x" in out and "given by the user" not in out and "tflops=0.00 " not in out
    other = ["--recipe", "impl.attention=math"]
    assert main(["train", *TINY, *words, "--steps-per-epoch", "12", *other]) == 0
    (first, one), (second, _) = Store(tmp_path / "runs").all()
    assert one.ran.impls["attention"] == ("flash",) and one.work.tokens == 80
    assert len(one.clock.step) == 11 and one.clock.contended is not None
    assert one.notes[0] == "training: the last 11 of 11 timed steps"
    assert "val" in one.metrics and "hidden_size" in one.spec.overrides
    capsys.readouterr()
    assert main(["compare", first, second, "--store", str(tmp_path / "runs")]) == 0
    assert "impl.attention=math" in capsys.readouterr().out


@pytest.mark.slow
def test_a_compiled_training_says_what_was_compiled(tmp_path, capsys):
    assert main(["train", *TINY, "--checkpoint-every", "0", "--compile"]) == 0
    assert "compiled graphs=1 breaks=0 recompiles=0 first_step=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hiden-size", "4"], "Did you mean '--hidden-size'"),
        (["--size", "flagshp"], "Did you mean 'flagship'"),
        (["--k", "9"], "more than the"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--dataset-path", "nowhere"], "nowhere"),
        (["--resume"], "no checkpoint in checkpoints"),
        (["--resume", "nowhere"], "nowhere"),
        (["--compile", "--recipe", "compile=blocks"], "contradict"),
        (["--amp", "--recipe", "precision=fp16"], "contradict"),
        (["--normalize", "sereis"], "Did you mean 'series'"),
        (["--lr", "fast"], "--lr needs float"),
        (["--lr", "1e38"], "must lie between"),
        (["--lr", "nan"], "must lie between"),
        (["--huber-delta", "0"], "more than 0"),
        (["--rope-theta", "0"], "more than 0"),
        (["--checkpoint-dir", "/proc/x"], "Cannot write to"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--ranks", "two"], "--ranks"),
        (["--ranks", "2", "--recipe", "cuda_graph=step"], "recipe: cuda_graph replays a step"),
        (["--backend", "mpi"], "--backend"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_what_has_no_data_cannot_be_trained(capsys):
    own = Path(__file__).parents[2] / "examples" / "own_model.py"
    assert main(["train", f"{own}:recurrent", "--steps-per-epoch", "1"]) == 2
    assert "what can be trained: gpt, hydra, megalodon, tsmoe" in capsys.readouterr().err


def test_resuming_another_run_is_refused(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path)]
    assert main(["train", *TINY, *folder]) == 0
    for flag, value in (("--hidden-size", "32"), ("--lr", "0.5"), ("--seed", "1")):
        assert main(["train", "--resume", *folder, flag, value]) == 2
        assert "another run" in capsys.readouterr().err


def test_a_folder_with_another_runs_checkpoints_is_refused(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    assert main(["train", *TINY, *folder]) == 0
    assert main(["train", *TINY, *folder]) == 2
    said = capsys.readouterr().err
    assert "holds the checkpoints of another run, of tsmoe. Go on with it by --resume" in said
    assert main(["train", "megalodon", *folder]) == 2
    assert "another run, of tsmoe. Choose another --checkpoint-dir." in capsys.readouterr().err


def test_a_folder_can_be_resumed_by_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--checkpoint-dir", "a b"]) == 0
    assert "--checkpoint-dir 'a b'" in capsys.readouterr().out
    assert main(["train", "--resume", "a b", "--epochs", "2"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a b", "steplab-runs"]
    assert main(["train", "--resume", "a b"]) == 0
    assert "already at step 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--amp"], ["--compile"], ["--size", "flagship"], ["--recipe", "impl.experts=loop"]],
)
def test_what_makes_the_run_is_not_ignored_on_resume(words, tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path)]
    assert main(["train", *TINY, *folder]) == 0
    assert main(["train", "--resume", *folder, "--epochs", "2", *words]) == 2
    assert "another run" in capsys.readouterr().err


def test_two_runs_cannot_share_a_folder(tmp_path, capsys):
    from steplab.core.errors import UserError
    from steplab.train.checkpoint_files import lock_checkpoint_folder

    with (
        lock_checkpoint_folder(tmp_path),
        pytest.raises(UserError, match="Another run"),
        lock_checkpoint_folder(tmp_path),
    ):
        pass
    with lock_checkpoint_folder(tmp_path):
        assert main(["train", *TINY, "--checkpoint-dir", str(tmp_path)]) == 2
    assert "Another run is writing to" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "code"), [(["--recipe", "precision=fp8"], 3), (["--dataset-path", "gone.csv"], 2)]
)
@pytest.mark.usefixtures("in_tmp_path")
def test_a_training_that_is_refused_leaves_nothing(words, code, tmp_path):
    """On a CPU: neither a lock nor metrics of a training that never began."""
    assert main(["train", *TINY, "--device", "cpu", *words]) == code
    assert list(tmp_path.iterdir()) == []


def test_no_gpu_though_asked_for(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["train", "--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_resumed_step_keeps_its_micro_batches_on_any_number_of_ranks(tmp_path, capsys):
    folder = ["--checkpoint-dir", str(tmp_path / "c")]
    assert main(["train", *TINY, "--accumulate", "6", *folder]) == 0
    capsys.readouterr()
    for words, said in (
        (["--ranks", "4"], "Resume with --ranks 1 or 2 or 3 or 6."),
        (["--accumulate", "2"], "use --accumulate 6."),
        (["--ranks", "2", "--accumulate", "6"], "use --accumulate 3."),
        (["--ranks", "3", "--batch-size", "4"], "--batch-size 4 differs"),
    ):
        assert main(["train", "--resume", *folder, *words]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "words", [("--max-restarts", "-1"), ("--hang-timeout", "nan"), ("--hang-timeout", "0")]
)
def test_ranks_are_neither_restarted_nor_awaited_without_end(words, capsys):
    assert main(["train", "--ranks", "2", *words]) == 2
    said = capsys.readouterr().err
    assert " ".join(words[:1]) in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_that_torchrun_cannot_restart(capsys, monkeypatch, rank):
    monkeypatch.setattr("steplab.train.watch.run_as_rank", lambda *about: 0)
    torchrun = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    torchrun |= {"TORCHELASTIC_MAX_RESTARTS": 3, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # so that none is left behind
    assert main(["train"]) == 0
    said = capsys.readouterr().err
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said) == (rank == 0)


def test_ranks_that_differ_from_the_launchers_are_refused(capsys, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("steplab.cli.train._run_rank", lambda args: _ranks(args))
    assert main(["train", "--ranks", "2"]) == 2
    assert "contradicts the launcher, which has started 3" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--ranks", "2"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 has said so
