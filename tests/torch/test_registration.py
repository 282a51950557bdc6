"""How torch learns of the backend, and that nobody else does of torch."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankmesh
from timing import scaled

SOURCE = Path(rankmesh.__file__).parent


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}


def test_only_this_package_imports_torch() -> None:
    importers = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(name == "torch" or name.startswith(("torch.", "rankmesh.torch")) for name in _imports(path))
    }
    assert importers == {"torch"}


def test_entry_points_lead_to_register() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
    from rankmesh.torch import register

    for group in ("torch.backends", "torch.distributed.backends"):
        points = importlib.metadata.entry_points(group=group, name="rankmesh")
        assert {point.load() for point in points} == {register}, "install the package again: pip install -e ."


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_import_in_either_order(autoload: str) -> None:
    """torch calls `register` while it is imported, perhaps by this very package."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
    program = """
import rankmesh.torch, torch
rankmesh.torch.register()
print(torch.distributed.is_backend_available('rankmesh'))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=scaled(40),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
