"""Options of the `autoencoder` family: the encoder with a bottleneck. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.family import FamilyConfig
from cellmill.models.encoder.config import EncoderConfig


class AutoencoderConfig(EncoderConfig):
    """Architecture of the autoencoder: that of the encoder plus a bottleneck. The objective provides the decoder."""

    implementation: ClassVar[str] = "cellmill.models.autoencoder.bottleneck:AutoencoderModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("class", "scalar", "place")
    objectives: ClassVar[tuple[str, ...]] = ("query_decoding", "cell_decoding", "supervised_contrastive")
    weight_keys: ClassVar[tuple[str, ...]] = (*EncoderConfig.weight_keys, "latent")
    moved: ClassVar[dict[str, str]] = FamilyConfig.moved | {
        "decoder_dim": "objective.decoder_hidden",
        "decoder_hidden": "objective.decoder_hidden",
        "decoder_layers": "objective.decoder_layers",
        "mask_ratio": "objective.min_hidden_frac and objective.max_hidden_frac",
    }

    family: Literal["autoencoder"] = Field(  # type: ignore[assignment]
        "autoencoder",
        description="A transformer encoder of the visible genes, whose pooled states pass through a bottleneck: the "
        "cell embedding. The objective, query_decoding or cell_decoding, provides the decoder.",
    )
    latent: int | None = Field(
        64, ge=1, description="Width of the bottleneck, and so of the embedding; null is hidden, without a bottleneck."
    )
