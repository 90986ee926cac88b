"""Sizes of transformers by name: hyper-parameters that a name stands for. Torch-free.

51M is scGPT's width and depth (Cui et al. 2024), 106M that of Geneformer V2-104M (Chen et al. 2024); as theirs, every
head is 64 wide.
"""

from typing import Any, Literal, cast, get_args

SizeName = Literal["10M", "51M", "106M", "300M", "1B", "3B"]
HIDDEN_AND_LAYERS: dict[SizeName, tuple[int, int]] = {
    "10M": (256, 6),
    "51M": (512, 12),
    "106M": (768, 12),
    "300M": (1024, 22),
    "1B": (1792, 24),
    "3B": (2816, 30),
}
HEAD_WIDTH = 64
KEYS = ("hidden", "layers", "heads", "ffn_hidden")
"""Options that a size stands for; a feed-forward width of null is 4 * hidden."""


def numbers(size: SizeName) -> dict[str, int]:
    """Options that `size` stands for."""
    hidden, layers = HIDDEN_AND_LAYERS[size]
    return {"hidden": hidden, "layers": layers, "heads": hidden // HEAD_WIDTH}


def expanded(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the numbers of their `size` in its place, where they do not set them; an unknown size stays."""
    size = options.get("size")
    if size not in get_args(SizeName):
        return options
    return numbers(cast(SizeName, size)) | {key: value for key, value in options.items() if key != "size"}


def replaced(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`defaults` without the options that a size among a run's `own` stands for."""
    if own.get("size") in (None, "null"):
        return defaults
    return {key: value for key, value in defaults.items() if key not in KEYS}
