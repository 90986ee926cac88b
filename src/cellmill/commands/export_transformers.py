"""export --format transformers: a trained model of family hf as a folder for AutoModel.from_pretrained."""

from pathlib import Path

from cellmill.errors import ConfigError

try:
    from cellmill.models.hf.transformers_folder import write_transformers
except ImportError as error:
    raise ConfigError(f"the package {error.name} is not installed; pip install 'cellmill[hf]'") from None


def run(*, model: Path, out: Path) -> None:
    """Write the model in folder `model` to the folder `out`. Raises UserError."""
    write_transformers(model, out)
    print(f"{model} -> {out}", flush=True)
