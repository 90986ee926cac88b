"""The shape of the package: import layers, no circles, unique names, no import inside a function, light modules."""

import ast
import subprocess
import sys

import pytest

from tools import house

HEAVY = ("torch", "pandas", "anndata", "h5py", "scipy", "sklearn", "matplotlib", "numpy")
LATE = (
    *("anndata", "pandas", "umap", "sklearn", "numba", "scipy.stats", "scipy.optimize", "sympy", "torch._dynamo"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.tensor"),
)
"""Modules that take 0.1 to 1.5 s to import."""
TREES = house.parse()


def test_imports_point_right_only() -> None:
    assert list(house.wrong_layers(TREES)) == []


def test_imports_form_no_circle() -> None:
    assert house.circle(TREES) == []


def test_no_public_class_name_exists_twice() -> None:
    assert list(house.classes_twice(TREES)) == []


def test_private_names_of_other_packages_are_in_one_module() -> None:
    assert list(house.foreign_private(TREES)) == []


def trees(**sources: str) -> house.Trees:
    """Modules of a small package; `data_a` is cellmill.data.a."""
    return {f"cellmill.{name.replace('_', '.')}": ast.parse(text) for name, text in sources.items()}


def test_a_broken_law_is_found() -> None:
    left = trees(data_a="import torch\nfrom cellmill.models import b", models_b="", runs_c="class Run: ...")
    assert list(house.wrong_layers(left)) == ["cellmill.data.a:2 imports cellmill.models.b"]
    beside = trees(stages_a="def f():\n    from cellmill.commands.b import g", commands_b="")
    assert list(house.wrong_layers(beside)) == ["cellmill.stages.a:2 imports cellmill.commands.b.g"]
    assert list(house.wrong_layers(trees(cellar_a=""))) == ["cellmill.cellar.a belongs to no layer"]
    for_a_type = "if TYPE_CHECKING:\n    from cellmill.data.a import A"
    assert set(house.circle(trees(data_a="from cellmill.data import b", data_b=for_a_type))) == {
        "cellmill.data.a",
        "cellmill.data.b",
    }
    twice = trees(data_a="class Run: ...\nclass _Own: ...", runs_a="class Run: ...\nclass _Own: ...", stages_a="")
    assert list(house.classes_twice(twice)) == ["Run: cellmill.data.a, cellmill.runs.a"]
    assert list(house.full_folders(trees(**{f"data_a{i}": "" for i in range(16)}))) == ["cellmill.data: 16 files"]
    assert list(house.full_folders(trees(**{f"data_a{i}": "" for i in range(15)}))) == []
    once = "def _a(): return 1\ndef _b(): return 2\ndef f(): return _a() + _b() + _b()"
    assert house.called_once(trees(data_a=once)) == ["cellmill.data.a._a"]
    private = trees(data_a="from torch._a import b\nx._cdata", data_b="x._own = 1", data_c="x._own\nos._exit(1)")
    assert list(house.foreign_private(private)) == [
        "cellmill.data.a:1 imports torch._a.b",
        "cellmill.data.a:2 uses x._cdata",
    ]
    assert house.riddles(trees(data_a='"""What it is."""', data_b='"""Offset of a block."""')) == ["cellmill.data.a:1"]


def test_no_import_hides_inside_a_function() -> None:
    functions = [
        (name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, house.Function)
    ]
    hidden = [f"{name}:{line.lineno}" for name, node in functions for line, _ in house.imports_of(node)]
    assert hidden == [], f"imports inside functions: {hidden}"


def loaded_by(*names: str, among: tuple[str, ...] = HEAVY, then: str = "") -> set[str]:
    """Packages that are in memory after a fresh Python has imported these modules and run the lines `then`."""
    lines = [f"import {name}" for name in names]
    code = "\n".join([*lines, then, "import sys", f"print(*[name for name in {among!r} if name in sys.modules])"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def in_layers(*layers: str) -> list[str]:
    return [name for name in TREES if name.partition(".")[2].split(".")[0] in layers]


def test_the_workflow_and_the_launcher_import_light_modules_only() -> None:
    light = in_layers("cli", "launch", "config", "files", "errors")
    assert "cellmill.config.parts.families" in light
    assert loaded_by(*(name for name in light if name != "cellmill.launch.agent")) == set()  # it is a job's process


@pytest.mark.parametrize("layer", ["data", "track"])
def test_the_layer_imports_no_torch(layer: str) -> None:
    extras = "cellmill.track.to_"  # each imports a package that may be absent
    assert "torch" not in loaded_by(*(name for name in in_layers(layer) if not name.startswith(extras)))


@pytest.mark.parametrize("module", ["stages.data", "stages.report", "commands.preflight"])
def test_the_module_imports_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"cellmill.{module}")


@pytest.mark.parametrize(
    ("module", "used"),
    [("stages.train", {"numpy", "submitit"}), ("commands.status", set()), ("commands.run", set())],
)
def test_a_launcher_and_the_commands_on_runs_import_no_heavy_library(module: str, used: set[str]) -> None:
    # a launcher's memory is that of its imports, and a workflow may have hundreds of it
    assert loaded_by(f"cellmill.{module}", among=(*HEAVY, "submitit")) == used


def test_the_process_that_walks_an_input_first_imports_h5py_alone() -> None:
    assert loaded_by("cellmill.data.inputs.h5_walk") == {"h5py", "numpy"}  # one starts for each input that is opened


@pytest.mark.parametrize(
    ("stage", "used"),
    [
        ("data", {"anndata", "pandas"}),
        ("train", set()),
        ("plan", {"sympy", "torch.distributed.tensor"}),
        ("export", {"anndata", "pandas", "sympy", "torch.distributed.tensor", "torch.distributed.checkpoint"}),
        ("cells", {"anndata", "pandas"}),
        ("report", set()),
    ],
)
def test_a_stage_imports_no_slow_module_that_it_does_not_use(stage: str, used: set[str]) -> None:
    assert loaded_by(f"cellmill.stages.{stage}", among=LATE) <= used


def test_a_rank_imports_no_slow_module_that_it_does_not_use() -> None:
    used = {"sympy", "torch.distributed.tensor", "torch.distributed.checkpoint"}
    assert loaded_by("cellmill.train.worker", among=LATE) <= used


def test_a_model_is_built_and_filled_without_the_compiler_and_tensors_of_a_mesh() -> None:
    lines = (
        "from cellmill.models.build import build",
        "from cellmill.parallel.materialize import to_empty",
        "from tests.models import spec",
        "to_empty(build(spec(9)), 'cpu')",
    )
    assert loaded_by(among=LATE, then="\n".join(lines)) == set()
