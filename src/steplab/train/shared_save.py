"""A checkpoint that several ranks write together: each its slices, rank 0 the rest.

Rank 0 publishes it when the checksums of all files are there. A rank that cannot write makes all of
them fail with the same words, and nothing of the checkpoint is left.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from steplab.core.atomic import disk_errors, sync_folder
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.parallel.world import current_world, gather_texts, together
from steplab.train.checkpoint_files import (
    MODEL,
    OPTIMIZER,
    RNG_FILE,
    FileChecksum,
    Manifest,
    OptimizerRecord,
    open_draft,
    publish_draft,
)
from steplab.train.checkpoint_tensors import merge_records
from steplab.train.slices import Held, choose_writers, held_slices, own_slice
from steplab.train.tensor_files import write_tensors


class SharedSave:
    """One save; `run` is called by all ranks together."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        weights: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        rng: Mapping[str, Tensor],
        keep: int,
    ) -> None:
        self.world = current_world()
        self.folder, self.keep, self.rng = folder, keep, rng
        self.manifest = manifest  # without files, and with this rank's part of the optimizer
        self.tensors = {MODEL: weights, OPTIMIZER: moments}
        self.draft = folder
        # Per kind: (name, offset) of the slices that this rank writes.
        self.own: dict[str, set[tuple[str, tuple[int, ...]]]] = {}

    def run(self) -> Path:
        """Return the path of the checkpoint."""
        self.draft = Path(together(self._open)[0])
        try:
            self._share_out()
            written = [json.loads(text) for text in together(self._write)]
            files = {name: seal for each in written for name, seal in each.items()}
            seals = decode(Mapping[str, FileChecksum], files, "files")
            self.manifest = replace(self.manifest, files=seals)
            return Path(together(self._publish)[0])
        finally:
            if self.world.is_first:
                shutil.rmtree(self.draft, ignore_errors=True)

    def _open(self) -> str:
        if not self.world.is_first:
            return ""
        with disk_errors(self.folder, "--checkpoint-dir"):
            draft = open_draft(self.folder)
            for kind in self.tensors:
                (draft / kind).mkdir()
        return str(draft)

    def _share_out(self) -> None:
        """Tell the others what this rank holds; from all of that follows who writes what."""
        held = {kind: held_slices(tensors) for kind, tensors in self.tensors.items()}
        texts = gather_texts(json.dumps(encode([self.manifest.optimizer, held])))
        answers = [json.loads(text) for text in texts]
        records = [decode(OptimizerRecord, record, "optimizer") for record, _ in answers]
        self.manifest = replace(self.manifest, optimizer=merge_records(records))
        for kind in self.tensors:
            of_ranks = [decode(tuple[Held, ...], each[kind], "slices") for _, each in answers]
            self.own[kind] = choose_writers(of_ranks)[self.world.rank]

    def _write(self) -> str:
        """Write this rank's files and return their checksums."""
        if not self.draft.is_dir():
            raise UserError(
                f"{self.folder} is not the same folder on {socket.gethostname()} as for rank 0.",
                "Ranks on several machines need a --checkpoint-dir that they share.",
            )
        files = {}
        with disk_errors(self.folder, "--checkpoint-dir"):
            for kind, tensors in self.tensors.items():
                parts = {name: own_slice(tensors[name]) for name, _ in sorted(self.own[kind])}
                if parts or self.world.is_first:  # an optimizer may have no state yet
                    name = f"{kind}/rank-{self.world.rank:05d}.safetensors"
                    local = {key: part for key, (_, part) in parts.items()}
                    offsets = {key: where.offset for key, (where, _) in parts.items()}
                    files[name] = write_tensors(self.draft / name, local, offsets)
            if self.world.is_first:
                files[RNG_FILE] = write_tensors(self.draft / RNG_FILE, self.rng)
        return json.dumps(encode(files))

    def _publish(self) -> str:
        if not self.world.is_first:
            return ""
        with disk_errors(self.folder, "--checkpoint-dir"):
            for kind in self.tensors:
                sync_folder(self.draft / kind)
            return str(publish_draft(self.draft, self.manifest, self.keep))
