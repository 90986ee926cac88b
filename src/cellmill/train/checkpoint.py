"""Sharded checkpoints, saved in the background and loaded in any layout.

Tensors go through torch.distributed.checkpoint (DCP); progress and identity are JSON. DCP's index,
`.metadata`, is a pickle of objects for every part that any rank has saved: it costs seconds on each
rank of a large job and is never opened, so a planted pickle is not run. `index.json` holds the
location of each part of each tensor as columns of numbers, from which a rank picks the parts that
overlap its own.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from cellmill.errors import DataError
from cellmill.files import sha256_file, write_json, write_text
from cellmill.parallel.apply import reshard
from cellmill.parallel.materialize import named_tensors
from cellmill.parallel.mesh import gather_json
from cellmill.runs.folder import DIGEST, Checkpoint, TrainFolder
from cellmill.train.failure import is_lost_peer
from cellmill.train.optimizer import WeightAverage, get_state
from cellmill.train.stored import INDEX, Stored, read_index

CPU = torch.device("cpu")
OPTIMIZER = "optimizer.state."  # prefix of names


def write_index(folder: Path, metadata: Metadata) -> None:
    files: dict[str, int] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), (
            f"{name} is no tensor, and DCP would unpickle it"
        )
        offsets: list[int] = []
        sizes: list[int] = []
        stored = []
        for part in entry.chunks:
            offsets += part.offsets
            sizes += part.sizes
            stored.append(metadata.storage_data[MetadataIndex(name, part.offsets)])
        tensors[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "size": list(entry.size),
            "offsets": offsets,
            "sizes": sizes,
            "file": [files.setdefault(part.relative_path, len(files)) for part in stored],
            "start": [part.offset for part in stored],
            "bytes": [part.length for part in stored],
        }
    # without indentation, which would make it ten times as large
    text = json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":"))
    write_text(folder / INDEX, text)


def _make_metadata(folder: Path, tensors: Mapping[str, Tensor] | None) -> Metadata:
    """Return DCP's index of the parts that overlap what this rank has of `tensors`.

    Without `tensors` it has all parts of all tensors.
    """
    metadata = Metadata({}, storage_data={})
    for name, stored in read_index(folder, tensors).items():
        rows: Sequence[int] = range(len(stored.files))
        if tensors is not None:
            rows = _find_overlapping(stored, tensors[name])
        parts = []
        for row in rows:
            offset = torch.Size(stored.offsets[row].tolist())
            parts.append(ChunkStorageMetadata(offset, torch.Size(stored.sizes[row].tolist())))
            # the attributes that DCP's reader reads
            metadata.storage_data[MetadataIndex(name, offset)] = SimpleNamespace(
                relative_path=stored.files[row],
                offset=stored.starts[row],
                length=stored.lengths[row],
                transform_descriptors=None,
            )
        properties = TensorProperties(stored.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, stored.size, parts)
    return metadata


def _find_overlapping(stored: Stored, tensor: Tensor) -> list[int]:
    """Return the numbers of the parts that overlap what this rank has of a tensor."""
    first = stored.offsets
    end = stored.offsets + stored.sizes
    if not isinstance(tensor, DTensor):
        return np.flatnonzero(((first < tensor.shape) & (end > 0)).all(1)).tolist()
    overlaps = np.zeros(len(first), bool)
    for part in tensor.__create_chunk_list__():  # what DCP's planner will request
        part_end = np.add(part.offsets, part.sizes)
        overlaps |= ((first < part_end) & (end > part.offsets)).all(1)
    return np.flatnonzero(overlaps).tolist()


class CheckpointReader(dcp.FileSystemReader):
    """Reader of the parts of a checkpoint that `tensors` (None: all) need on this rank.

    It reads `index.json` instead of DCP's pickled metadata. Raises DataError if that is missing or
    damaged.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(path)
        self._metadata = _make_metadata(path, tensors)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def load_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` from a checkpoint's folder, or raise DataError. No communication.

    Of a DTensor this rank's part is filled.
    """
    reader = CheckpointReader(path, tensors)
    missing = tensors.keys() - reader.read_metadata().state_dict_metadata
    states = {name for name in tensors if name.startswith(OPTIMIZER)}
    if states and states == missing:  # DCP names one tensor
        raise DataError(
            f"{path}: has no state of the optimizer (all {len(states)} tensors are missing, such as {min(states)}); "
            "the checkpoint is damaged"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is intended
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise DataError(
            f"{path}: cannot be loaded ({_reason(_first_failure(error))}); the checkpoint is damaged"
        ) from error


class _Writer(dcp.FileSystemWriter):
    """Writer of a rank's files and their SHA-256: no rank has to read another's to hash it.

    When all ranks have written, rank 0 writes the index and calls `finished`.
    """

    def __init__(self, path: Path, finished: Callable[[], None]) -> None:
        # the tensors are on the CPU already
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0)
        self._finished = finished

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            file = Path(self.path) / name
            write_text(file.with_name(file.name + DIGEST), sha256_file(file))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        stored: dict[MetadataIndex, Any] = {}
        for rank_results in results:
            stored |= {result.index: result.storage_data for result in rank_results}
        # torch before 2.12 does not set it
        write_index(Path(self.path), replace(metadata, storage_data=stored))
        self._finished()


class Checkpoints:
    """Checkpoints of a run: the `keep` newest and those of `keep_steps`.

    Collective unless a method says otherwise.
    """

    def __init__(
        self,
        folder: TrainFolder,
        keep: int,
        average: WeightAverage | None = None,
        keep_steps: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.average = average
        self.keep_steps = keep_steps
        # a group for it: a background save must not interleave with the collectives of training
        self._group = dist.new_group(backend="gloo")
        # the copy's memory is reused: allocating it anew was most of the stall of a save
        self._staging = BlockingAsyncStager(cache_staged_state_dict=True)
        self._writing: Future[Any] | None = None
        self.saved_step: int | None = None

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, state: dict[str, Any]
    ) -> None:
        """Copy the tensors and write them in the background; waits only for the previous save."""
        if self.saved_step == step:
            return
        self.wait()
        path = self.folder.checkpoint_folder / f"step-{step:08}.incomplete"
        if dist.get_rank() == 0:
            path = self.folder.begin(step)
            write_json(path / "state.json", state)
        dist.barrier(self._group)
        tensors = list_tensors(model, optimizer, self.average)
        if self._staging.state_dict_cache is None and not torch.accelerator.is_available():
            # torch would pin it, which needs an accelerator
            self._staging.state_dict_cache = {
                name: tensor.clone() for name, tensor in tensors.items()
            }
        writer = _Writer(path, partial(self.folder.finish, path, self.keep, self.keep_steps))
        saving = dcp.async_save(
            tensors, storage_writer=writer, process_group=self._group, async_stager=self._staging
        )
        self._writing = cast(Future[Any], saving)  # other stagers return two futures
        self.saved_step = step

    def newest_whole(self) -> tuple[Checkpoint | None, list[str]]:
        """Return `TrainFolder.newest_whole`, each rank checking its part of the files."""
        share = dist.get_rank(), dist.get_world_size()

        def damage(checkpoint: Checkpoint) -> str | None:
            return self._gather_first(checkpoint.damage(share=share))

        # rank 0's list: another node may not see the newest yet, or still see a removed one
        names = [checkpoint.path.name for checkpoint in self.folder.checkpoints()]
        names = gather_json(names, CPU, self._group)[0]
        checkpoints = [self.folder.checkpoint(name) for name in names]
        return self.folder.newest_whole(checkpoints=checkpoints, damage=damage)

    def _gather_first(self, problem: str | None) -> str | None:
        """Return the first rank's problem, None if no rank has one."""
        problems = [line for line in gather_json(problem, CPU, self._group) if line]
        return problems[0] if problems else None

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written. No communication."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises as `raise_if_failed`."""
        if self._writing is not None:
            self._writing.exception()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise DataError if a background save has failed on any rank.

        If it failed because a process was lost, the error of the collective is raised: the training
        starts again. It is called in each step, and does not communicate.
        """
        if self._writing is None or not self._writing.done():
            return
        error = self._writing.exception()
        if error is None:
            return
        cause = _first_failure(error)
        if is_lost_peer(cause):
            raise cause
        if dist.get_rank() == 0:
            self.folder.remove_incomplete()  # on a full disk it would take what the user frees
        raise DataError(
            f"{self.folder.checkpoint_folder}: the checkpoint of step {self.saved_step} could not be written "
            f"({_reason(cause)}); earlier ones are intact: free some space and run the same command again"
        ) from error

    def load(
        self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Load the tensors of a checkpoint of any layout into the model and its optimizer."""
        problem = None
        try:
            load_tensors(checkpoint.path, list_tensors(model, optimizer, self.average))
        except DataError as error:
            problem = str(error)
        problem = self._gather_first(problem)
        if problem is not None:
            raise DataError(problem)
        loaded = dict(named_tensors(model, persistent=True))
        for name, tensor in named_tensors(model, persistent=True):
            # a tensor that two pipeline stages of this rank have was loaded into one of them
            source = loaded[name]
            if source is not tensor:
                tensor.detach().copy_(source.detach())
                for key, value in optimizer.state.get(source, {}).items():
                    get_state(optimizer, tensor)[key].copy_(value)
        if self.average is not None:
            self.average.fill_tied_copies()
        self.saved_step = checkpoint.step


def list_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, not copied.

    They are parameters, persistent buffers, optimizer states and the average of the weights.
    """
    reshard(model)
    trained = set()
    for group in optimizer.param_groups:
        trained |= {id(parameter) for parameter in group["params"]}
    stored = dict(named_tensors(model, persistent=True))
    tensors = {f"model.{name}": tensor.detach() for name, tensor in stored.items()}
    for name, tensor in stored.items():
        if id(tensor) in trained:
            states = get_state(optimizer, tensor).items()
            tensors |= {f"{OPTIMIZER}{name}.{key}": value for key, value in states}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.tensors().items()}
    return tensors


def _first_failure(error: BaseException) -> BaseException:
    """Return the first rank's exception of a CheckpointException, otherwise `error`."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    exception, _ = next(iter(error.failures.values()))
    return exception


def _reason(error: BaseException) -> str:
    if "unexpected pos" in str(error):  # torch's writer of zip files keeps no reason
        return "a file was cut off: the disk is full, or a quota or limit of file size is reached"
    return " ".join(str(error).split())[:300] or type(error).__name__
