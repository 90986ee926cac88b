"""model.safetensors of an exported model; reads only the requested elements."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cellmill.errors import DataError
from cellmill.files import require_file
from cellmill.models.model_config import unusable
from cellmill.parallel.own_part import Part

WEIGHTS = "model.safetensors"


class WeightsFile:
    """Tensors by name; the file stays mapped as long as this lives. Raises DataError if it is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            require_file(path)  # the library would wait for a FIFO
        with self._named():
            self._file: Any = safe_open(path, framework="pt")
            self.names: list[str] = list(self._file.keys())

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file.get_slice(name).get_shape())

    def is_float32(self, name: str) -> bool:
        return bool(self._file.get_slice(name).get_dtype() == "F32")

    def read(self, name: str, part: Part) -> torch.Tensor:
        """Return the elements of `part`."""
        with self._named():
            return self._file.get_slice(name)[part or ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of every tensor, and all of it."""
        with self._named():
            for name in self.names:
                yield name, self._file.get_tensor(name)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DataError(f"{self._path}: no such file; export the model first (consolidate)") from None
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unusable(self._path, f"damaged: {error}") from None
