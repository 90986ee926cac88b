"""A vocabulary whose process was killed: sums next to it are resumed, or left if they are of other
inputs.
"""

import os
from pathlib import Path

import anndata as ad
import pytest
from killed import NEVER, Steps, run_in_process, run_to_the_end

from cellmill.config.options import VocabularyOptions
from cellmill.data import saved_work
from cellmill.data.genes import build, passes
from cellmill.stages import data as stage

BLOCKS_SAVED = 3
BY_CONTENT = '{"val_frac": 0.2, "test_frac": 0.2}'
BY_COLUMN = '{"split_by": "batch", "val_frac": 0, "test_frac": 0.5}'


@pytest.fixture(scope="module")
def halves(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """600 simulated cells in two files, of 8 and 11 blocks, the last ones incomplete."""
    folder = tmp_path_factory.mktemp("halves")
    data = ad.read_h5ad(simulated)
    paths = [folder / "a.h5ad", folder / "b.h5ad"]
    for path, half in zip(paths, (data[:250], data[250:, ::-1])):
        half.copy().write_h5ad(path)
    return paths


def run_stage(
    cells: list[Path],
    out: Path,
    killed_after: int,
    select: str = "seurat",
    split: str = "",
    genes: Path | None = None,
) -> int | None:
    """Run stage `vocabulary` in a process that kill -9 ends after a number of counted blocks.

    Return how many it counted, and None if it was killed.
    """
    return run_in_process(count, out, cells, out, killed_after, select, split, genes)


def count(
    cells: list[Path], out: Path, killed_after: int, select: str, split: str, genes: Path | None
) -> None:
    steps = Steps(killed_after)
    add = build.Moments.add

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "BLOCK", 32)
        patched.setattr(saved_work, "SAVE_EVERY", 32 * BLOCKS_SAVED)
        patched.setattr(build.Moments, "add", lambda *given: steps.take(add, *given))
        chosen = {"select": select, "max_genes": 50, "variability": True, "quantiles": True}
        chosen |= {} if genes is None else {"genes": str(genes)}
        options = VocabularyOptions.model_validate({"vocabulary": chosen})
        stage.vocabulary(options=options, cells=cells, out=out, split=split or None)
    steps.write(out)


@pytest.mark.parametrize(
    ("select", "split", "killed_after"),
    [
        ("seurat", "", (5, 6)),
        ("seurat", BY_CONTENT, (10,)),
        ("detected", BY_COLUMN, (8,)),
        ("seurat_v3", "", (12, 9, 4)),
        pytest.param("seurat_v3", BY_CONTENT, (18, 0, 5, 7), marks=pytest.mark.full),
    ],
)
def test_a_killed_vocabulary_is_resumed_bit_for_bit(
    halves: list[Path], tmp_path: Path, select: str, split: str, killed_after: tuple[int, ...]
) -> None:
    if select == "seurat_v3":
        pytest.importorskip("skmisc")
    whole = tmp_path / "whole" / "vocabulary.tsv"
    total = run_stage(halves, whole, NEVER, select, split)
    assert total == (38 if select == "seurat_v3" else 19)
    out = tmp_path / "resumed" / "vocabulary.tsv"
    counted = run_to_the_end(lambda n: run_stage(halves, out, n, select, split), out, killed_after)
    # each kill loses the blocks since the last save; the last block of a file counts for less
    assert total <= counted <= total + BLOCKS_SAVED * len(killed_after)
    assert out.read_bytes() == whole.read_bytes()
    assert {path.name for path in out.parent.iterdir()} == {out.name, "vocabulary.counted"}


@pytest.mark.parametrize(
    "changed", ["cells", "order", "options", "split", "genes", "damage", "nothing"]
)
def test_sums_of_other_inputs_are_not_resumed(
    halves: list[Path], tmp_path: Path, changed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cells = [tmp_path / path.name for path in halves]
    for path, half in zip(cells, halves):
        path.write_bytes(half.read_bytes())
    out = tmp_path / "vocabulary.tsv"
    genes = tmp_path / "genes.txt" if changed == "genes" else None
    if genes is not None:
        names = ad.read_h5ad(halves[0], backed="r").var_names
        genes.write_text("\n".join(names))
    assert run_stage(cells, out, 7, genes=genes) is None
    saved = tmp_path / ".vocabulary.tsv.partial.first"
    select = "seurat"
    split = ""
    if changed == "cells":
        os.utime(cells[1])
    elif changed == "order":
        cells.reverse()
    elif changed == "options":
        select = "detected"
    elif changed == "split":
        split = BY_CONTENT
    elif genes is not None:
        genes.write_text("\n".join(names[100:]))
    elif changed == "damage":
        saved.write_bytes(saved.read_bytes()[:-9])
    capfd.readouterr()
    assert run_stage(cells, out, NEVER, select, split, genes) == (
        13 if changed == "nothing" else 19
    )
    reasons: dict[str, str | None] = {
        "nothing": None,
        "damage": "damaged",
        "options": "changed: vocabulary",
        "genes": "changed: genes",
    }
    reason = reasons.get(changed, "changed: split" if split else "changed: files")
    line = f"{out}: what a killed process saved is not used ({reason}); the work begins again\n"
    assert capfd.readouterr().err == ("" if reason is None else line)
    if select == "seurat" and not split and genes is None:
        assert out.read_bytes() == own_text(tmp_path, cells)


def own_text(folder: Path, cells: list[Path]) -> bytes:
    """The vocabulary of a process that was not killed."""
    out = folder / "own.tsv"
    assert run_stage(cells, out, NEVER) == 19
    return out.read_bytes()


def test_a_small_corpus_saves_no_sums(halves: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "vocabulary.tsv"
    build.build_vocabulary(halves, out=out)
    assert not [*tmp_path.iterdir()]
