"""Linear layers of any family: torch's, and transformers' Conv1D of GPT-2, whose weight is transposed."""

from torch import nn


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is linear, with its matrix in `weight`."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D: linear, with a weight of (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
