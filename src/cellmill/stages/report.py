"""report: one self-contained page over all runs and corpora."""

from pathlib import Path

from cellmill.config.options import ReportOptions
from cellmill.files import write_text
from cellmill.report.collect import read_corpus, read_run
from cellmill.report.page import render


def run(*, options: ReportOptions, runs: list[Path], corpora: list[Path], out: Path) -> None:
    """Write the page over the folders `runs` and `corpora` to `out` (index.html)."""
    write_text(out, render(options.report.title, [*map(read_run, runs)], [*map(read_corpus, corpora)]))
    print(f"report of {', '.join(path.resolve().name for path in runs)} -> {out}")
