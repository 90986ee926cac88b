"""Options, digests and versions of a run as flat names and values, as trackers show them beside each other."""

from typing import Any


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Values of a tree of mappings by their path, such as `train.lr`; empty mappings are left out."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{before}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values


def digests(config: dict[str, Any]) -> dict[str, str]:
    """Texts that identify the data, the first weights and the code of a run, from `config` of `Tracker.start`."""
    identity = config["identity"]
    values = {
        "fingerprint": config["fingerprint"],
        "init_from": identity.get("init_from"),
        "gene_vectors": identity.get("model.gene_vectors"),
        **config.get("environment", {}),
    }
    return {name: str(value) for name, value in values.items() if value is not None}
