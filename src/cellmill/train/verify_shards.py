"""Check of the shards at the start of a training: each rank hashes its part, once for all runs of a corpus."""

import torch
import torch.distributed as dist

from cellmill.data.manifest import Manifest, verify
from cellmill.data.verified_shards import files_of_training, record, unverified


def verify_shards(manifest: Manifest, device: torch.device) -> None:
    """Hash the shards whose size or time is not as in verified.json beside the manifest, and write that file.

    Collective: every rank, each with an equal part of the shards. Raises DataError naming a damaged shard.

    Parameters
    ----------
    device
        A device that the default process group communicates on.
    """
    own = files_of_training(manifest)[dist.get_rank() :: dist.get_world_size()]
    unknown = unverified(manifest, own)
    verify(manifest, unknown)
    hashed = torch.tensor(len(unknown), device=device)
    dist.all_reduce(hashed)
    if hashed.item() and dist.get_rank() == 0:
        record(manifest)
