"""The shape of the code: imports go one way, importing the package is cheap, tests lie where the code lies."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "replayssm"

# A part may import from parts before it, never from parts after it. Parts in one group may import each other.
ORDER = (
    ("errors", "spec", "dtypes", "checks", "shipped"),
    ("planner",),
    ("reference",),
    ("kernels",),
    ("ops",),
    ("state",),
    ("models",),
    ("engine",),
    ("server",),
    ("bench",),
    ("study",),
    ("integrations",),
    ("cli",),
)
LEVEL = {part: i for i, group in enumerate(ORDER) for part in group}


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> set[str]:
    """Parts of the package that a module imports anywhere, under TYPE_CHECKING and inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("replayssm."):
            names.add(node.value)  # a module named for importlib
    parts = {name.split(".")[1] for name in names if name.startswith("replayssm.")}
    return parts & LEVEL.keys()


def violations(sources: dict[Path, str]) -> list[str]:
    found = []
    for path, text in sources.items():
        mine = part_of(path)
        for part in sorted(imported_parts(ast.parse(text))):
            if LEVEL[part] > LEVEL[mine] or (mine == "kernels" and part == "reference"):
                found.append(f"{path.relative_to(SRC)} imports {part}")
    return found


def sources() -> dict[Path, str]:
    return {p: p.read_text(encoding="utf-8") for p in SRC.rglob("*.py") if part_of(p) != "__init__"}


def test_every_part_has_a_place_in_the_order():
    unknown = {part_of(p) for p in SRC.rglob("*.py")} - LEVEL.keys() - {"__init__"}
    assert not unknown


def test_imports_go_one_way():
    assert violations(sources()) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("reference/x.py", "from replayssm.kernels import choose"),
        ("reference/x.py", "from replayssm import ops"),
        ("kernels/x.py", "def f():\n    import replayssm.ops.decode"),
        ("kernels/x.py", "import importlib\nimportlib.import_module('replayssm.models.cache')"),
        ("kernels/x.py", "from replayssm.reference import serial"),
        ("errors.py", "from replayssm.models import cache"),
    ],
)
def test_the_rule_can_fail(file, text):
    assert len(violations({SRC / file: text})) == 1


def test_the_package_itself_imports_only_the_base_and_exports_lazily():
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imported_parts(ast.Module(top, [])) <= {"errors", "spec", "dtypes"}

    import replayssm

    for name in replayssm.__all__:
        assert getattr(replayssm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        replayssm.nonsense  # noqa: B018


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_no_torch_and_is_fast():
    code = (
        "import sys, time; start = time.process_time(); import replayssm;"
        "print(time.process_time() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    seconds, torch, numpy = min(run_python(code).split() for _ in range(3))
    assert (torch, numpy) == ("False", "False")
    assert float(seconds) < 0.3


LIGHT = ["spec", "errors", "dtypes", "checks", "shipped", "planner.report", "kernels.policy", "engine.params", "cli"]
LIGHT += ["engine.options", "cli.speculation", "planner.request"]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_need_no_torch(module):
    assert run_python(f"import sys, replayssm.{module}; print('torch' in sys.modules)").strip() == "False"


def test_tests_mirror_the_source():
    tests = ROOT / "tests"
    for folder in (p for p in tests.rglob("*") if p.is_dir() and any(p.glob("test_*.py"))):
        assert (SRC / folder.relative_to(tests)).is_dir(), f"{folder} tests no folder of src/replayssm"
