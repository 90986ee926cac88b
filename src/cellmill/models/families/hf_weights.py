"""Pretrained weights of family hf, from a folder of the transformers library, as initial values.

Only safetensors are read from folders, never a pickle. A tensor is read when it is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cellmill.config.parts.families import HfConfig, model_folder
from cellmill.errors import DataError
from cellmill.files import read_json, require_file
from cellmill.models.initial import Fill

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HEADS = (
    ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
)
"""Modules of ESM and RoBERTa, and of BERT, for masked_gene's head.0, head.2 and gene_bias."""


class FolderWeights:
    """Tensors of the folder that `model.path` names, read when needed.

    In the file of a model with a head, names of the body begin with `prefix`.
    """

    def __init__(self, config: HfConfig, prefix: str) -> None:
        self.config = config
        self.prefix = prefix

    @cached_property
    def folder(self) -> Path:
        try:
            return model_folder(self.config.path or "", self.config.revision)
        except ValueError as error:
            raise DataError(f"model.{error}") from None

    def fill_head(self, name: str, random: Fill, rows: Tensor | None = None) -> Fill:
        """Return a fill that copies a parameter of masked_gene's head, or its `rows`.

        If the folder has no such head, it fills with `random`.
        """

        def fill(tensor: Tensor, generator: torch.Generator) -> object:
            if name not in self.head:
                return random(tensor, generator)
            stored = self.read(self.head[name])
            return tensor.copy_(stored if rows is None else stored[rows])

        return fill

    def fill(self, name: str) -> Fill:
        """Return a fill that copies a tensor of the body, or raises DataError if the folder lacks it."""

        def fill(tensor: Tensor, generator: torch.Generator) -> object:
            stored = self._stored(name) or self._stored(f"{self.prefix}.{name}")
            if stored is None:
                raise DataError(
                    f"{self.folder}: no tensor {name!r}; save it again with this version of transformers"
                )
            value = self.read(stored)
            if value.shape != tensor.shape:
                raise DataError(
                    f"{self.folder}: {stored}: expected shape {tuple(tensor.shape)}, got {tuple(value.shape)}"
                )
            return tensor.copy_(value)

        return fill

    def _stored(self, name: str) -> str | None:
        """Return the tensor's name in the folder, None if missing.

        Norms may have TensorFlow's names there.
        """
        tensorflow_name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensorflow_name = tensorflow_name.replace("LayerNorm.bias", "LayerNorm.beta")
        if name in self._files:
            return name
        return tensorflow_name if tensorflow_name in self._files else None

    def read(self, stored: str) -> Tensor:
        """Return the tensor with this name in the folder, float32."""
        with _open_weights(self._files[stored]) as file:
            return file.get_tensor(stored).float()

    @cached_property
    def _files(self) -> dict[str, Path]:
        """File of each tensor, by the tensor's name in the folder."""
        index = self.folder / INDEX
        if index.is_file():
            tree = read_json(index)
            files = tree.get("weight_map") if isinstance(tree, dict) else None
            if not isinstance(files, dict) or not all(
                Path(str(file)).name == file for file in files.values()
            ):
                raise DataError(
                    f"{index}: expected weight_map, names of files by tensor; download the folder again"
                )
            return {name: self.folder / file for name, file in files.items()}
        path = self.folder / WEIGHTS
        if path.is_file():
            with _open_weights(path) as file:
                return dict.fromkeys(file.keys(), path)
        if (self.folder / PICKLE).is_file():
            raise DataError(
                f"{self.folder}: {PICKLE} is a pickle, which is never opened; where you trust it, convert it with "
                "transformers: AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise DataError(
            f"{self.folder}: no {WEIGHTS}; set model.weights to random, or download the folder again"
        )

    @cached_property
    def head(self) -> dict[str, str]:
        """Names in the folder of the parameters of masked_gene's head; empty without such a head."""
        for dense, norm, last in HEADS:
            names = {
                "head.0.weight": self._stored(f"{dense}.weight"),
                "head.0.bias": self._stored(f"{dense}.bias"),
                "head.2.weight": self._stored(f"{norm}.weight"),
                "head.2.bias": self._stored(f"{norm}.bias"),
                "gene_bias": self._stored(f"{last}.bias"),
            }
            stored = {ours: name for ours, name in names.items() if name is not None}
            if len(stored) == len(names):
                return stored
        return {}


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"{path}: damaged: {error}") from None
