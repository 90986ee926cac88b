"""Parts of a run's configuration as trackers show them."""

from typing import Any


def flatten_options(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by path, such as `train.lr`. Empty mappings have none."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            values |= flatten_options(value, f"{name}.")
        else:
            values[name] = value
    return values


def list_digests(config: dict[str, Any]) -> dict[str, str]:
    """Return texts that identify the data, initial weights and code of a run, by name.

    `config` is that of `Tracker.start`.
    """
    identity = config["identity"]
    values = {
        "fingerprint": config["fingerprint"],
        "init_from": identity.get("init_from"),
        "gene_vectors": identity.get("model.gene_vectors"),
        **config.get("environment", {}),
    }
    return {name: str(value) for name, value in values.items() if value is not None}
