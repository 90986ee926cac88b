"""Scalars between host and device, copied without blocking either."""

from collections.abc import Sequence

import numpy as np
import torch


class AsyncScalars:
    """Non-blocking copy of device scalars to the host.

    The copy is queued on the current stream when this is made, so `read` does not wait for work that is queued later.
    """

    def __init__(self, scalars: torch.Tensor) -> None:
        self._host, self._copied = scalars, None
        if scalars.is_cuda:
            self._host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self._host.copy_(scalars, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(scalars.device))

    def read(self) -> list[float]:
        """Return the scalars as a flat list; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        scalars: list[float] = self._host.flatten().tolist()
        return scalars


def to_device(scalars: Sequence[float] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to `device` as float64, without blocking the host."""
    tensor = torch.tensor(scalars, dtype=torch.float64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
