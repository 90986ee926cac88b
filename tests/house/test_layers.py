"""The shape of the package: import layers, no circles, unique names, no import inside a function,
light modules.
"""

import ast
import subprocess
import sys

import pytest

from tools import house

HEAVY = ("torch", "pandas", "anndata", "h5py", "scipy", "sklearn", "matplotlib", "numpy")
LATE = (
    *(
        "anndata",
        "pandas",
        "umap",
        "sklearn",
        "numba",
        "scipy.stats",
        "scipy.optimize",
        "sympy",
        "torch._dynamo",
    ),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.tensor"),
)
"""Modules that take 0.1 to 1.5 s to import."""
TREES = house.parse()


def test_the_laws_of_the_source_tree_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main([]) == 0, capsys.readouterr().out


def test_no_import_hides_inside_a_function() -> None:
    hidden = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, house.Function):
                hidden += [f"{name}:{line.lineno}" for line, _ in house.imports_of(node)]
    assert hidden == [], f"imports inside functions: {hidden}"


def loaded_by(*names: str, among: tuple[str, ...] = HEAVY, then: str = "") -> set[str]:
    """Packages that are in memory after a fresh Python has imported these modules and run the lines
    `then`.
    """
    lines = [f"import {name}" for name in names]
    code = "\n".join(
        [*lines, then, "import sys", f"print(*[name for name in {among!r} if name in sys.modules])"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def in_layers(*layers: str, without: str = "cellmill.launch.agent") -> list[str]:
    """Modules of these layers, but for those whose name begins with `without`."""
    names = [name for name in TREES if name.partition(".")[2].split(".")[0] in layers]
    return [name for name in names if not name.startswith(without)]


CELLS = {"anndata", "pandas"}
SHARDED = {"sympy", "torch.distributed.tensor"}
TORCH = ("torch",)


@pytest.mark.parametrize(
    ("modules", "among", "used"),
    [
        # what the Snakefile and a waiting launcher read; the agent is a job's process
        (in_layers("cli", "launch", "config", "files", "errors"), HEAVY, set()),
        (in_layers("data"), TORCH, set()),
        # each tracker imports a package that may be absent
        (in_layers("track", without="cellmill.track.to_"), TORCH, set()),
        (["cellmill.commands.preflight"], TORCH, set()),
        # a launcher's memory is that of its imports, and a workflow may have hundreds of it
        (["cellmill.stages.train"], (*HEAVY, "submitit"), {"numpy", "submitit"}),
        (["cellmill.commands.status"], (*HEAVY, "submitit"), set()),
        (["cellmill.commands.watch"], (*HEAVY, "submitit"), set()),
        (["cellmill.commands.run"], (*HEAVY, "submitit"), set()),
        # one starts for each input that is opened
        (["cellmill.data.inputs.h5_walk"], HEAVY, {"h5py", "numpy"}),
        (["cellmill.stages.data"], (*TORCH, *LATE), CELLS),
        (["cellmill.stages.train"], LATE, set()),
        (["cellmill.stages.plan"], LATE, SHARDED),
        (["cellmill.stages.export"], LATE, {*CELLS, *SHARDED, "torch.distributed.checkpoint"}),
        (["cellmill.stages.cells"], LATE, CELLS),
        (["cellmill.stages.report"], (*TORCH, *LATE), set()),
        (["cellmill.train.worker"], LATE, {*SHARDED, "torch.distributed.checkpoint"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_modules_import_no_slow_library_that_they_do_not_use(
    modules: list[str], among: tuple[str, ...], used: set[str]
) -> None:
    assert modules
    assert loaded_by(*modules, among=among) <= used


def test_a_model_is_built_without_loading_the_compiler() -> None:
    lines = (
        "from cellmill.models.build import build",
        "from cellmill.parallel.materialize import to_empty",
        "from tests.models import spec",
        "to_empty(build(spec(9)), 'cpu')",
    )
    assert loaded_by(among=LATE, then="\n".join(lines)) == set()
