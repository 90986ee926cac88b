"""The cluster shared by the tests of this folder. There is one at a time, so all run in one worker
of pytest-xdist.

The tests are those of a normal user, whose cluster root serves (`tests/cluster/serve.py`). Without
it they are skipped, with what to run; with CELLMILL_REQUIRE_CLUSTER=1, as in CI, they fail.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.serve import VARIABLE, ServedRig
from tests.distributed.conftest import corpus
from tests.workflow.conftest import cells

__all__ = ["cells", "corpus"]

_started: list[ServedRig] = []


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker for all, and accounting last: the cluster is then changed once."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.xdist_group("cluster"))
        item.add_marker(pytest.mark.timeout(1800))  # several jobs in a row on a busy machine
    ordered = sorted(
        here, key=lambda item: "rig_with_accounting" in getattr(item, "fixturenames", ())
    )
    places = [index for index, item in enumerate(items) if item in set(here)]
    for index, item in zip(places, ordered):
        items[index] = item


@pytest.fixture(scope="module")
def rig(_end: None) -> ServedRig:
    """Four nodes without accounting: squeue alone knows of jobs."""
    return _rig(accounting=False)


@pytest.fixture(scope="module")
def rig_with_accounting(_end: None) -> ServedRig:
    """The same with slurmdbd on MariaDB, so that sacct works."""
    return _rig(accounting=True)


@pytest.fixture(scope="session")
def _end() -> Iterator[None]:
    yield
    while _started:
        _started.pop().stop()


def _rig(accounting: bool) -> ServedRig:
    if _started and _started[0].accounting == accounting:
        return _started[0]
    why = why_no_cluster()
    if why is not None:
        if os.environ.get("CELLMILL_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"no test cluster: {why}")
        pytest.skip(why)
    while _started:
        _started.pop().stop()
    _started.append(ServedRig(accounting=accounting))
    _started[0].start()
    return _started[0]


def why_no_cluster() -> str | None:
    """What is missing for these tests; None if nothing is."""
    if os.getuid() == 0:
        return "users of a cluster are not root: run these tests as a normal user"
    if VARIABLE not in os.environ:
        return f"no {VARIABLE} in the environment: tests/cluster/serve.py says how root starts it"
    return None
