"""push: a model folder to the Hugging Face hub, with a card of its data, results and options."""

from pathlib import Path

from cellmill.models import hub
from cellmill.report.hub_card import hub_card


def run(*, model: Path, repo: str, licence: str, private: bool) -> None:
    """Upload the model folder; of a run's, also its evaluate/metrics.json. Raises UserError."""
    metrics = model.resolve().parent / "evaluate" / "metrics.json"
    url = hub.push(model, repo, hub_card(model, licence), metrics if metrics.is_file() else None, private)
    print(f"{model} -> {url}", flush=True)
