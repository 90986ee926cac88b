"""Numbers on their way between the host and a device, for which neither waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class AsyncScalars:
    """Numbers of a device, asked for now and read when they have long been there.

    The copy stands in the device's queue where it is asked for, so to read it does not wait for what came after.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._arrived = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[float]:
        """The numbers, of a scalar too a list."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.flatten().tolist()
        return found


def to_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """float64 on `device`; the host goes on at once."""
    made = torch.tensor(numbers, dtype=torch.float64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
