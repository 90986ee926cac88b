"""Training cells of a model and of its ancestors, from digest lists and shards.

The folder of an exported model has a digest list. The list has the training and validation cells of the
model, and of its ancestors as far as those were known at export.

If the folder of the model is still in the folder of its run, train/run.json is there too. That file names
the shards, and the models that the run started from or learnt from.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cellmill.config.load import read_model_config, stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.plugin import in_one_line
from cellmill.data.shards.cell_digests import CellDigests, CorpusDigests, read_digests
from cellmill.data.shards.manifest import Manifest, verify
from cellmill.errors import DataError, UserError
from cellmill.evaluate.seen.corpus_hashes import HashedCorpus, list_filled_splits
from cellmill.files import read_json

# name of a model, and the folder of its export; None if the folder is not there
Ancestor = tuple[str, Path | None]


class KnownTrainingCells(NamedTuple):
    """Cells that a model and its ancestors were trained on, as far as the cells can be found."""

    manifests: dict[str, Manifest]  # of shards, by fingerprint of the corpus
    listed: dict[str, CorpusDigests]  # digests in folders of models, by fingerprint of the corpus
    missing_reason: (
        str  # says why the cells of the model itself are not known; empty if they are known
    )
    missing_ancestors: list[str]  # names of ancestors whose cells are not known

    def read_corpora(self) -> list[HashedCorpus]:
        """Read the hashes of all corpora, from shards where these were found, else from digest lists."""
        only_listed = self.listed.keys() - self.manifests.keys()
        corpora = [HashedCorpus.read(manifest) for manifest in self.manifests.values()]
        return corpora + [
            HashedCorpus.from_digests(self.listed[fingerprint])
            for fingerprint in sorted(only_listed)
        ]


class _OwnTrainingCells(NamedTuple):
    """Training cells of one model, in shards, in the digest list of its folder, or in both."""

    manifest: Manifest | None  # of the shards
    problem: str  # says why there is no manifest
    ancestors: list[Ancestor]  # models that the training started from or learnt from
    digests: CellDigests | None = None  # of the model, and of ancestors as far as they were known


def find_training_cells(model: Path) -> KnownTrainingCells:
    """Find the training cells of the exported model in the folder `model`, and of its ancestors.

    Raises DataError for a damaged digest list.
    """
    return _add_ancestors(_find_own_training_cells(model), {model.resolve()})


def find_training_cells_of_run(train: Path, fingerprint: str) -> KnownTrainingCells:
    """Find the training cells of a run and of the ancestors of its model.

    `train` is the folder of the run's training. `fingerprint` is the fingerprint of its corpus.
    """
    return _add_ancestors(_find_shards_of_run(train, fingerprint), set())


def _add_ancestors(model: _OwnTrainingCells, visited: set[Path]) -> KnownTrainingCells:
    """Add the training cells of all ancestors of `model`.

    `visited` are the folders of models that were visited; they are not visited again.

    The digest list of a model also has the cells of its ancestors, and the names of ancestors whose cells
    were not known. So an ancestor of a model with a digest list is missing only if the list names it.
    """
    if model.manifest is None and model.digests is None:
        return KnownTrainingCells({}, {}, model.problem, [])
    manifests: dict[str, Manifest] = {}
    listed: dict[str, CorpusDigests] = {}
    missing: list[str] = []
    # Models still to visit, the youngest first. Each has its name, its cells, and True if the digest
    # list of a younger model covers these cells.
    queue = deque([("", model, False)])
    while queue:
        name, training, is_covered = queue.popleft()

        # the cells of this model
        if training.manifest is not None:
            manifests[training.manifest.fingerprint] = training.manifest
        if training.digests is not None:
            listed |= training.digests.corpora
        if not is_covered:
            if training.digests is not None:
                missing += training.digests.unknown
            elif training.manifest is None:
                missing.append(name)

        # its ancestors
        for earlier, folder in training.ancestors:
            ancestor = _OwnTrainingCells(None, "no such folder", [])
            if folder is not None:
                if folder.resolve() in visited:
                    continue
                visited.add(folder.resolve())
                ancestor = _find_own_training_cells(folder)
            queue.append((earlier, ancestor, is_covered or training.digests is not None))
    return KnownTrainingCells(manifests, listed, "", list(dict.fromkeys(missing)))


def _find_own_training_cells(model: Path) -> _OwnTrainingCells:
    """Find the training cells of one export, in its digest list and in the shards of its run."""
    try:
        config = read_model_config(model / "config.json")
    except (UserError, OSError) as error:
        return _OwnTrainingCells(None, in_one_line(error), [])
    # an export is results/runs/RUN/model, or results/runs/RUN/steps/STEP/model
    run = model.resolve().parent
    if run.parent.name == "steps":
        run = run.parents[1]
    digests = read_digests(model, config)
    if not (run / "train" / "run.json").is_file():
        problem = f"{model} is not in the folder of its run, which names its training cells"
        return _OwnTrainingCells(None, problem, [], digests)
    manifest, problem, ancestors, _ = _find_shards_of_run(
        run / "train", str(config.get("fingerprint"))
    )
    return _OwnTrainingCells(manifest, problem, ancestors, digests)


def _find_shards_of_run(train: Path, fingerprint: str) -> _OwnTrainingCells:
    """Find the shards of a run, and the models that the run started from or learnt from."""
    ancestors: list[Ancestor] = []
    try:
        record = read_json(train / "run.json")
        options = stored_options(record["options"], str(train / "run.json"))
        ancestors = [*_find_ancestors(record, options, train)]
        path, problem = find_shards(train, options, fingerprint)
        manifest = None
        if path is not None:
            manifest = Manifest.read(path)
            splits = list_filled_splits(manifest)
            verify(manifest, [manifest.splits[split].index["hashes"] for split in splits])
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        return _OwnTrainingCells(None, in_one_line(error), ancestors)
    return _OwnTrainingCells(manifest, problem, ancestors)


def find_shards(train: Path, options: TrainOptions, fingerprint: str) -> tuple[Path | None, str]:
    """Find the manifest of the shards that a run was trained on.

    Returns the path of the manifest and "", or None and the reason why it was not found. A relative path
    is also looked up in the folders above the run.
    """
    record = train / "run.json"
    if not record.exists():
        return None, f"{record} is missing, which names the shards"
    path = Path(read_json(record)["manifest"])
    problem = f"{path} was not found"
    columns = options.read_columns(), options.number_columns()
    for candidate in find_existing(path, train):
        problem = f"{path} is of other shards by now"
        try:
            if Manifest.read(candidate).fingerprint_with(*columns) == fingerprint:
                return candidate, ""
        except DataError as error:
            problem = str(error)
        except KeyError:
            pass  # these shards lack an obs column that the run reads, so they are other shards
    return None, problem


def find_existing(path: Path, start: Path) -> list[Path]:
    """Find files or folders called `path`, in the working directory and in each folder above `start`."""
    candidates = [path] + [above / path for above in start.resolve().parents]
    return [candidate for candidate in candidates if candidate.exists()]


def _find_ancestors(
    record: dict[str, Any], options: TrainOptions, train: Path
) -> Iterator[Ancestor]:
    """Yield the models that a run started from or learnt from."""
    parent = record.get("init_from")
    if parent is not None:
        yield parent, next(iter(find_existing(Path(parent), train)), None)
    for teacher in options.objective.teachers:
        folder = train.parents[1] / teacher / "model"
        yield f"its teacher {teacher}", folder if folder.is_dir() else None
