"""Collapse of an embedding to one direction: its bound, and what to change."""

from cellmill.config.parts.objective import ObjectiveConfig

COLLAPSED = 1.5  # `effective_rank` below which the embedding is nearly one direction


def advise_on_collapse(objective: ObjectiveConfig) -> str:
    """What to change when the embedding has collapsed, as a clause."""
    parts = objective.all_parts()
    names = {part.name for part in parts}
    if any(getattr(part, "batch_adversary", None) for part in parts):
        return "lower objective.batch_adversary_scale, or train.lr"
    if any(getattr(part, "adversarial_scale", None) for part in parts):
        return "lower adversarial_scale of the objective, or train.lr"
    if "next_gene" in names:
        return "choose family encoder or profile for embeddings, because objective next_gene is for generating cells"
    if "cell_decoding" in names:
        return "lower train.lr"
    return "lower train.lr, or choose objective cell_decoding"
