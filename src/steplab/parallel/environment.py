"""What a launcher tells a process about its group, in environment variables. No torch.

torchrun sets all of these; scripts for SLURM and other schedulers set the first five.
"""

from __future__ import annotations

import os
import threading
from time import sleep

from steplab.core.errors import UserError

LAUNCHER = "STEPLAB_LAUNCHER"  # process id of the launcher, where that is steplab's own
LOOK_S = 0.5  # between two looks at the launcher


def is_launched() -> bool:
    """Whether torchrun, or anybody who sets RANK and WORLD_SIZE, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process prints and writes: it is rank 0, or was started by itself.

    A rank whose number cannot be is asked to do nothing but say so, and says it.
    """
    if not is_launched():
        return True
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return not (rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size))


def launched_rank() -> int:
    """Return this process's rank; 0 for a process that was started by itself."""
    return _whole("RANK") if is_launched() else 0


def launched_size() -> int:
    """Return how many ranks there are; 1 for a process that was started by itself."""
    if not is_launched():
        return 1
    rank, size = _whole("RANK"), _whole("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {size}; ranks count from 0.")
    return size


def local_rank() -> int:
    """Return this rank's number on its machine, which decides its GPU."""
    return _whole("LOCAL_RANK") if "LOCAL_RANK" in os.environ else _whole("RANK")


def master_address() -> tuple[str, int]:
    """Return host and port of the store at which all ranks meet."""
    if "MASTER_ADDR" not in os.environ:
        raise UserError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR, the host at which ranks meet.",
            "Start with torchrun, or set it to the host of rank 0, and MASTER_PORT to a free port.",
        )
    return os.environ["MASTER_ADDR"], _whole("MASTER_PORT")


def is_launcher_the_host() -> bool:
    """Whether the launcher holds the store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_one_machine() -> bool:
    """Whether the launcher has started all ranks on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def restarts() -> int:
    """Return how often the launcher has started the group again."""
    return _whole("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0


def restarts_would_fail() -> bool:
    """Whether torchrun means to restart ranks on several machines, and cannot.

    A new group would find the address of a dead rank in the store that all groups share.
    """
    wanted = _whole("TORCHELASTIC_MAX_RESTARTS") if "TORCHELASTIC_MAX_RESTARTS" in os.environ else 0
    return wanted > 0 and is_launcher_the_host() and not is_one_machine()


def end_with_launcher() -> None:
    """End this process soon after its launcher has died, whatever it is doing or waiting for.

    Its user will start another, and two would write to one folder. torchrun and steplab's launcher
    stay until their ranks have ended; a script may start ranks and go, so its end means nothing.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return
    # The parent may have died already, and somebody else may be the parent now.
    launcher = _whole(LAUNCHER) if LAUNCHER in os.environ else os.getppid()

    def look() -> None:
        while os.getppid() == launcher:
            sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=look, name="steplab-launcher", daemon=True).start()


def _whole(name: str) -> int:
    word = os.environ.get(name, "")
    if not word.isdecimal():
        raise UserError(f"The environment variable {name} is {word!r}, not a number.")
    return int(word)
