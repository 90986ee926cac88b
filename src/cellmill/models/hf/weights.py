"""Initial values of a model of transformers from a folder, by name. Only safetensors are read, never a pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cellmill.config.parts.families import HfConfig, model_folder
from cellmill.errors import DataError
from cellmill.files import read_json, require_file
from cellmill.models.initial import Fill

WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
HEADS = (
    ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
)
"""Names of head.0, head.2 and the owner of the bias of masked_gene's head, in folders of ESM, RoBERTa, and of BERT."""


def values_of_buffers(auto: Any, config: Any) -> dict[str, torch.Tensor]:
    """Every buffer of the model that `auto` makes of `config`, by name, on the CPU. Parameters take no memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta")))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            return dict(auto.from_config(config).named_buffers())
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class FolderWeights:
    """Tensors of a configuration's folder, read when needed; `prefix` is that of a model with a head."""

    def __init__(self, config: HfConfig, prefix: str) -> None:
        self.config, self.prefix = config, prefix

    @cached_property
    def folder(self) -> Path:
        try:
            return model_folder(self.config.path or "", self.config.revision)
        except ValueError as error:
            raise DataError(f"model.{error}") from None

    def fill_head(self, name: str, random: Fill, rows: torch.Tensor | None = None) -> Fill:
        """Copy the parameter `name` of masked_gene's head, or its `rows`; fill with `random` if the folder has none."""

        def fill(tensor: torch.Tensor, generator: torch.Generator) -> object:
            if name not in self.head:
                return random(tensor, generator)
            found = self.read(self.head[name])
            return tensor.copy_(found if rows is None else found[rows])

        return fill

    def fill(self, name: str) -> Fill:
        """Copy the tensor `name` of the model without a head; raises DataError where the folder lacks it."""

        def fill(tensor: torch.Tensor, generator: torch.Generator) -> object:
            stored = self._stored(name) or self._stored(f"{self.prefix}.{name}")
            if stored is None:
                raise DataError(f"{self.folder}: no tensor {name!r}; save it again with this version of transformers")
            found, shape = self.read(stored), tuple(tensor.shape)
            if tuple(found.shape) != shape:
                raise DataError(f"{self.folder}: {stored}: expected shape {shape}, got {tuple(found.shape)}")
            return tensor.copy_(found)

        return fill

    def _stored(self, name: str) -> str | None:
        """The tensor's name in the folder, where norms may have TensorFlow's names; None if it is not there."""
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return next((known for known in (name, old) if known in self._files), None)

    def read(self, stored: str) -> torch.Tensor:
        """The tensor with this name in the folder, float32."""
        with _opened(self._files[stored]) as file:
            return file.get_tensor(stored).float()

    @cached_property
    def _files(self) -> dict[str, Path]:
        if (index := self.folder / INDEX).is_file():
            tree = read_json(index)
            files = tree.get("weight_map") if isinstance(tree, dict) else None
            if not isinstance(files, dict) or not all(Path(str(file)).name == file for file in files.values()):
                raise DataError(f"{index}: expected weight_map, names of files by tensor; download the folder again")
            return {name: self.folder / file for name, file in files.items()}
        path = self.folder / WEIGHTS
        if path.is_file():
            with _opened(path) as file:
                return dict.fromkeys(file.keys(), path)
        if (self.folder / PICKLE).is_file():
            raise DataError(
                f"{self.folder}: {PICKLE} is a pickle, which is never opened; where you trust it, convert it with "
                "transformers: AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise DataError(f"{self.folder}: no {WEIGHTS}; set model.weights to random, or download the folder again")

    @cached_property
    def head(self) -> dict[str, str]:
        """Names in the folder of the parameters of masked_gene's head; empty if it has no such head."""
        for dense, norm, last in HEADS:
            stored = {
                f"{ours}.{kind}": self._stored(f"{theirs}.{kind}")
                for ours, theirs in (("head.0", dense), ("head.2", norm))
                for kind in ("weight", "bias")
            } | {"gene_bias": self._stored(f"{last}.bias")}
            if all(stored.values()):
                return {ours: str(theirs) for ours, theirs in stored.items()}
        return {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError(f"{path}: damaged: {error}") from None
