"""The demo and `make test` with the oldest and the newest versions that pyproject.toml allows; prints a table.

    python tools/matrix.py                                       both sets, each in a virtual environment of its own
    python tools/matrix.py newest --demo --constraint torch==2.13.0 --keep

The oldest set has the lowest version of each range, on Python 3.11; the newest has what pip takes, on the newest Python
of PATH or pyenv. `--demo` leaves out the tests. An environment takes up to 7 GB where the index has
torch for CUDA only, and is removed after its tests. Exit code 1 if anything failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
SHOWN = ("numpy", "pandas", "anndata", "torch")


def interpreter(version: str) -> str | None:
    """Path of a Python of this version, from PATH or pyenv's folder; None if there is none."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, of_pyenv)):
        # pyenv puts a stub on the PATH also for versions that are not chosen
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return path
    return None


def lowest() -> list[str]:
    """Constraints: the lower end of each range of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    ends = {r.name: s.version for r in map(Requirement, listed) for s in r.specifier if s.operator == ">="}
    return [f"{name}=={version}" for name, version in ends.items()]


def install(python: str, folder: Path, extras: str, constraints: list[str]) -> None:
    """Make the environment. Raises CalledProcessError with pip's last words."""
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, text=True)
    (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    words = [*pip, "--constraint", folder / "constraints.txt", "--editable", f"{ROOT}[{extras}]", *built]
    subprocess.run(words, check=True, capture_output=True, text=True)


def versions(python: Path) -> list[str]:
    """Installed versions of Python and the packages of the table."""
    code = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {SHOWN}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def run(words: list[str | Path], folder: Path, log: Path, cwd: Path) -> tuple[bool, str]:
    """Whether the command ended well, and its minutes; output goes to the log."""
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(words, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    minutes = f"{(time.monotonic() - began) / 60:.1f} min"
    return ended == 0, minutes if ended == 0 else f"failed: {log}"


def row(name: str, folder: Path, given: argparse.Namespace) -> tuple[bool, str]:
    """Whether all went well in one set, and its row of the table."""
    found = [python for version in PYTHONS if (python := interpreter(version))]
    python = found[-1 if name == "newest" else 0]
    set_by_user = {re.split("[=<>~!]", constraint)[0] for constraint in given.constraint}
    constraints = [] if name == "newest" else [c for c in lowest() if c.partition("==")[0] not in set_by_user]
    began = time.monotonic()
    if not (folder / "installed").exists():
        try:
            install(python, folder, "demo" if given.demo else "demo,dev,hvg", constraints + given.constraint)
        except subprocess.CalledProcessError as error:
            return False, f"| {name} | not installed: {(error.stderr or str(error)).strip().splitlines()[-1]} |"
        (folder / "installed").touch()
    cells = [name, *versions(folder / "bin" / "python"), f"{(time.monotonic() - began) / 60:.1f} min"]
    work = folder / "demo"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ROOT / "config", work / "config")
    words: list[str | Path] = ["--snakefile", ROOT / "Snakefile", "--profile", ROOT / "profiles" / "local"]
    whole, minutes = run([folder / "bin" / "snakemake", *words], folder, folder.with_suffix(".demo.log"), work)
    cells.append(minutes)
    if not given.demo:
        pytest = [folder / "bin" / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-m", "not full"]
        passed, minutes = run(pytest, folder, folder.with_suffix(".tests.log"), ROOT)
        whole = whole and passed
        cells.append(minutes)
    return whole, f"| {' | '.join(cells)} |"


def main() -> int:
    """Print a row for each set as soon as its tests have ended; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help="oldest, newest (default: both)")
    parser.add_argument("--demo", action="store_true", help="without the tests")
    parser.add_argument("--constraint", nargs="+", default=[], help="versions besides, such as torch==2.13.0")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="of environments and logs")
    parser.add_argument("--keep", action="store_true", help="do not remove environments; one that exists is used")
    given = parser.parse_args()
    if unknown := set(given.sets) - {"oldest", "newest"}:
        parser.error(f"expected oldest or newest, got {', '.join(sorted(unknown))}")
    head = ["set", "Python", *SHOWN, "installation", "demo", *([] if given.demo else ["make test"])]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    results = []
    for name in given.sets or ("oldest", "newest"):
        folder = given.folder.resolve() / name
        whole, line = row(name, folder, given)
        print(line, flush=True)
        results.append(whole)
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
