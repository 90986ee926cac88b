"""export --format onnx: the embedder of an exported model for runtimes without torch."""

from pathlib import Path

from cellmill.errors import ConfigError
from cellmill.models.onnx_file import write_onnx


def run(*, model: Path, out: Path) -> None:
    """Write the model in folder `model` to `out`. Raises UserError."""
    if out.suffix != ".onnx":
        raise ConfigError(f"{out}: expected a name that ends in .onnx")
    difference = write_onnx(model, out)
    print(f"{model} -> {out}, vectors within {difference:.1g} of the model's", flush=True)
