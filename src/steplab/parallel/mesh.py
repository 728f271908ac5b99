"""The mesh of ranks, which says who holds which part of a parameter.

Ranks are numbered replica by replica: (replica, expert), so that P neighbors share one set of
experts, and ranks P apart hold the same ones.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

REPLICA, EXPERT = "replica", "expert"


def rank_mesh(device_type: str, expert: int = 1) -> DeviceMesh:
    """Return all ranks as a mesh of two axes: N / `expert` replicas of the experts' `expert` parts.

    Every other mesh is a part of this one: FSDP2 shards a parameter along two axes only where both
    come from one mesh.
    """
    shape = (dist.get_world_size() // expert, expert)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICA, EXPERT))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
