"""pull: a model folder from the Hugging Face hub."""

from pathlib import Path

from cellmill.models import hub


def run(*, repo: str, out: Path) -> None:
    """Download the model `repo` (owner/name, with @revision for another than main) to the folder `out`."""
    commit = hub.pull(repo, out)
    print(f"{repo} at {commit[:12]} -> {out}", flush=True)
