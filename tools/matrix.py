"""The demo, every stage and `make test` with the oldest and the newest versions that pyproject.toml
allows.

    python tools/matrix.py                                       both sets, each in a virtual environment of its own
    python tools/matrix.py newest --stages --bridges --constraint torch==2.13.0 --keep

The oldest set has the lowest version of each range, on Python 3.11; the newest has what pip takes,
on the newest Python of PATH or pyenv. Every stage is the project `.test/stages`: its runs, what is
made on request, and the commands that are no rule; with `--bridges` also each bridge whose package
installs, in an environment of its own. `--stages` leaves out the tests, `--demo` the stages as
well. An environment takes up to 7 GB where the index has torch for CUDA only, and is removed after
its tests. Prints a table; exit code 1 if anything failed, but for a package of a bridge that does
not install.
"""

import argparse
import os
import re
import shlex
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
EXTRAS = "demo,cluster,integrate"
CELLS = "cellmill simulate --out data/sim.h5ad --cells 300 --genes 150 --types 3 --batches 2 --perturbations 4 --seed 1"
RESULTS = "results/runs"
TARGETS = (
    "all",
    f"{RESULTS}/adapted/predictions/sim.h5ad",
    f"{RESULTS}/profile/knock_out/sim.h5ad",
    f"{RESULTS}/profile/map/sim.h5ad",
    f"{RESULTS}/response/changes/sim.h5ad",
    "results/sweeps/seeds/results.csv",
)
COMMANDS = (
    f"cellmill generate --model {RESULTS}/drawn/model --cells 4 --out made/generated.h5ad",
    f"cellmill embed --run profile --model {RESULTS}/profile/model --input data/sim.h5ad --append --out made/sim.h5ad",
    "cellmill unpack results/corpora/sim/shards/train-00000.h5ad --out made/shard.h5ad",
    "cellmill status",
)
BRIDGES = {
    "scib-metrics": f"{RESULTS}/profile/bridges/sim.scib-metrics.json",
    "cz-benchmarks": f"{RESULTS}/profile/bridges/sim.cz-benchmarks.json",
    "cell-eval": f"{RESULTS}/response/bridges/sim.cell-eval.json",
    "cell-eval2": f"{RESULTS}/response/bridges/sim.cell-eval2.json",
}


def interpreter(version: str) -> str | None:
    """Path of a Python of this version, from PATH or pyenv's folder; None if there is none."""
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, of_pyenv)):
        # pyenv puts a stub on the PATH also for versions that are not chosen
        if (
            path
            and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0
        ):
            return path
    return None


def lowest() -> list[str]:
    """Constraints: the lower end of each range of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    ends = {
        r.name: s.version
        for r in map(Requirement, listed)
        for s in r.specifier
        if s.operator == ">="
    }
    return [f"{name}=={version}" for name, version in ends.items()]


def install(python: str, folder: Path, extras: str, constraints: list[str]) -> None:
    """Make the environment. Raises CalledProcessError with pip's last words."""
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, text=True)
    (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
    pip = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "requires"
    ]
    words = [
        *pip,
        "--constraint",
        folder / "constraints.txt",
        "--editable",
        f"{ROOT}[{extras}]",
        *built,
    ]
    subprocess.run(words, check=True, capture_output=True, text=True)


def versions(python: Path) -> list[str]:
    """Installed versions of Python and the packages of the table."""
    code = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {SHOWN}))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


def run(words: list[str | Path], folder: Path, log: Path, cwd: Path) -> tuple[bool, str]:
    """Whether the command ended well, and its minutes; output goes to the log."""
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(
            words, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    minutes = f"{(time.monotonic() - began) / 60:.1f} min"
    return ended == 0, minutes if ended == 0 else f"failed: {log}"


def stages(folder: Path) -> tuple[bool, str]:
    """Whether every stage of `.test/stages` ended well, and their minutes or the log of the first
    that did not.
    """
    work = folder / "stages"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ROOT / ".test" / "stages" / "config", work / "config")
    snakemake = f"snakemake --snakefile {shlex.quote(str(ROOT / 'Snakefile'))} --cores 2"
    began = time.monotonic()
    for number, line in enumerate(
        (CELLS, *(f"{snakemake} -- {target}" for target in TARGETS), *COMMANDS)
    ):
        program, *words = shlex.split(line)
        log = folder.with_name(f"{folder.name}.stages-{number}.log")
        ended_well, minutes = run([folder / "bin" / program, *words], folder, log, work)
        if not ended_well:
            return False, f"`{line}` {minutes}"
    return True, f"{(time.monotonic() - began) / 60:.1f} min"


