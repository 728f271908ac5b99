"""Start the ranks of one job as torchrun does: `python -m ...launch FOLDER`.

A process of its own, so that the log lines of elastic, gloo and NCCL go to a file, and so that
one signal to its process group ends the launcher and all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from steplab.bench.collectives.job import FAILURE_FILE, JOB_FILE, Job
from steplab.bench.collectives.rank import measure_job
from steplab.core.codec import decode

# Ranks need milliseconds to die of SIGTERM; one that waits inside a driver may need SIGKILL.
SHUTDOWN_S = 5
# What such an end usually means.
HINTS = {
    int(signal.SIGKILL): ", which the system sends when memory runs out",
    int(signal.SIGABRT): ", as a rank does whose peer is gone",
}


def launch(folder: Path) -> int:
    """Run the job in `folder` and return the exit code; a failed rank leaves its reason there."""
    job: Job = decode(Job, json.loads((folder / JOB_FILE).read_text()), JOB_FILE)
    # As a variable, because LaunchConfig has the field from torch 2.12 on only.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.world,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: the store takes a free one
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, measure_job)(str(folder))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        (folder / FAILURE_FILE).write_text(f"rank {rank} {_summary(failure)}")
        return 1
    return 0


def _summary(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"ended by {failure.signal_name()}{HINTS.get(-failure.exitcode, '')}"
    message = failure.error_file_data["message"]  # a dict where a rank left a Python exception
    if not isinstance(message, dict):
        return f"ended with exit code {failure.exitcode}"
    return f"stopped with {' '.join(message['message'].split())[:300]}"


def _end_with_parent(folder: Path) -> None:
    """Clean up and end the group when the other end of stdin closes: the parent is gone."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(SHUTDOWN_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    job_folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(job_folder,), daemon=True).start()
    sys.exit(launch(job_folder))
