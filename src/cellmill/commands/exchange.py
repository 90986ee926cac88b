"""Models of other packages and hubs: import, export, upload.

Modules that need an extra of the package are imported when they are called.
"""

import importlib
from pathlib import Path
from typing import Any

from cellmill.commands.hub_card import write_card
from cellmill.errors import ConfigError
from cellmill.models.published import import_geneformer, import_scgpt

READERS = {"geneformer": import_geneformer, "scgpt": import_scgpt}


def import_model(*, kind: str, folder: Path, out: Path, **options: Any) -> None:
    """Convert a published model of layout `kind` in `folder` to the model folder `out`.

    Raise DataError if the folder has another layout.
    """
    print(READERS[kind](folder, out, **options))


def export(*, format: str, model: Path, out: Path) -> None:
    """Write the model in folder `model` to `out`, a .onnx file or a folder for transformers.

    Raise ConfigError for a wrong name or if a package is missing, UserError if the model cannot be
    exported.
    """
    if format == "onnx":
        if out.suffix != ".onnx":
            raise ConfigError(f"{out}: expected a name that ends in .onnx")
        onnx_file = importlib.import_module("cellmill.models.onnx_file")
        difference = onnx_file.write_onnx(model, out)
        print(f"{model} -> {out}, vectors within {difference:.1g} of the model's")
        return
    try:
        module = importlib.import_module("cellmill.models.families.hf")
    except ImportError as error:
        raise ConfigError(
            f"the package {error.name} is not installed; pip install 'cellmill[hf]'"
        ) from None
    module.write_transformers(model, out)
    print(f"{model} -> {out}")


def push(*, model: Path, repo: str, licence: str, private: bool) -> None:
    """Upload the model folder, and evaluate/metrics.json if it is of this model of a run.

    Raise UserError if the card or the upload fails.
    """
    hub = importlib.import_module("cellmill.models.hub")
    url = hub.push(model, repo, *write_card(model, licence), private)
    print(f"{model} -> {url}")
