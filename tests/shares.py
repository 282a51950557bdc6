"""The shares in which `make test` runs the tests, two at a time, because most of them wait for most of their time.

    pytest --share torch       programs of torch, most of whose time goes into its import
    pytest --share pure        what only computes: no sockets, threads, processes or clocks
    pytest --share programs    the README's and the command line's, whose time goes into starting them
    pytest --share services    what stands on endpoints, and what they stand on
    pytest --share rest        all others: endpoints, collectives, failures

tests/test_architecture.py looks at what the pure ones import.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent

PURE = frozenset(
    TESTS / f"{name}.py"
    for name in (
        "test_buffers", "test_codec", "test_config", "test_errors", "test_exports",
        "wire/test_credit", "wire/test_handshake", "wire/test_header", "wire/test_messages", "wire/test_parser",
        "collectives/test_distance", "collectives/test_plans", "collectives/test_staging",
        "endpoint/test_lanes", "endpoint/test_matching", "endpoint/test_pool", "endpoint/test_posted",
        "launch/test_plan", "membership/test_environment", "membership/test_nodelist",
        "memory/test_layout", "memory/test_memory_protocol", "rpc/test_rpc_protocol", "transport/test_address",
    )
)  # fmt: skip

#: What none of them imports.
IMPURE = frozenset({
    "asyncio", "concurrent", "multiprocessing", "select", "selectors", "signal", "socket", "ssl", "subprocess", "time",
    "rankmesh.testing",
    "attack", "calls", "forked", "hosts", "launching", "peers", "processes", "ranks", "regions", "timing",
})  # fmt: skip


#: Folders and modules of the shares that are not given one by one.
SHARES = {
    "torch": (TESTS / "torch", TESTS / "test_examples.py"),
    "programs": (TESTS / "cli", TESTS / "test_readme.py"),
    "services": tuple(
        TESTS / name for name in ("defects", "launch", "membership", "memory", "rpc", "security", "transport")
    ),
}


def share_of(path: Path) -> str:
    """Of a module of tests."""
    if path in PURE:
        return "pure"
    return next((share for share, places in SHARES.items() if path in places or path.parent in places), "rest")
