"""Options of the `masked` family: a bidirectional transformer encoder over packed genes. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cellmill.config.family import CHUNK_LOGITS, FamilyConfig, ModelSize
from cellmill.config.tokens import SPECIAL, Tokens


class MaskedConfig(FamilyConfig):
    """Architecture and objective of the masked encoder."""

    implementation: ClassVar[str] = "cellmill.models.masked.model:MaskedModel"
    weight_keys: ClassVar[tuple[str, ...]] = ("family", "hidden", "layers", "heads", "ffn_width")

    family: Literal["masked"] = Field(
        "masked", description="A pre-norm transformer encoder trained to fill in what is hidden."
    )
    objective: Literal["masked_gene", "masked_value"] = Field(
        "masked_value", description="What is hidden and predicted at masked tokens: which gene it is, or its value."
    )
    mask_frac: float = Field(0.15, gt=0, lt=1, description="Fraction of a cell's tokens that is masked, at least one.")
    cell_loss_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of a second loss, in which the cell's embedding and what is visible of a masked token "
        "predict the rest of it: it teaches the embedding what the cell expresses (scGPT's GEPC). 0 leaves it out.",
    )
    hidden: int = Field(256, ge=8, description="Width of the residual stream.")
    layers: int = Field(4, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden must be a multiple of it.")
    ffn_hidden: int | None = Field(None, ge=1, description="Width inside the feed-forward layers; null is 4 * hidden.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the residual branches, the same in every layout.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of heads = {self.heads}")
        return self

    def check_tokens(self, tokens: Tokens) -> None:
        """masked_value hides a token's value, which rank tokens do not have: their place in the cell is no count."""
        if self.objective == "masked_value" and tokens.tokenizer == "rank":
            raise ValueError(
                "model.objective masked_value needs values, which tokens.tokenizer rank does not have; "
                "choose binned or continuous, or masked_gene"
            )

    @property
    def ffn_width(self) -> int:
        """Width inside the feed-forward layers."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def cut_by_tp(self) -> dict[str, int]:
        """Attention by whole heads, feed-forward by its width; the vocabulary may be cut anywhere."""
        return {"model.heads": self.heads, "model.ffn_hidden": self.ffn_width}

    def cut_by_pp(self) -> dict[str, int]:
        """Between any two blocks."""
        return {"model.layers": self.layers}

    def size(self, n_genes: int, tokens: Tokens, tp: int = 1, sequence_parallel: bool = False) -> ModelSize:
        """Exact counts of parameters, and of FLOPs as matrix products (a multiply-add is 2), three passes each."""
        h, f, v = self.hidden, self.ffn_width, n_genes + len(SPECIAL)
        genes = -(-v // tp) * h
        values = 2 * h + h * h + h if tokens.value_kind == "scalar" else tokens.n_values * h
        inputs = genes + values + (h if self.objective == "masked_value" else 0)
        outputs = 2 * h + h * h + 3 * h
        if self.objective == "masked_gene":
            own_classes, shared = v / tp, genes  # the matrix is the gene embedding's; a bias is its own
            outputs += v
        else:
            classes = tokens.n_values - 1 if tokens.value_kind == "class" else 1
            own_classes, shared = classes, 0
            outputs += classes * h + classes
        at_targets = h * h + h * own_classes
        predictions = 1
        if self.cell_loss_weight:
            shared = inputs
            outputs += 2 * h * h + 3 * h
            at_targets += 2 * h * h + h * own_classes
            predictions = 2
        # kept for the backward pass, elements a token: a block's input, two norms, q k v, attention before and after
        # its cells are joined, its projection, both sides of the GELU; two masks where there is dropout. Outside, the
        # last norm, both sides of the values' GELU, the states whose mean a cell is, and the heads at targets. A test
        # compares with what autograd keeps
        stream = h // tp if sequence_parallel else h
        # norms go into cut matrices, for which the tokens of all are put together
        kept = (2 + (2 if self.dropout else 0)) * stream + 2 * h + (5 * h + 2 * f) // tp
        # selective: attention and the products of all four matrices, of which rows leave sums over all tokens
        products_kept = 2 * h + (4 * h + f) // tp
        of_values = tokens.tokenizer == "continuous"
        of_cells = h + round(5 * h * self.mask_frac) if self.cell_loss_weight else 0
        chunked = self.objective == "masked_gene"
        return ModelSize(
            blocks=self.layers,
            block_parameters=(4 * h * h + 3 * h + 2 * h * f + f) // tp + 2 * h + 4 * h,
            begin_parameters=inputs,
            finish_parameters=outputs + shared,
            shared_parameters=shared,
            block_flops_per_token=3 * 2 * (4 * h * h + 2 * h * f) / tp,
            begin_flops_per_token=3 * 2 * (h + h * h) if of_values else 0,
            finish_flops_per_token=3 * 2 * self.mask_frac * at_targets,
            block_flops_per_token_pair=3 * 4 * h / tp,
            width=stream,
            block_activations_per_token=kept,
            block_activations_per_token_selective=stream + products_kept,
            begin_activations_per_token=2 * h if of_values else 0,
            finish_activations_per_token=h + of_cells + round(4 * h * self.mask_frac),
            working_per_token=2 * h + f // tp,
            logits_per_token=self.mask_frac * own_classes * (1 if chunked else predictions),
            most_logits=CHUNK_LOGITS if chunked else None,
            table_gradients=predictions * (-(-v // tp) * (h + 1)) if chunked else 0,
            # after `out` and `down`; the gradients that enter `qkv` and `up`
            block_sums_per_token=2 * h,
            begin_sums_per_token=h,
            finish_sums_per_token=self.mask_frac
            * h
            * (bool(self.cell_loss_weight) + (predictions if self.objective == "masked_gene" else 0)),
        )
