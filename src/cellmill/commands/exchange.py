"""Models to and from other places. Modules that need an extra are imported when they are called.

import                       published single-cell models become model folders, which embed, evaluate and start runs
export --format onnx         the embedder of a model, for runtimes without torch
export --format transformers a trained model of family hf, for AutoModel.from_pretrained
push                         a model folder to the Hugging Face hub, with a card of its data, results and options
"""

import importlib
from pathlib import Path
from typing import Any

from cellmill.errors import ConfigError
from cellmill.models.published.geneformer import import_geneformer
from cellmill.models.published.scgpt import import_scgpt
from cellmill.report.hub_card import hub_card

READERS = {"geneformer": import_geneformer, "scgpt": import_scgpt}


def import_model(*, kind: str, folder: Path, out: Path, **options: Any) -> None:
    """Read the published layout `kind` in `folder` into the model folder `out`. Raises DataError if it is another."""
    print(READERS[kind](folder, out, **options), flush=True)


def export_onnx(*, model: Path, out: Path) -> None:
    """Write the model in folder `model` to `out`. Raises UserError."""
    if out.suffix != ".onnx":
        raise ConfigError(f"{out}: expected a name that ends in .onnx")
    difference = importlib.import_module("cellmill.models.onnx_file").write_onnx(model, out)
    print(f"{model} -> {out}, vectors within {difference:.1g} of the model's", flush=True)


def export_transformers(*, model: Path, out: Path) -> None:
    """Write the model in folder `model` to the folder `out`. Raises UserError."""
    try:
        module = importlib.import_module("cellmill.models.hf.model")
    except ImportError as error:
        raise ConfigError(f"the package {error.name} is not installed; pip install 'cellmill[hf]'") from None
    module.write_transformers(model, out)
    print(f"{model} -> {out}", flush=True)


def push(*, model: Path, repo: str, licence: str, private: bool) -> None:
    """Upload the model folder; of a run's, also its evaluate/metrics.json. Raises UserError."""
    metrics = model.resolve().parent / "evaluate" / "metrics.json"
    hub = importlib.import_module("cellmill.models.hub")
    url = hub.push(model, repo, hub_card(model, licence), metrics if metrics.is_file() else None, private)
    print(f"{model} -> {url}", flush=True)
