"""What every kind of test may use."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.checks")  # its assertions then show what differs
PLUGIN = Path(__file__).resolve().parent / "plugin"


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start have the filters of warnings of pyproject.toml too."""
    os.environ["PYTHONWARNINGS"] = ",".join(config.getini("filterwarnings"))
    # numba colours the texts of its errors by colorama, which sets sys.stdout back to that of an
    # earlier test
    os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"


ORDER = ("cluster", "workflow", "distributed", "house", "unit")
"""Folders of tests, the longest groups first: pytest-xdist hands them out in this order
(--no-loadscope-reorder).
"""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups that one worker runs alone begin first, and single tests fill the end."""
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(Path(__file__).parent).parts[0]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that is skipped without a reason fails: nobody would know what was not tested."""
    outcome: Any = yield
    report = outcome.get_result()
    reason = (
        report.longrepr[2]
        if report.skipped and isinstance(report.longrepr, tuple)
        else "Skipped: -"
    )
    if not reason.removeprefix("Skipped: ").strip():
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped without a reason"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what only root can test, and fail groups that pytest-xdist does not keep together.

    As 3.8 with pytest 9.2, which would start two test clusters. Every test begins with the threads
    that the environment asks for: numba, in UMAP, leaves torch with those of all cores.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    torch = sys.modules.get("torch")
    if threads is not None and torch is not None:
        torch.set_num_threads(int(threads))
    if item.get_closest_marker("needs_root") and os.getuid() != 0:
        pytest.skip("only root can act as another user")
    grouped = item.get_closest_marker("xdist_group") and getattr(
        item.config.option, "loadgroup", False
    )
    if grouped and "@" not in item.nodeid:
        pytest.fail(
            f"pytest-xdist ignores the group of {item.nodeid}: its version or pytest's is wrong",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that find the toys, which pip installs into a folder; this process
    does not.
    """
    folder = tmp_path_factory.mktemp("plugins")
    source = folder / "source"
    target = folder / "site"
    shutil.copytree(
        PLUGIN, source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "build")
    )
    flags = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
    ]
    words = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(source)]
    # pip warns of itself
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    subprocess.run(words, check=True, env=quiet)
    path = os.pathsep.join(part for part in (str(target), os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
