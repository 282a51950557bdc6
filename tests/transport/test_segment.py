"""The memory of a connection: anonymous, sealed, of the right size and layout, and really shared."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from forked import Child, shm_names
from rankmesh.buffers import MID_PAGE, PAGE
from rankmesh.transport import segment
from rankmesh.transport.ring import RingReader, RingWriter
from rankmesh.transport.segment import CELLS, MAGIC, PROOF_BYTES, SEGMENT_BYTES, Segment, attach, create, take_back


def memory(nbytes: int = SEGMENT_BYTES, magic: bytes = MAGIC, seals: bool = True) -> int:
    """The descriptor of memory that may or may not be a segment."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, magic, 0)
    if seals:
        segment.seal(fd)
    return fd


@pytest.fixture
def both() -> Iterator[tuple[Segment, Segment]]:
    first, fd = create()
    second = attach(fd)
    os.close(fd)
    yield first, second
    first.close()
    second.close()


def test_what_one_side_writes_the_other_reads(both: tuple[Segment, Segment]) -> None:
    first, second = both
    for here, there in ((first, second), (second, first)):
        here.outgoing[:5] = b"hello"
        assert bytes(there.incoming[:5]) == b"hello"
        value = here.prove()
        assert len(value) == PROOF_BYTES
        assert there.proof() == value
        assert here.proof() != value
        here.cells[CELLS - 1] = 7
        assert there.their_cells[CELLS - 1] == 7
        assert len(here.cells) == len(there.their_cells) == CELLS


def test_slots_begin_in_mid_page(both: tuple[Segment, Segment]) -> None:
    """Into arrays of numpy's, which begin 16 bytes into a page, they are copied four times faster from there."""
    for side in both:
        writer, reader = RingWriter(side.outgoing), RingReader(side.incoming)
        for ring in (writer, reader):
            assert np.frombuffer(ring.slots, np.uint8).ctypes.data % PAGE == MID_PAGE
            ring.release()


def test_every_proof_is_another(both: tuple[Segment, Segment]) -> None:
    assert len({both[0].prove() for _ in range(100)}) == 100


def test_parts_do_not_overlap(both: tuple[Segment, Segment]) -> None:
    """Everything is filled with something else, and is there in the end."""
    first, second = both
    first.outgoing[:] = b"a" * first.outgoing.nbytes
    first.incoming[:] = b"b" * first.incoming.nbytes
    proofs = first.prove(), second.prove()
    for cell in range(CELLS):
        first.cells[cell], second.cells[cell] = cell, 1000 + cell
    assert bytes(second.incoming) == b"a" * first.outgoing.nbytes
    assert bytes(second.outgoing) == b"b" * first.incoming.nbytes
    assert (second.proof(), first.proof()) == proofs
    assert second.their_cells.tolist() == list(range(CELLS))
    assert first.their_cells.tolist() == list(range(1000, 1000 + CELLS))


def test_a_cell_can_always_be_changed(both: tuple[Segment, Segment]) -> None:
    """The other side can write there: the largest number must not be an error."""
    cells = both[0].cells
    both[1].their_cells[3] = (1 << 64) - 1
    for expected in (0, 1):
        take_back(cells, 3)
        assert cells[3] == expected


@pytest.mark.parametrize("nbytes", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES + 4096])
def test_nobody_can_resize_it(nbytes: int) -> None:
    """Memory that shrinks under a mapping kills by SIGBUS."""
    made, fd = create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    made.close()


def test_it_has_no_name() -> None:
    before = shm_names()
    made, fd = create()
    assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:rankmesh (deleted)"
    assert os.fstat(fd).st_nlink == 0
    assert shm_names() == before
    os.close(fd)
    made.close()


def test_closing_unmaps_it() -> None:
    made, fd = create()
    os.close(fd)
    assert "memfd:rankmesh" in Path("/proc/self/maps").read_text()
    made.close()
    assert "memfd:rankmesh" not in Path("/proc/self/maps").read_text()


def a_file() -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, SEGMENT_BYTES)
    return fd


def read_only() -> int:
    fd = memory()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


WRONG: dict[str, Callable[[], int]] = {
    "too small": lambda: memory(SEGMENT_BYTES - 4096),
    "too large": lambda: memory(SEGMENT_BYTES + 4096),
    "empty": lambda: memory(0),
    "not sealed": lambda: memory(seals=False),
    "another layout": lambda: memory(magic=MAGIC[:-1] + b"\xff"),
    "never written": lambda: memory(magic=b""),
    "a file": a_file,
    "a device": lambda: os.open(os.devnull, os.O_RDWR),
    "read-only": read_only,
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_other_descriptors_are_refused(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(OSError, match=r"another size|another layout|Invalid argument|Permission denied"):
        attach(fd)
    os.close(fd)
    assert "memfd:test" not in Path("/proc/self/maps").read_text()


def test_a_seal_alone_is_not_enough() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SEGMENT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(OSError, match="resized"):
        segment.check(fd, SEGMENT_BYTES)  # seals could be added that make it read-only under the other's hands
    os.close(fd)


def test_without_memory_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(OSError, match="allocate"):
        create()


def test_it_lives_as_long_as_one_side_maps_it() -> None:
    made, fd = create()

    def child() -> None:
        other = attach(fd)
        other.outgoing[:4] = b"last"

    with Child(child):
        pass
    os.close(fd)
    assert bytes(made.incoming[:4]) == b"last"
    made.close()
