"""The programs of fuzz/ as modules of their own, with nothing learnt yet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """fuzz/`name`.py, a new module at every call."""
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", FUZZ / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
