"""How ranks are started, started again, and how their end is told."""

import signal
from types import SimpleNamespace

import pytest

from steplab.train import launch
from steplab.train.launch import FINAL_CODES, _exit_code, _variables


def ended(*codes):
    """What torch's launcher returns for ranks that failed in this order."""
    return SimpleNamespace(failures={rank: SimpleNamespace(exitcode=code) for rank, code in codes})


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ([], 0, ""),
        ([(1, -9), (0, 1)], 137, "rank 1 of 2 on "),
        ([(0, 1), (1, 3)], 3, ""),  # rank 1 has told of its own failure
        ([(1, 1), (0, 1)], 1, ""),
        ([(0, 1), (1, -9)], 1, ""),  # rank 1 did not end when torch asked it to
        ([(1, 143), (0, -15)], 143, ""),
    ],
)
def test_the_code_of_a_group(codes, code, said, capsys):
    assert _exit_code(ended(*codes), 2) == code
    error = capsys.readouterr().err
    assert error.startswith(f"steplab: {said}") if said else error == ""


@pytest.mark.parametrize(
    ("codes", "attempts"),
    [
        ([0], 1),
        ([137, 1, 0], 3),
        ([3, 3, 3, 3], 3),
        ([2, 0], 1),
        ([4, 0], 1),
        ([128 + signal.SIGTERM, 0], 1),
    ],
)
def test_ranks_are_started_again_where_that_can_help(codes, attempts, monkeypatch, capsys):
    left, seen = list(codes), []

    def run(words, ranks, attempt):
        seen.append(attempt)
        return left.pop(0)

    monkeypatch.setattr(launch, "_run_group", run)
    assert launch.launch(["train"], 2, 2) == codes[attempts - 1]
    assert seen == list(range(attempts))
    assert capsys.readouterr().err.count("restart") == attempts - 1
    assert (codes[0] in FINAL_CODES) == (attempts == 1 and codes[0] != 0)


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert _variables(1, 3, 29500, 0)["OMP_NUM_THREADS"] == "2"
    assert _variables(1, 16, 29500, 0)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _variables(1, 3, 29500, 0)["OMP_NUM_THREADS"] == "5"