def bridges(folder: Path, python: str) -> tuple[bool, str]:
    """Whether each bridge whose package installs ended well, and what became of each."""
    results = []
    whole = True
    for name, target in BRIDGES.items():
        own = folder / "bridges" / name
        needed = re.findall(
            r"- (\S+==\S+)", (ROOT / "envs" / f"bridge-{name}.yaml").read_text(encoding="utf-8")
        )
        try:
            subprocess.run([python, "-m", "venv", own], check=True, capture_output=True)
            pip = [own / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
            subprocess.run([*pip, *needed], check=True, capture_output=True)
        except subprocess.CalledProcessError:
            results.append(f"{name}: does not install")
            continue
        words: list[str | Path] = ["--snakefile", ROOT / "Snakefile", "--cores", "2"]
        words += ["--config", f'bridges={{"{name}": {own / "bin" / "python"}}}', "--", target]
        log = folder.with_name(f"{folder.name}.bridge-{name}.log")
        ended_well, minutes = run(
            [folder / "bin" / "snakemake", *words], folder, log, folder / "stages"
        )
        whole = whole and ended_well
        results.append(f"{name}: {minutes}")
    return whole, "; ".join(results)


def row(name: str, folder: Path, given: argparse.Namespace) -> tuple[bool, str]:
    """Whether all went well in one set, and its row of the table."""
    found = [python for version in PYTHONS if (python := interpreter(version))]
    python = found[-1 if name == "newest" else 0]
    set_by_user = {re.split("[=<>~!]", constraint)[0] for constraint in given.constraint}
    constraints = (
        [] if name == "newest" else [c for c in lowest() if c.partition("==")[0] not in set_by_user]
    )
    began = time.monotonic()
    if not (folder / "installed").exists():
        try:
            extras = "demo" if given.demo else EXTRAS if given.stages else f"{EXTRAS},dev,hvg"
            install(python, folder, extras, constraints + given.constraint)
        except subprocess.CalledProcessError as error:
            return (
                False,
                f"| {name} | not installed: {(error.stderr or str(error)).strip().splitlines()[-1]} |",
            )
        (folder / "installed").touch()
    cells = [
        name,
        *versions(folder / "bin" / "python"),
        f"{(time.monotonic() - began) / 60:.1f} min",
    ]
    work = folder / "demo"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(ROOT / "config", work / "config")
    words: list[str | Path] = [
        "--snakefile",
        ROOT / "Snakefile",
        "--profile",
        ROOT / "profiles" / "local",
    ]
    whole, minutes = run(
        [folder / "bin" / "snakemake", *words], folder, folder.with_suffix(".demo.log"), work
    )
    cells.append(minutes)
    if not given.demo:
        ended_well, outcome = stages(folder)
        whole = whole and ended_well
        cells.append(outcome)
    if given.bridges:
        ended_well, outcome = bridges(folder, python)
        whole = whole and ended_well
        cells.append(outcome)
    if not (given.demo or given.stages):
        pytest = [
            folder / "bin" / "python",
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            "-m",
            "not full",
        ]
        passed, minutes = run(pytest, folder, folder.with_suffix(".tests.log"), ROOT)
        whole = whole and passed
        cells.append(minutes)
    return whole, f"| {' | '.join(cells)} |"


def main() -> int:
    """Print a row for each set as soon as its tests have ended; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help="oldest, newest (default: both)")
    parser.add_argument("--demo", action="store_true", help="the demo alone")
    parser.add_argument(
        "--stages", action="store_true", help="the demo and every stage, without the tests"
    )
    parser.add_argument("--bridges", action="store_true", help="each bridge too; needs the stages")
    parser.add_argument(
        "--constraint", nargs="+", default=[], help="versions besides, such as torch==2.13.0"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".matrix", help="of environments and logs"
    )
    parser.add_argument(
        "--keep", action="store_true", help="do not remove environments; one that exists is used"
    )
    given = parser.parse_args()
    unknown = set(given.sets) - {"oldest", "newest"}
    if unknown:
        parser.error(f"expected oldest or newest, got {', '.join(sorted(unknown))}")
    if given.bridges and given.demo:
        parser.error("--bridges needs the stages, which --demo leaves out")
    head = ["set", "Python", *SHOWN, "installation", "demo"]
    head += [] if given.demo else ["every stage"]
    head += ["bridges"] if given.bridges else []
    head += [] if given.demo or given.stages else ["make test"]
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
