"""import: published single-cell models as model folders, which embed, evaluate and start runs like those of a run."""

from pathlib import Path
from typing import Any

from cellmill.models.published.geneformer import import_geneformer
from cellmill.models.published.scgpt import import_scgpt

READERS = {"geneformer": import_geneformer, "scgpt": import_scgpt}


def run(*, kind: str, folder: Path, out: Path, **options: Any) -> None:
    """Read the published layout `kind` in `folder` into the model folder `out`."""
    print(READERS[kind](folder, out, **options), flush=True)
