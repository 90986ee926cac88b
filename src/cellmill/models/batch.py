"""A packed batch of cells as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cellmill.data.tokens import Batch


@dataclass(frozen=True)
class TensorBatch:
    """Cells one behind the other, without padding; it may hold no cells at all."""

    genes: torch.Tensor
    """(tokens,) int64 token ids."""
    values: torch.Tensor
    """(tokens,) float32 (continuous) or int64 (bins from 1; places in the cell from 0)."""
    cu_seqlens: torch.Tensor
    """(cells + 1,) int32: where each cell begins, and where the last ends."""
    cells: torch.Tensor
    """(cells,) int64: a stable id of each cell."""
    lengths: list[int]
    """Tokens of each cell, known to Python, so that nothing waits for a device to learn them."""


def to_tensors(batch: Batch, device: torch.device) -> TensorBatch:
    """`batch` on `device`; copies to a GPU go through pinned memory and do not wait."""

    def move(array: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda":
            return array.pin_memory().to(device, non_blocking=True)
        return array.to(device)

    values = torch.from_numpy(batch.values)
    return TensorBatch(
        genes=move(torch.from_numpy(batch.genes).long()),
        values=move(values if values.is_floating_point() else values.long()),
        cu_seqlens=move(torch.from_numpy(batch.cu_seqlens)),
        cells=move(torch.from_numpy(batch.cells)),
        lengths=(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist(),
    )


def positions(batch: TensorBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens,) int64 each: the number of a token's cell in the batch, and its place in the cell."""
    counts = batch.cu_seqlens.diff().long()
    cell = torch.repeat_interleave(counts, output_size=len(batch.genes))
    place = torch.arange(len(batch.genes), device=batch.genes.device) - batch.cu_seqlens[:-1].long()[cell]
    return cell, place
