"""The autoencoder: the encoder's pooled states pass through a linear bottleneck, whose output is the cell embedding.

The objective's decoder reads nothing else of the cell, so the family is the encoder with one matrix more.
"""

from dataclasses import replace

import torch

from cellmill.models.autoencoder.config import AutoencoderConfig
from cellmill.models.encoder.model import EncoderModel
from cellmill.models.encoder_batch import EncoderBatch
from cellmill.models.initial import with_std
from cellmill.parallel.cpu_matmul import Linear


class AutoencoderModel(EncoderModel):
    """See the module."""

    config: AutoencoderConfig

    @property
    def vector_width(self) -> int:
        """Width of the bottleneck, H without one."""
        return self.config.latent or self.width

    def attach_heads(self, n_tokens: int) -> None:
        """Add the bottleneck, then the objective's heads."""
        super().attach_heads(n_tokens)
        if self.config.latent is not None:
            self.bottleneck = with_std(Linear(self.width, self.config.latent), self.width**-0.5)
            self.plan = replace(self.plan, finish=("bottleneck", *self.plan.finish))

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (cells, latent) float32."""
        pooled = super().cell_vectors(states, prepared)
        return pooled if self.config.latent is None else self.bottleneck(pooled.to(states.dtype)).float()
