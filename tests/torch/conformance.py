"""torch's own tests of its distributed backends, run against rankmesh: `make conformance`, or
`python tests/torch/conformance.py [-k PART] [--list] [--world-size 3]`.

`torch.testing._internal.distributed.distributed_test` comes with torch and is run as it is. What is said here is what
any backend has to say: its name, what it claims to support (DDP, sub-groups; no GPUs), and how ranks are started. They
are forked, as torch's own suite once did too: importing torch anew for each of them would take most of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple

#: Read by torch's tests when they are imported.
ENVIRONMENT = {
    "BACKEND": "rankmesh",
    "WORLD_SIZE": "3",
    "INIT_METHOD": "file",
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
    "OMP_NUM_THREADS": "1",  # ranks share this machine's cores; and threads do not survive a fork
}
#: Of DistTestCases.backend_feature.
FEATURES = ("plugin", "ddp", "subgroup")


class Result(NamedTuple):
    """How one test ended: "passed", "failed" or "skipped", and why."""

    name: str
    outcome: str
    reason: str
    seconds: float


def load(world_size: int = 3) -> type[unittest.TestCase]:
    """The tests, as a class. Once per process: torch's module reads the environment when it is imported."""
    os.environ.update(ENVIRONMENT, WORLD_SIZE=str(world_size))
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    import rankmesh.torch

    torch.set_num_threads(1)
    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(rankmesh.torch.NAME)
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Conformance(TestDistBackend, DistributedTest._DistTestBase):
        """torch's tests, on forked ranks that write to a file of their own."""

        output = tempfile.TemporaryFile("a+")  # noqa: SIM115  # as long as the process

        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self.output.truncate(0)
            sys.stdout.flush()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            for descriptor in (1, 2):
                os.dup2(cls.output.fileno(), descriptor)
            super()._run(*args, **kwargs)  # type: ignore[no-untyped-call]

    return Conformance


def names(suite: type[unittest.TestCase]) -> tuple[list[str], list[Result]]:
    """Tests that can be run, and those that torch skips for such a backend before anything is started."""
    chosen, skipped = [], []
    for name in unittest.defaultTestLoader.getTestCaseNames(suite):
        test = getattr(suite, name)
        if getattr(test, "__unittest_skip__", False):
            skipped.append(Result(name, "skipped", test.__unittest_skip_why__, 0.0))
        else:
            chosen.append(name)
    return chosen, skipped


def run(suite: type[unittest.TestCase], chosen: Sequence[str]) -> Iterator[Result]:
    for name in chosen:
        began = monotonic()
        result = unittest.TestResult()
        suite(name).run(result)
        seconds = monotonic() - began
        if result.skipped:
            yield Result(name, "skipped", result.skipped[0][1], seconds)
        elif result.wasSuccessful():
            yield Result(name, "passed", "", seconds)
        else:
            trace = (result.failures + result.errors)[0][1]
            suite.output.seek(0)  # type: ignore[attr-defined]
            yield Result(name, "failed", f"{trace}\n{suite.output.read()}", seconds)  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only tests whose name matches this expression")
    parser.add_argument("--world-size", type=int, default=3, help="ranks (default: 3)")
    parser.add_argument("--list", action="store_true", help="name the tests, run none")
    parser.add_argument("--skipped", action="store_true", help="name also those that torch skips for such a backend")
    given = parser.parse_args()
    suite = load(given.world_size)
    chosen, skipped = names(suite)
    chosen = [name for name in chosen if re.search(given.k, name)]
    if given.list:
        print("\n".join(chosen))
        return 0
    results = []
    for at, result in enumerate(run(suite, chosen), 1):
        results.append(result)
        last = result.reason.strip().splitlines()[-1] if result.outcome == "skipped" else ""
        print(f"[{at:3}/{len(chosen)}] {result.outcome:7} {result.seconds:5.1f} s  {result.name}  {last}", flush=True)
        if result.outcome == "failed":
            print(result.reason, flush=True)
    report(results, skipped, given.skipped)
    return int(any(result.outcome == "failed" for result in results))


def report(results: list[Result], skipped: list[Result], all_names: bool) -> None:
    for outcome in ("skipped", "failed"):
        for result in results:
            if result.outcome == outcome:
                print(f"{outcome}: {result.name}")
    if all_names:
        for result in skipped:
            print(f"not for this backend: {result.name}: {result.reason}")
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in ("passed", "failed", "skipped")}
    print(
        f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped, "
        f"{len(skipped)} not for this backend (--skipped names them), {sum(r.seconds for r in results):.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
