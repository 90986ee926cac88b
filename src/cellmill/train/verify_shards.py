"""Check of the shards at the start of a training: each rank hashes its part, once for all runs of a corpus."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cellmill.data.manifest import Manifest, verify
from cellmill.errors import DataError
from cellmill.files import read_json, write_json

READ = ("train", "val")  # splits that a training reads


def verify_shards(manifest: Manifest, device: torch.device) -> None:
    """Hash the shards whose size or time is not as in verified.json beside the manifest, and write that file.

    Collective: every rank, each with an equal part of the shards. Raises DataError naming a damaged shard.

    Parameters
    ----------
    device
        A device that the default process group communicates on.
    """
    record = manifest.path.with_name("verified.json")
    known = _known(record, manifest.fingerprint)
    shards = [shard for split in READ for shard in manifest.splits[split].shards]
    own = shards[dist.get_rank() :: dist.get_world_size()]
    unknown = [shard for shard in own if known.get(shard.name) != _stamp(manifest.shard_path(shard))]
    verify(manifest, unknown)
    hashed = torch.tensor(len(unknown), device=device)
    dist.all_reduce(hashed)
    if hashed.item() and dist.get_rank() == 0:
        stamps = {shard.name: _stamp(manifest.shard_path(shard)) for shard in shards}
        with suppress(OSError):  # a corpus that only its owner can write to: hashed at each start
            write_json(record, {"fingerprint": manifest.fingerprint, "files": stamps})


def _known(record: Path, fingerprint: str) -> dict[str, Any]:
    """Stamps of the shards when they were last hashed, by name; none if they are of another corpus."""
    try:
        tree = read_json(record)
        return dict(tree["files"]) if tree["fingerprint"] == fingerprint else {}
    except (DataError, KeyError, TypeError, ValueError):
        return {}


def _stamp(path: Path) -> list[int] | str:
    """Size and time of a file; `gone` without it."""
    try:
        return [path.stat().st_size, path.stat().st_mtime_ns]
    except FileNotFoundError:
        return "gone"
