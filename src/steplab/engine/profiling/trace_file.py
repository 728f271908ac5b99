"""A recorded trace as a compressed Chrome JSON file, which Perfetto opens as it is."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from torch.profiler import profile

from steplab.engine.profiling.averages import Averages
from steplab.store.atomic import disk_errors

# Of a trace of 700 kB, level 6 makes 49 kB in 4 ms, level 9 (the default) 44 kB in 18 ms.
LEVEL = 6
CHUNK = 2**20  # bytes copied at a time: traces of a large model do not fit in memory twice
KEPT_ROWS = 100


def write_trace(profiler: profile, path: Path) -> None:
    """Write the trace to `path`, which ends in .json.gz."""
    plain = path.with_suffix("")
    with disk_errors(path.parent):
        try:
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=LEVEL) as target:
                shutil.copyfileobj(source, target, CHUNK)
        finally:
            plain.unlink(missing_ok=True)


def write_averages(profiler: profile, path: Path, on_cuda: bool) -> None:
    """Write ranges and torch's table of operators, the most own device (or CPU) time first."""
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    text = Averages(profiler.events()).text(order, KEPT_ROWS)
    with disk_errors(path.parent):
        path.write_text(text, encoding="utf-8")
