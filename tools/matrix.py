"""Tests under other versions of Python and torch, each pair in a virtual environment of its own; prints a table.

    python tools/matrix.py                    each minor version of torch that pyproject.toml allows
    python tools/matrix.py 3.12:2.15 --keep   Python 3.12 with the newest torch 2.15; the environment stays

Without pairs, the installed ones of Python 3.11 to 3.13 take turns. Other packages have the versions of
envs/requirements.lock. An environment takes up to 7 GB where the index has torch for CUDA only, and is removed after
its tests. Exit code 1 if any test failed or a pair could not be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TESTS = ("tests/unit", *(f"tests/distributed/test_{name}.py" for name in ("conformance", "checkpoints")))
SHOWN = 3  # failed tests in the table; the log has all


@dataclass(frozen=True)
class Pair:
    """A version of Python and a minor version of torch."""

    python: str
    torch: str

    @classmethod
    def of(cls, text: str) -> Pair:
        """Parse "3.12:2.15"."""
        if not re.fullmatch(r"3\.\d+:2\.\d+", text):
            raise argparse.ArgumentTypeError(f"expected PYTHON:TORCH, such as 3.12:2.15, got {text}")
        return cls(*text.split(":"))


@dataclass
class Outcome:
    """Row of the table."""

    pair: Pair
    torch: str = ""
    """Installed version, with its build."""
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    """Failed tests, or why there are none."""

    def row(self) -> str:
        """Return the row in Markdown."""
        more = f" and {len(self.broken) - SHOWN} more" if len(self.broken) > SHOWN else ""
        numbers = [str(self.counts.get(name, "")) for name in ("passed", "failed", "skipped")]
        names = ", ".join(self.broken[:SHOWN]) + more
        return "| " + " | ".join([self.pair.python, self.torch, *numbers, f"{self.seconds:.0f}", names]) + " |"


def allowed_torch() -> list[str]:
    """Minor versions of torch 2 that pyproject.toml allows."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    bound = next(r.specifier for r in map(Requirement, listed) if r.name == "torch")
    return [version for version in (f"2.{minor}" for minor in range(100)) if bound.contains(version)]


def interpreter(version: str) -> str | None:
    """Path of a Python of this version, from PATH or pyenv's folder; None if there is none."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, of_pyenv)):
        # pyenv puts a stub on the PATH also for versions that are not chosen
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    return None


def default_pairs() -> Iterator[Pair]:
    """Each allowed torch with one of the interpreters in turn."""
    pythons = [version for version in PYTHONS if interpreter(version)]
    return (Pair(python, torch) for python, torch in zip(cycle(pythons), allowed_torch()))


def install(pair: Pair, folder: Path) -> None:
    """Make the environment: the lock with another torch. Raises CalledProcessError with pip's last words."""
    python = interpreter(pair.python)
    if python is None:
        raise subprocess.CalledProcessError(1, "python", stderr=f"no Python {pair.python} found")
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, text=True)
    lock = (ROOT / "envs" / "requirements.lock").read_text(encoding="utf-8").splitlines()
    # torch has a bound of its own for setuptools
    kept = [line for line in lock if not line.startswith(("torch==", "setuptools=="))]
    (folder / "requirements.txt").write_text("\n".join([*kept, f"torch=={pair.torch}.*", "setuptools>=77"]))
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for words in (["--requirement", folder / "requirements.txt"], ["--no-deps", "--no-build-isolation", "-e", ROOT]):
        subprocess.run([*pip, *words], check=True, capture_output=True, text=True)


def outcome_of(pair: Pair, folder: Path, tests: list[str]) -> Outcome:
    """Run the tests in the environment; output goes to `folder`.log."""
    python, began = str(folder / "bin" / "python"), time.monotonic()
    words = [python, "-c", "import torch; print(torch.__version__)"]
    outcome = Outcome(pair, torch=subprocess.run(words, capture_output=True, text=True).stdout.strip())
    results = folder.with_suffix(folder.suffix + ".xml")
    results.unlink(missing_ok=True)
    with folder.with_suffix(folder.suffix + ".log").open("w", encoding="utf-8") as log:
        words = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", f"--junitxml={results}", *tests]
        environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    outcome.seconds = time.monotonic() - began
    if not results.exists():
        outcome.broken = [f"pytest did not run: {log.name}"]
        return outcome
    cases = list(xml.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    outcome.counts = {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}
    outcome.broken = [case.get("name", "") for case in failed]
    if ended > 1:
        outcome.broken.append(f"pytest ended with {ended}: {log.name}")
    return outcome


def main() -> int:
    """Print a row for each pair as soon as its tests have ended; 1 if any is not whole."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("pairs", nargs="*", type=Pair.of, metavar="PYTHON:TORCH")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="of environments and logs")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files and folders")
    parser.add_argument("--keep", action="store_true", help="do not remove environments; one that exists is used")
    given = parser.parse_args()
    whole = True
    print("| Python | torch | passed | failed | skipped | seconds | failed tests |\n|---|---|---:|---:|---:|---:|---|")
    for pair in given.pairs or default_pairs():
        folder = given.folder.resolve() / f"python{pair.python}-torch{pair.torch}"
        try:
            if not (folder / "requirements.txt").exists():
                install(pair, folder)
            outcome = outcome_of(pair, folder, given.tests)
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if "WARNING" not in line]
            outcome = Outcome(pair, broken=[f"not installed: {lines[-1] if lines else error}"])
        print(outcome.row(), flush=True)
        whole = whole and not outcome.broken
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
