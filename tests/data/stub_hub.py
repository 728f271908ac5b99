"""A stand-in for huggingface_hub that serves a folder."""

import fnmatch
import shutil
import types
from pathlib import Path


class Offline(Exception):
    """What a client raises without a network."""


def fake_hub(root: Path, fail_after: int | None = None) -> types.SimpleNamespace:
    """Make a module with the two names that are used; `copied` counts the files it sent.

    After `fail_after` files the connection breaks.
    """
    hub = types.SimpleNamespace(copied=[])

    def entries():
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.is_dir():
                yield types.SimpleNamespace(path=name)
            else:
                yield types.SimpleNamespace(path=name, size=path.stat().st_size)

    class HfApi:
        def list_repo_tree(self, repo_id, *, recursive, repo_type):
            assert (repo_id, recursive, repo_type) == ("Maple728/Time-300B", True, "dataset")
            return entries()

    def snapshot_download(repo_id, *, repo_type, local_dir, allow_patterns):
        assert (repo_id, repo_type) == ("Maple728/Time-300B", "dataset")
        for entry in entries():
            if not any(fnmatch.fnmatch(entry.path, pattern) for pattern in allow_patterns):
                continue
            target = Path(local_dir, entry.path)
            if not hasattr(entry, "size") or target.is_file():
                continue
            if fail_after is not None and len(hub.copied) >= fail_after:
                raise Offline("Connection reset by peer\n(request id 7)")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / entry.path, target)
            hub.copied.append(entry.path)
        return local_dir

    hub.HfApi, hub.snapshot_download = HfApi, snapshot_download
    return hub
