"""TensorFloat-32: float32 matrix products of a GPU with 10 bits of mantissa, from Ampere on."""

import torch


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Let float32 products of this process use TF32 or not, on a GPU; on a CPU the same setting would mean bfloat16."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if enabled else "highest")
