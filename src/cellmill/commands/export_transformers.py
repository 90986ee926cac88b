"""export --format transformers: a trained model of family hf as a folder for AutoModel.from_pretrained."""

from pathlib import Path

from cellmill.models.hf.transformers_folder import write_transformers


def run(*, model: Path, out: Path) -> None:
    """Write the model in folder `model` to the folder `out`. Raises UserError."""
    write_transformers(model, out)
    print(f"{model} -> {out}", flush=True)
