"""report: one self-contained page over all runs and corpora."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cellmill.config.options import ReportOptions
from cellmill.errors import DataError, UserError
from cellmill.files import write_text
from cellmill.registry import in_one_line
from cellmill.report.collect import damaged_file, read_corpus, read_run, read_sweep
from cellmill.report.drawing import Drawings
from cellmill.report.page import render


def run(
    *, options: ReportOptions, runs: list[Path], corpora: list[Path], out: Path, sweeps: Sequence[Path] = ()
) -> None:
    """Write the page over the folders `runs` and `corpora` to `out` (index.html), with the curves of `sweeps`.

    Each figure is beside it, in figures/, as SVG and its data as CSV.
    """
    show = partial(render, options.report.title, sweeps=[read_sweep(path) for path in sweeps])
    reported, described = [*map(read_run, runs)], [*map(read_corpus, corpora)]
    drawn = Drawings()
    try:
        page = show(reported, described, drawings=drawn)
    except UserError:
        raise
    except Exception as error:
        if (file := damaged_file(zip(runs, reported), zip(corpora, described), show)) is None:
            raise
        raise DataError(f"{file}: damaged, or of another version ({in_one_line(error)}); make it again") from error
    write_text(out, page)
    drawn.save(out.parent / "figures")
    print(f"report of {', '.join(path.resolve().name for path in runs)} -> {out}")
