"""The layers of DESIGN section 4, the purity of pure modules, and the size of files, read from the source with ast.

A module imports from lower tiers or its own package. An import counts wherever it stands: at the top, in a function,
under TYPE_CHECKING, or as the name of a module in a string (a table for importlib).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shares import IMPURE as IMPURE_IN_TESTS
from shares import PURE as PURE_TESTS
from timing import scaled

SOURCE = Path(__file__).parent.parent / "src"

#: From the bottom to the top. Units of one tier do not import each other, except in SHARED.
TIERS: dict[str, list[str]] = {
    "L0 ground": ["rankmesh.errors", "rankmesh.config", "rankmesh.buffers", "rankmesh.trace"],
    "L1 bytes": ["rankmesh.wire", "rankmesh.transport", "rankmesh.codec"],
    "L2 endpoint": ["rankmesh.endpoint"],
    "L3 services": [
        "rankmesh.rpc", "rankmesh.memory", "rankmesh.collectives", "rankmesh.membership", "rankmesh.topology",
    ],
    "L4 node": ["rankmesh.node"],
    "L4 group": ["rankmesh.group"],
    "L4 mesh": ["rankmesh.mesh"],
    "L4 public names": ["rankmesh"],
    "L5 integrations": ["rankmesh.torch", "rankmesh.ray", "rankmesh.launch"],
    "L6 command line": ["rankmesh.cli"],
    "L6 python -m": ["rankmesh.__main__"],
}  # fmt: skip
SHARED = {"L0 ground"}
#: May import anything, and nothing but itself and users' tests imports it.
EXEMPT = "rankmesh.testing"

PURE = (
    "rankmesh.wire", "rankmesh.endpoint.matching", "rankmesh.endpoint.lanes", "rankmesh.torch.rounds",
    *(f"rankmesh.collectives.{name}" for name in (
        "plan", "ring", "pipelined_ring", "recursive_doubling", "halving_doubling", "binomial", "kary", "bruck",
        "neighbour", "pairwise", "dissemination", "direct", "scatter_gather", "hierarchical", "scan", "simulator",
        "symmetry", "choosing", "space", "staging", "grid",
    )),
)  # fmt: skip
IMPURE = {
    "_thread", "asyncio", "concurrent", "datetime", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "select", "selectors", "signal", "socket", "ssl", "subprocess", "threading", "time", "uuid",
}  # fmt: skip

FILE_LINES = 500
FUNCTION_LINES = 60
#: Module, or module:function → why it is longer.
LONGER: dict[str, str] = {}

#: Never loaded by `import rankmesh`: extras, and what only the command line or one transport needs.
NOT_AT_IMPORT = {
    "torch", "ray", "rich", "cryptography", "matplotlib", "rankmesh.cli", "rankmesh.launch", "rankmesh.testing",
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted((SOURCE / "rankmesh").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found[name] = Module(name, path, text, ast.parse(text, str(path)))
    return found


def imports_of(module: Module, known: Set[str]) -> Iterator[tuple[int, str]]:
    """(line, module imported); `from package import name` is the module package.name where there is one."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (parent, node.module)))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in known else base
        elif isinstance(node, ast.Constant) and node.value in known - {"rankmesh"}:
            yield node.lineno, str(node.value)


def is_within(name: str, unit: str) -> bool:
    """`rankmesh` itself is a unit of one module; any other holds what is below it."""
    return name == unit or (unit != "rankmesh" and name.startswith(unit + "."))


def place(name: str) -> tuple[int, str]:
    """(height of the tier, unit) of a module."""
    for height, units in enumerate(TIERS.values()):
        for unit in units:
            if is_within(name, unit):
                return height, unit
    raise AssertionError(f"{name} is in no tier: add it to TIERS, where DESIGN section 4 wants it")


def is_allowed(importer: str, imported: str) -> bool:
    if is_within(importer, EXEMPT):
        return True
    if is_within(imported, EXEMPT):
        return False
    (height, unit), (other_height, other_unit) = place(importer), place(imported)
    is_shared = list(TIERS)[height] in SHARED
    return other_height < height or other_unit == unit or (other_height == height and is_shared)


