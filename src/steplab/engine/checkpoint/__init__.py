"""Checkpoints: complete or absent, checked before they are loaded, never unpickled.

Importing this package leaves torch out; saving and restoring bring it in.
"""

from steplab.engine.checkpoint.folder import find, newest
from steplab.engine.checkpoint.lock import only_writer
from steplab.engine.checkpoint.progress import Progress
from steplab.engine.checkpoint.restoring import load_weights, read_progress, restore
from steplab.engine.checkpoint.saving import save

__all__ = [
    "Progress",
    "find",
    "load_weights",
    "newest",
    "only_writer",
    "read_progress",
    "restore",
    "save",
]
