import os
import subprocess
import sys

import pytest

from steplab.core.errors import UserError
from steplab.parallel import environment

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    def launch(**changes):
        for name, value in (TORCHRUN | changes).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return launch


def test_a_process_by_itself_is_rank_0_of_1(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not environment.is_launched() and environment.is_first()
    assert (environment.launched_rank(), environment.launched_size()) == (0, 1)


def test_what_torchrun_says(launched):
    launched()
    assert environment.is_launched() and not environment.is_first()
    assert (environment.launched_rank(), environment.launched_size()) == (3, 4)
    assert environment.local_rank() == 1 and not environment.is_one_machine()
    assert environment.master_address() == ("node7", 29500)
    assert environment.restarts() == 0


def test_without_a_local_rank_the_rank_decides_the_gpu(launched):
    launched(LOCAL_RANK=None)
    assert environment.local_rank() == 3


@pytest.mark.parametrize("rank", ["first", "-1", "", "4"])
def test_a_rank_whose_number_cannot_be_speaks(launched, rank):
    launched(RANK=rank)
    assert environment.is_first()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "first"}, "RANK is 'first', not a number"),
        ({"RANK": "4"}, "ranks count from 0"),
        ({"MASTER_ADDR": None}, "Start with torchrun"),
        ({"MASTER_PORT": None}, "MASTER_PORT is '', not a number"),
    ],
)
def test_what_a_launcher_forgot_is_said(launched, changes, said):
    launched(**changes)
    with pytest.raises(UserError) as error:
        environment.launched_size()
        environment.master_address()
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "fail"),
    [
        ({}, True),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": None}, False),  # no torchrun
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),  # as the cure makes it
        ({"LOCAL_WORLD_SIZE": "4"}, False),  # one machine
    ],
)
def test_whether_torchrun_can_restart(launched, changes, fail):
    torchrun = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launched(**torchrun | changes)
    assert environment.restarts_would_fail() == fail


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "0", environment.LAUNCHER: "0"}, 1),  # died before
        ({"TORCHELASTIC_RESTART_COUNT": "0", environment.LAUNCHER: str(os.getpid())}, 7),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 7),
        ({environment.LAUNCHER: "0"}, 7),  # a script may start ranks and go
    ],
)
def test_a_rank_ends_with_its_launcher(variables, code):
    program = (
        "import os, time; from steplab.parallel import environment; environment.LOOK_S = 0.01; "
        "environment.end_with_launcher(); time.sleep(0.3); os._exit(7)"
    )
    inherited = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    found = subprocess.run([sys.executable, "-c", program], env=inherited | variables, timeout=60)
    assert found.returncode == code