def breaches(found: dict[str, Module], known: set[str]) -> list[str]:
    """`known`: the modules that there are, of which `found` are looked at."""
    return [
        f"{module.path}:{line}: {module.name} must not import {imported}"
        for module in found.values()
        for line, imported in imports_of(module, known)
        if imported.partition(".")[0] == "rankmesh" and not is_allowed(module.name, imported)
    ]


def impurities(found: dict[str, Module], known: set[str]) -> list[str]:
    """What pure modules import that reaches the world, themselves or by a module of rankmesh above the ground."""
    pure = [module for module in found.values() if any(is_within(module.name, prefix) for prefix in PURE)]

    def is_impure(imported: str) -> bool:
        if imported.partition(".")[0] != "rankmesh":
            return imported.partition(".")[0] in IMPURE
        return place(imported)[0] > 0 and not any(is_within(imported, prefix) for prefix in PURE)

    return [
        f"{module.path}:{line}: {module.name} is pure and must not import {imported}"
        for module in pure
        for line, imported in imports_of(module, known)
        if is_impure(imported)
    ]


def made_up(name: str, text: str) -> tuple[dict[str, Module], set[str]]:
    """A module as it might be, among the real ones."""
    path = SOURCE / (name.replace(".", "/") + ".py")
    return {name: Module(name, path, text, ast.parse(text))}, {*modules(), name}


def test_every_module_has_its_place() -> None:
    assert modules(), f"no modules in {SOURCE}"
    for name in modules():
        assert is_within(name, EXEMPT) or place(name)


def test_modules_import_only_what_lies_below_them() -> None:
    assert breaches(modules(), set(modules())) == []


def test_pure_modules_do_not_reach_the_world() -> None:
    assert impurities(modules(), set(modules())) == []


@pytest.mark.parametrize(
    "name, text, imported",
    [
        ("rankmesh.wire.bad", "from rankmesh.endpoint import progress", "rankmesh.endpoint"),
        ("rankmesh.wire.bad", "import rankmesh.transport.base", "rankmesh.transport.base"),
        ("rankmesh.wire.bad", "from ..transport import base", "rankmesh.transport.base"),
        ("rankmesh.transport.bad", "def f():\n    from rankmesh.wire.header import pack", "rankmesh.wire.header"),
        ("rankmesh.transport.bad", "if TYPE_CHECKING:\n    from rankmesh.mesh import Mesh", "rankmesh.mesh"),
        ("rankmesh.transport.bad", "LAZY = {'x': 'rankmesh.wire.header'}", "rankmesh.wire.header"),
        ("rankmesh.membership.bad", "from rankmesh import rpc", "rankmesh"),
        ("rankmesh.rpc", "from rankmesh.membership import store", "rankmesh.membership"),
        ("rankmesh.endpoint.bad", "from rankmesh import Config", "rankmesh"),
        ("rankmesh.mesh", "import rankmesh", "rankmesh"),
        ("rankmesh.launch.bad", "from rankmesh.testing import run_world", "rankmesh.testing"),
    ],
)
def test_breach_of_the_layers_is_found(name: str, text: str, imported: str) -> None:
    found = breaches(*made_up(name, text))
    assert any(f"{name} must not import {imported}" in breach for breach in found), found


@pytest.mark.parametrize(
    "name, text",
    [
        ("rankmesh.config", "from rankmesh.errors import ConfigError"),
        ("rankmesh.wire.good", "from rankmesh.wire import header\nfrom . import parser\nfrom ..errors import PeerLost"),
        ("rankmesh.cli.good", "import rankmesh as rm\nfrom rankmesh.launch import x\nfrom rankmesh.wire import header"),
        ("rankmesh.testing.good", "from rankmesh.cli import main\nfrom rankmesh.wire import header"),
    ],
)
def test_imports_from_below_are_allowed(name: str, text: str) -> None:
    assert breaches(*made_up(name, text)) == []


@pytest.mark.parametrize("imported", ["time", "os.path", "rankmesh.endpoint.progress"])
def test_impurity_is_found(imported: str) -> None:
    found = impurities(*made_up("rankmesh.endpoint.matching", f"def f():\n    import {imported}"))
    assert any(f"matching is pure and must not import {imported}" in impurity for impurity in found), found


