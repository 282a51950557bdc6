"""Ports that are given away before anybody listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmesh.membership import ports
from rankmesh.membership.ports import free_port


def kernels() -> range:
    """Those of which any connection may get one."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return range(first, last + 1)


def test_it_is_none_that_a_connection_may_get() -> None:
    drawn = {free_port() for _ in range(50)}
    assert len(drawn) > 40
    assert not drawn & {*kernels()}


def test_it_is_none_that_somebody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    draws: Iterator[int] = iter([taken, taken, free])
    monkeypatch.setattr(ports, "_draw", lambda: next(draws))
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() == free


@pytest.mark.parametrize("told", ["1024\t65535\n", "", None])
def test_where_the_kernel_gives_all_away_it_gives_one(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "range"
    if told is not None:
        path.write_text(told)
    monkeypatch.setattr(ports, "_RANGE", path)
    assert free_port() in kernels()


def test_when_all_draws_are_taken_the_kernel_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(ports, "_draw", lambda: taken)
        assert free_port() in kernels()
