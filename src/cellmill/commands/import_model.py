"""import: published single-cell models as model folders, which embed, evaluate and start runs like those of a run."""

from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.models.published.geneformer import import_geneformer
from cellmill.models.published.scgpt import import_scgpt

READERS = {"geneformer": import_geneformer, "scgpt": import_scgpt}


def run(*, kind: str, folder: Path, out: Path, **options: Any) -> None:
    """Read the published layout `kind` in `folder` into the model folder `out`. Raises DataError if it is another."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the folder with the published files")
    if (folder / "vocabulary.tsv").exists() and (folder / "model.safetensors").exists():
        raise DataError(f"{folder}: this is a model folder of cellmill already; embed with it as it is")
    print(READERS[kind](folder, out, **options), flush=True)
