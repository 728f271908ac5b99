"""Runs on disk: one folder each, written whole or not at all. No torch."""

from steplab.store.pack import pack_runs, unpack_runs
from steplab.store.store import DEFAULT_ROOT, Store, store_of
from steplab.store.sweep import Sweep, dated_id, machine_key, open_sweep

__all__ = [
    "DEFAULT_ROOT",
    "Store",
    "Sweep",
    "dated_id",
    "machine_key",
    "open_sweep",
    "pack_runs",
    "store_of",
    "unpack_runs",
]
