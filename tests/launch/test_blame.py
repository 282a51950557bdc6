"""The launcher blames the rank that began, with real meshes: those that wait for it fail too, and often exit sooner."""

from __future__ import annotations

import os
import re
import selectors
import sys
import textwrap
from pathlib import Path
from typing import IO

import pytest

from launching import DEADLINE, Launch, Launched, Script
from rankmesh.launch import supervisor
from rankmesh.launch.output import Multiplexer, Stream
from rankmesh.launch.plan import RankPlan
from rankmesh.launch.supervisor import Supervisor
from timing import scaled

#: Rank 1 does something, and the others wait for it.
WORLD = """
import rankmesh
with rankmesh.join() as mesh:
    mesh.barrier()
    if rank == 1:
{fault}
    mesh.recv_object(source=1)
"""
#: Holds rank 1 up after its mesh is gone until the others have exited, as native libraries may: they hold the other end
#: of this pipe, which the kernel closes.
LAST_TO_EXIT = """
import atexit
pipe = os.open("exits", os.O_RDONLY if rank == 1 else os.O_WRONLY)
if rank == 1:
    atexit.register(os.read, pipe, 1)
"""


def world(fault: str) -> str:
    return WORLD.format(fault=textwrap.indent(textwrap.dedent(fault), " " * 8))


def report(launched: Launched) -> list[str]:
    """What the launcher says at the end, without pids."""
    lines = launched.error_lines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("rankmesh: "))
    return [re.sub(r"pid \d+", "pid P", line) for line in lines[begin:]]


AFTER = "rankmesh: ranks 0, 2 failed after it (PeerLost: rank 1 is lost)."


@pytest.mark.parametrize(
    "fault, code, how",
    [
        ("raise ValueError('broken')", 1, "exited with code 1."),
        ("sys.exit(3)", 3, "exited with code 3."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL: killed, perhaps"),
    ],
    ids=["raises", "exits", "is killed"],
)
def test_the_rank_that_began_is_blamed(launch: Launch, script: Script, fault: str, code: int, how: str) -> None:
    launched = launch("-n", "3", script(world(fault)))
    assert launched.finish() == code
    assert report(launched)[0].startswith(f"rankmesh: rank 1 (pid P) failed first: it {how}")


@pytest.mark.parametrize(
    "fault, code, last",
    [
        ("raise ValueError('broken')", 1, "  ValueError: broken"),
        ("print('leaving', file=sys.stderr); sys.exit(3)", 3, "  leaving"),
    ],
    ids=["raises", "exits"],
)
def test_it_is_blamed_although_the_others_exit_sooner(
    launch: Launch, script: Script, tmp_path: Path, fault: str, code: int, last: str
) -> None:
    os.mkfifo(tmp_path / "exits")
    launched = launch("-n", "3", script(LAST_TO_EXIT + world(fault)))
    assert launched.finish() == code
    lines = report(launched)
    assert lines[:2] == [f"rankmesh: rank 1 (pid P) failed first: it exited with code {code}.", AFTER]
    assert lines[-1] == last


def test_a_chain_of_losses_is_followed_to_its_beginning(launch: Launch, script: Script, tmp_path: Path) -> None:
    """Rank 2 waits for 1, 3 for 2 and 0 for 3: only one of them speaks of rank 1."""
    os.mkfifo(tmp_path / "exits")
    program = """
        import rankmesh
        with rankmesh.join() as mesh:
            mesh.barrier()
            if rank == 1:
                raise ValueError("broken")
            mesh.recv_object(source=(rank - 1) % 4)
        """
    launched = launch("-n", "4", script(LAST_TO_EXIT + textwrap.dedent(program)))
    assert launched.finish() == 1
    lines = report(launched)
    assert lines[0] == "rankmesh: rank 1 (pid P) failed first: it exited with code 1."
    followers = [line for line in lines if "failed after it (PeerLost: rank" in line]
    assert sorted(re.findall(r"\d", " ".join(line.partition("(")[0] for line in followers))) == ["0", "2", "3"]
    assert lines[-1] == "  ValueError: broken"


def test_a_rank_that_hangs_is_blamed_though_the_launcher_ends_it(launch: Launch, script: Script) -> None:
    """Instead of waiting for the heartbeat the others learn at once that it is lost."""
    fault = "print('hanging', file=sys.stderr); mesh.abort(); os.kill(os.getpid(), signal.SIGSTOP)"
    launched = launch("-n", "3", "--grace", "0.1", script(world(fault)))
    assert launched.finish() == 1
    lines = report(launched)
    assert lines[0].endswith("failed first: it was lost to the others, and still there when the launcher ended it.")
    assert lines[0].startswith("rankmesh: rank 1 ")
    assert lines[-1] == "  hanging"


def test_who_fails_while_the_world_settles_has_failed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails when 1 has, and rank 2 ends well when 0 has; nobody is told to end."""
    monkeypatch.setattr(supervisor, "SETTLE", scaled(DEADLINE))
    os.mkfifo(tmp_path / "one")
    os.mkfifo(tmp_path / "zero")
    programs = {
        0: "os.open('zero', os.O_WRONLY); os.read(os.open('one', os.O_RDONLY), 1); sys.exit(5)",
        1: "os.open('one', os.O_WRONLY); sys.exit(4)",
        2: "os.read(os.open('zero', os.O_RDONLY), 1)",
    }
    plans = [
        RankPlan(rank, [sys.executable, "-c", f"import os, sys; os.chdir({str(tmp_path)!r}); {code}"], dict(os.environ))
        for rank, code in programs.items()
    ]
    with selectors.PollSelector() as selector, open(os.devnull, "wb") as null:
        output = Multiplexer(selector)

        def streams(rank: int, *pipes: IO[bytes]) -> tuple[Stream, Stream]:
            out, err = (Stream(pipe, output.sink(null.fileno()), bytes, None) for pipe in pipes)
            return out, err

        with Supervisor(selector, output, grace=0.1, timeout=None) as running:
            outcome = running.run(plans, streams)
    ends = {e.rank: (e.returncode, e.told) for e in outcome.exits}
    assert ends == {0: (5, False), 1: (4, False), 2: (0, False)}
    assert sorted(e.rank for e in outcome.failures) == [0, 1]
