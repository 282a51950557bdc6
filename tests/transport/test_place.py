"""Where a process is: who can share memory with whom, and why not."""

from __future__ import annotations

import os

import pytest

from forked import Child
from rankmesh.transport.place import Place

HERE = Place("boot", "net", "1000")


@pytest.mark.parametrize(
    "there, why",
    [
        (HERE, ""),
        (HERE._replace(boot="other"), "another host"),
        (HERE._replace(network="other"), "another network namespace, such as another container's"),
        (HERE._replace(user="0"), "another user (uid 0 there, 1000 here)"),
        (Place("other", "other", "0"), "another host"),
    ],
)
def test_why_memory_cannot_be_shared(there: Place, why: str) -> None:
    assert HERE.difference(there) == why


def test_a_place_survives_the_wire() -> None:
    here = Place.here()
    assert Place.parse(str(here)) == here
    assert str(here).isprintable()
    assert here.user == str(os.geteuid())


@pytest.mark.parametrize("text", ["", "/", "boot", "boot/net", "boot/net/1000/more", "a/b/c/d/e"])
def test_anything_else_is_no_place(text: str) -> None:
    assert Place.parse(text) is None


def test_processes_of_this_host_are_in_the_same_place() -> None:
    here = Place.here()

    def child() -> None:
        assert Place.here() == here

    with Child(child):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_in_another_place() -> None:
    here = Place.here()

    def child() -> None:
        os.setuid(65534)
        assert here.difference(Place.here()) == "another user (uid 65534 there, 0 here)"

    with Child(child):
        pass
