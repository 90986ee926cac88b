"""Options of the `encoder` family: a bidirectional transformer encoder over packed genes. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.gene_vectors import GeneVectorsConfig
from cellmill.config.objective import ObjectiveConfig
from cellmill.config.tokens import Tokens
from cellmill.config.transformer import TransformerConfig


class EncoderConfig(GeneVectorsConfig, TransformerConfig):
    """Architecture of the encoder."""

    implementation: ClassVar[str] = "cellmill.models.encoder.model:EncoderModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("class", "scalar", "place")
    objectives: ClassVar[tuple[str, ...]] = (
        *("cell_decoding", "denoise", "query_decoding"),
        *("masked_value", "masked_gene", "supervised_contrastive"),
    )
    covariates: ClassVar[bool] = True

    family: Literal["encoder"] = Field(
        "encoder", description="A pre-norm transformer encoder whose tokens attend to all tokens of their cell."
    )
    pooling: Literal["mean", "cls", "attention"] = Field(
        "mean",
        description="Cell embedding: mean of its tokens' states (mean), the state of a learned token before them "
        "(cls), or their mean weighted by a learned query (attention). Only mean works with objectives that do not "
        "read the embedding, such as masked_gene with cell_loss_weight 0.",
    )

    def check_with(self, objective: ObjectiveConfig, tokens: Tokens) -> None:
        """Refuse a learned pooling that no loss would train, or that would read tokens of obs columns."""
        if self.pooling != "mean" and tokens.covariates:
            raise ValueError(f"model.pooling {self.pooling}: tokens.covariates requires pooling mean; set one of them")
        if self.pooling != "mean" and not any(part.reads_cells for part in objective.each()):
            raise ValueError(
                f"model.pooling {self.pooling}: expected an objective that reads the cell's vector, got "
                f"{objective.name} with cell_loss_weight 0; set it above 0, or pooling to mean"
            )
