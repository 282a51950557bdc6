"""What holds for every test: it leaves nothing behind, it ends, and what hypothesis found can be found again."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

from leaks import mark_this_run, no_leaks
from nursery import nursery
from shares import SHARES, share_of
from timing import scaled

__all__ = ["nursery"]

#: Seconds (scaled) after which a test hangs. Another limit for one test: @pytest.mark.timeout(scaled(120)).
HANG = 60.0

# No deadline: a loaded machine is not a finding. Every run has new input; print_blob replays one failure, and the seed
# in the report's header the whole run.
settings.register_profile("rankmesh", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("rankmesh")


# For the hundreds of processes that the tests start: when numpy is imported, its OpenBLAS makes a thread per core, and
# that costs more CPU time than all the rest of the import. Nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", choices=["pure", *SHARES, "rest"], help="only part of the tests: see tests/shares.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    share: str | None = config.getoption("--share")
    if share is None or not collection_path.name.startswith("test_") or share_of(collection_path) == share:
        return None
    return True


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = secrets.randbelow(2**32)
    mark_this_run()
    # One process and one descriptor that multiprocessing keeps for good: started now, they belong to no test.
    resource_tracker.ensure_running()


def pytest_report_header(config: pytest.Config) -> str:
    return f"this run again: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The hang guard: pytest-timeout prints the stacks of all threads and fails the test."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(scaled(HANG)))


def pytest_collection_finish() -> None:
    """Each test ends with a collection, which need not walk through all that was imported: torch alone has 200,000
    objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _run_leaks_nothing() -> Iterator[None]:
    """Also for what fixtures of modules leave behind."""
    with no_leaks():
        yield


@pytest.fixture(autouse=True)
def _test_leaks_nothing(_run_leaks_nothing: None) -> Iterator[None]:
    with no_leaks():
        yield
