"""Sharded checkpoints by torch.distributed.checkpoint (DCP): saved in the background, readable in any layout.

Only tensors go through DCP; progress and identity are JSON beside them. DCP's `.metadata` is a pickle, so it is read
with an unpickler that knows DCP's own classes and nothing else: a planted one is refused, not run.
"""

from __future__ import annotations

import io
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from cellmill.errors import DataError
from cellmill.files import write_json
from cellmill.train.folder import Checkpoint, TrainFolder

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
DCP_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DCP_CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in checkpoint metadata")


class CheckpointReader(dcp.FileSystemReader):
    """Reads a checkpoint folder; its pickled metadata can hold DCP's own classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index. Raises DataError when it holds anything else or is not readable."""
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, OSError, AttributeError, ValueError) as error:
            raise DataError(f"{path}: not a checkpoint's metadata ({error}); it was not loaded") from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Checkpoints:
    """Saves and loads a run's checkpoints. Every method but `raise_if_failed` is collective: every rank.

    Parameters
    ----------
    folder
        Of the run.
    keep
        Newest checkpoints to keep, beside the best.
    """

    def __init__(self, folder: TrainFolder, keep: int) -> None:
        self.folder, self.keep = folder, keep
        # its own gloo group: a save in the background must not mix with the collectives of training
        self._group = dist.new_group(backend="gloo")
        self._writing: Future[Any] | None = None
        self._finishing: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step: int | None = None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, state: dict[str, Any]) -> None:
        """Copies the tensors and writes them in the background; waits only for the save before this one."""
        if self.saved_step == step:
            return
        self.wait()
        path = self.folder.checkpoint_folder / f"step-{step:08}.incomplete"
        if dist.get_rank() == 0:
            path = self.folder.begin(step)
            write_json(path / "state.json", state)
        dist.barrier(self._group)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
        tensors = {"model": model_state, "optimizer": _tensors_of(optimizer_state)}
        self._writing = dcp.async_save(
            tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True), process_group=self._group
        )
        if dist.get_rank() == 0:
            self._finishing = threading.Thread(target=self._finish, args=(path, self._writing), name="checkpoint")
            self._finishing.start()
        self.saved_step = step

    def wait(self) -> None:
        """Returns when nothing is being written any more. Raises DataError if that failed."""
        if self._writing is not None:
            try:
                self._writing.result()
            except BaseException as error:  # DCP wraps every rank's failure in its own BaseException
                self._error = self._error or error
        if self._finishing is not None:
            self._finishing.join()
        self._writing = self._finishing = None
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raises DataError when a save in the background has failed. Cheap: called each step."""
        if self._error is not None:
            reason = _reason(self._error)
            raise DataError(
                f"{self.folder.checkpoint_folder}: the checkpoint of step {self.saved_step} could not be written "
                f"({reason}); earlier ones are untouched: make room and run the same command again"
            ) from self._error

    def load(self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Tensors of `checkpoint` into the model and its optimizer, whatever layout either has."""
        CheckpointReader(checkpoint.path).read_metadata()  # DCP would bury its error under one of its own
        model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
        tensors = {"model": model_state, "optimizer": _tensors_of(optimizer_state)}
        dcp.load(tensors, storage_reader=CheckpointReader(checkpoint.path), process_group=self._group)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=optimizer_state | tensors["optimizer"],
            options=FLAT,
        )
        self.saved_step = checkpoint.step

    def _finish(self, path: Path, writing: Future[Any]) -> None:
        try:
            writing.result()
            self.folder.finish(path, self.keep)
        except BaseException as error:  # kept for the main thread, which raises it
            self._error = self._error or error


def _tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors alone: DCP would pickle anything else. What is left out (lr, betas) is set from the configuration."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # CheckpointException: {rank: (exception, traceback)}
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
