"""For tests, users' too: worlds of ranks, conformance suites for transports, faults on demand."""

from rankmesh.testing.world import WorldFailed, run_world

__all__ = ["WorldFailed", "run_world"]
