"""Options of the `bert` family. Torch-free."""

from typing import ClassVar, Literal

from pydantic import Field

from cellmill.config.post_norm import PostNormConfig


class BertFamilyConfig(PostNormConfig):
    """Architecture of BERT over genes in rank order."""

    implementation: ClassVar[str] = "cellmill.models.bert.bert_model:BertModel"
    value_kinds: ClassVar[tuple[str, ...]] = ("place",)

    family: Literal["bert"] = Field(
        "bert",
        description="BERT over genes in rank order, as in Geneformer: gene and position embeddings, a norm, post-norm "
        "blocks. The command import converts Geneformer's weights to one.",
    )
