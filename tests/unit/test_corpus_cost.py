"""The plan of a corpus: its numbers follow the configuration, and its bytes are those of real shards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_corpus import genes_named, random_counts, vocabulary_of, write_dataset

from cellmill.cli import main
from cellmill.config.corpus import Preprocess, Shard
from cellmill.data.shards.writer import write_shards
from cellmill.planner.work import SHARD_BYTES, corpus_cost


def test_files_and_bytes_are_those_that_shard_writes(tmp_path: Path) -> None:
    counts, ids = random_counts(3000, 400), genes_named(400)
    path = write_dataset(tmp_path / "cells" / "one.h5ad", counts, ids)
    options = Shard(cells_per_shard=1000, val_frac=0, test_frac=0)
    manifest = write_shards([path], vocabulary_of(ids), options, tmp_path / "shards" / "manifest.json")
    planned = corpus_cost([3000], counts.nnz / 3000, Preprocess(), options)[-1]
    written = [
        manifest.path,
        *(manifest.shard_path(file) for split in manifest.splits.values() for file in split.files),
    ]
    assert planned.files == pytest.approx(len(written), abs=6)  # empty splits and levels
    n_bytes = sum(path.stat().st_size for path in written)
    assert planned.gigabytes * 1e9 - 3 * SHARD_BYTES == pytest.approx(n_bytes, rel=0.2)  # of var, here 400 genes


def test_more_jobs_shorten_the_longest_and_not_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, many = (corpus_cost([10**8], 2000, Preprocess(), Shard(jobs=jobs)) for jobs in (1, 100))
    assert [cost.stage for cost in many] == ["preprocess", "vocabulary", "divide", "shard_part", "shard"]
    assert sum(cost.cpu_hours for cost in many) == pytest.approx(sum(cost.cpu_hours for cost in one), abs=0.02)
    assert many[3].hours == pytest.approx(many[3].cpu_hours / 100, rel=0.02)
    (tmp_path / "t.tsv").write_text("dataset\tpath\na\ta.h5ad\nb\tb.h5ad\n")
    (tmp_path / "c.yaml").write_text(
        f"corpora: {{c: {{table: {tmp_path}/t.tsv}}}}\nruns: {{r: {{corpus: c, train: {{steps: 1}}}}}}\n"
    )
    given = ["plan_corpus", "--config", str(tmp_path / "c.yaml"), "--corpus"]
    assert main([*given, "c", "--cells", "100000000"]) == 0
    told = capsys.readouterr().out
    assert "100,000,000 cells of 2,000 genes in 2 files" in told
    assert re.search(r"^shard +1 ", told, re.M)
    assert main([*given, "d"]) == 2
    assert "no corpus 'd'" in capsys.readouterr().err