def world_of(path: Path) -> set[str]:
    """What a pure module of tests imports that it must not."""
    text = path.read_text()
    module = Module(path.stem, path, text, ast.parse(text, str(path)))
    return {
        name for _, name in imports_of(module, IMPURE_IN_TESTS) for unit in IMPURE_IN_TESTS if is_within(name, unit)
    }


@pytest.mark.parametrize("path", sorted(PURE_TESTS), ids=lambda path: path.stem)
def test_pure_tests_do_not_reach_the_world(path: Path) -> None:
    assert world_of(path) == set()


def test_a_test_that_reaches_the_world_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "import os\nfrom time import sleep\nfrom rankmesh.testing import run_world\nfrom peers import SOON\n"
    )
    assert world_of(path) == {"time", "rankmesh.testing", "peers"}


def lengths_of(module: Module) -> Iterator[tuple[str, int]]:
    """Lines of the file and of each function in it."""
    yield module.name, module.text.count("\n")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module.name}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_functions_are_short() -> None:
    lengths = [row for module in modules().values() for row in lengths_of(module)]
    longer = {what: lines for what, lines in lengths if lines > (FUNCTION_LINES if ":" in what else FILE_LINES)}
    unexplained = {what: lines for what, lines in longer.items() if what not in LONGER}
    assert unexplained == {}, "look for the second thing in it"
    assert LONGER.keys() - longer.keys() == set(), "short by now: take it out of LONGER"


def test_long_function_is_found() -> None:
    text = "class A:\n    def f(self):\n" + "        x = 1\n" * 60 + "class B:\n    def f(self):\n        pass\n"
    module = made_up("rankmesh.wire.x", text)[0]["rankmesh.wire.x"]
    assert list(lengths_of(module)) == [("rankmesh.wire.x", 65), ("rankmesh.wire.x:f", 61), ("rankmesh.wire.x:f", 2)]


IMPORT_PROBE = """
import os, sys, threading
import msgspec, numpy  # what these read and load is not ours

reads = []
def spy(self, key, original=os._Environ.__getitem__):
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith("<frozen"):  # os.getenv, Mapping.get
        frame = frame.f_back
    if f"{os.sep}rankmesh{os.sep}" in frame.f_code.co_filename:
        reads.append(key)
    return original(self, key)
os._Environ.__getitem__ = spy

descriptors = len(os.listdir("/proc/self/fd"))
import rankmesh
rankmesh.Config
print(repr({
    "environment": reads,
    "threads": threading.active_count() - 1,
    "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
    "loaded": sorted(sys.modules),
}))
"""


def probe_import(path: Path) -> dict[str, Any]:
    """What `import rankmesh` from this path does, in a fresh process."""
    probe = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        env=os.environ | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=False,
    )
    assert (probe.returncode, probe.stderr) == (0, "")
    seen: dict[str, Any] = ast.literal_eval(probe.stdout)
    return seen | {"loaded": NOT_AT_IMPORT.intersection(seen["loaded"])}


def test_import_does_no_work() -> None:
    """No environment, no threads, no descriptors, none of the heavy or optional modules."""
    assert probe_import(SOURCE) == {"environment": [], "threads": 0, "descriptors": 0, "loaded": set()}


def test_work_at_import_is_found(tmp_path: Path) -> None:
    text = """
import os, threading, rich
os.environ.get("HOME"), os.getenv("RANKMESH_TOKEN"), "RANK" in os.environ
threading.Thread(target=threading.Event().wait, daemon=True).start()
Config = os.open("/dev/null", os.O_RDONLY)
"""
    (tmp_path / "rankmesh").mkdir()
    (tmp_path / "rankmesh" / "__init__.py").write_text(text)
    seen = probe_import(tmp_path)
    assert seen["environment"] == ["HOME", "RANKMESH_TOKEN", "RANK"]
    assert (seen["threads"], seen["descriptors"], seen["loaded"]) == (1, 1, {"rich"})
