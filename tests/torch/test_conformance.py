"""A quick part of what `make conformance` runs: torch's own tests of backends, as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from timing import scaled

pytest.importorskip("torch", reason="torch is not installed: pip install 'rankmesh[torch]'")
pytest.importorskip("expecttest", reason="torch's tests need expecttest: pip install expecttest")

#: One of each kind.
QUICK = (
    "test_DistributedDataParallelCPU|test_all_gather|test_all_gather_coalesced_simple|test_all_reduce_sum_async|"
    "test_all_reduce_sum_complex|test_barrier_full_group|test_broadcast|test_ddp_logging_data_cpu|test_destroy_group|"
    "test_gather_full_group|test_get_rank_size_group|test_reduce_product|test_scatter_complex|test_send_recv_any_source|"
    "test_send_recv_with_tag|test_static_graph_api_cpu|test_DistributedDataParallel_requires_grad|test_isend_torch_profiler"
)


@pytest.mark.timeout(scaled(120))
def test_quick_part_of_torchs_own_tests() -> None:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "conformance.py"), "-k", f"^({QUICK})$"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    said = re.search(r"(\d+) passed, (\d+) failed, (\d+) skipped", ended.stdout)
    assert said is not None, ended.stdout + ended.stderr
    assert said.groups() == (str(QUICK.count("|") + 1), "0", "0"), ended.stdout
    assert ended.returncode == 0
