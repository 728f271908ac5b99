"""Processes that are forked from one that has imported everything, and workers among them.

A worker of its own imports torch and Dynamo for 2.5 s of CPU time, and the tests start hundreds.
Here only the start is replaced: the same program serves in the same pipes. `started_workers` in
conftest.py is for tests of the start itself.
"""

import gc
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import IO

from steplab.workers import program
from steplab.workers.client import import_path

IMPORTED = [
    "steplab.step.trial",
    "steplab.train.loop",
    "steplab.verify.candidate",
    "steplab.workloads.gpt.workload",
    "steplab.workloads.tsmoe.workload",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
]


def forkserver():
    """Return the context whose processes have imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class ForkedWorker:
    """Stands in for the Popen of a worker."""

    def __init__(self, log: IO[str]) -> None:
        context = forkserver()
        theirs_in, ours_in = context.Pipe(duplex=False)
        ours_out, theirs_out = context.Pipe(duplex=False)
        streams = (theirs_in, theirs_out, Connection(os.dup(log.fileno()), readable=False))
        surroundings = (os.getcwd(), {**os.environ, "PYTHONPATH": import_path()})
        self.process = context.Process(target=_serve, args=(streams, surroundings), daemon=True)
        self.process.start()
        for stream in streams:
            stream.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(ours.fileno()), mode)
            for ours, mode in ((ours_in, "wb"), (ours_out, "rb"))
        )
        ours_in.close()
        ours_out.close()
        os.read(self.stdout.fileno(), 1)  # until it leads a session, by which it is ended
        self.lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        with self.lock:  # the code can be read only once
            return self.process.exitcode

    def wait(self) -> int:
        with self.lock:
            self.process.join()
            return self.process.exitcode


def _serve(streams, surroundings) -> None:
    os.setsid()
    gc.freeze()
    folder, environment = surroundings
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)  # by lines, as Python does it
    multiprocessing.current_process()._config["daemon"] = False  # a DataLoader may start others
    os.write(1, b"\n")
    program.serve()
