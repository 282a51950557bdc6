"""`rankmesh run` with real processes: what ranks get, what is shown, and that they live and die together."""

from __future__ import annotations

import json
import os
import pty
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import IO

import pytest

from launching import DEADLINE, WAIT, Launch, Launched, Script, is_gone
from rankmesh.launch import supervisor
from rankmesh.launch.output import Multiplexer, Stream
from rankmesh.launch.plan import RankPlan
from rankmesh.launch.supervisor import Supervisor
from rankmesh.membership.ports import free_port
from timing import scaled, wait_until


def pids(launched: Launched, word: str = "ready") -> list[int]:
    lines = (line.split() for line in launched.lines())
    return [int(words[2]) for words in lines if words[1:2] == [word]]


def guard_of(launched: Launched, rank: int) -> int:
    """The only child of the launcher beside its only rank."""
    children = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}/children").read_text().split()
    (guard,) = (int(pid) for pid in children if int(pid) != rank)
    return guard


# What ranks get


def test_each_rank_sees_its_place(launch: Launch, script: Script) -> None:
    program = script(
        """
        import json
        from rankmesh.membership.environment import detect
        place = detect(os.environ, parent_pid=os.getppid())
        torch = [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
        print(json.dumps([place.source, place.rank, place.size, place.local_rank, place.local_size, place.one_host,
                          place.run_id, os.environ["RANKMESH_TOKEN"], torch, int(os.environ["MASTER_PORT"])]))
        """
    )
    launched = launch("-n", "3", program)
    assert launched.finish() == 0
    seen = [json.loads(launched.lines(rank)[0]) for rank in range(3)]
    for rank, place in enumerate(seen):
        assert place[:6] == ["rankmesh run", rank, 3, rank, 3, True]
        assert place[8] == [str(rank), "3", str(rank), "3", "127.0.0.1"]
    assert len({(run_id, token, port) for *_, run_id, token, _, port in seen}) == 1
    assert len(seen[0][7]) == 64
    assert launched.errors == ""


@pytest.mark.parametrize("how", ["", "config=rankmesh.Config(shm=False)", "shm=False"])
def test_ranks_join_and_talk(launch: Launch, script: Script, how: str) -> None:
    """Whatever settings they have: the launcher's token is that of all."""
    program = script(
        f"""
        import rankmesh
        with rankmesh.join({how}) as mesh:
            if mesh.rank:
                mesh.send_object(["from", mesh.rank], to=0)
            else:
                print([mesh.recv_object(source=other) for other in range(1, mesh.size)])
        """
    )
    launched = launch("-n", "3", program)
    assert launched.finish() == 0
    assert launched.lines() == ["[0] [['from', 1], ['from', 2]]"]


def test_every_run_has_a_token_of_its_own_and_the_users_is_kept(launch: Launch, script: Script) -> None:
    program = script("print(os.environ['RANKMESH_TOKEN'])")
    runs = [launch("-n", "1", program) for _ in range(2)]
    assert [run.finish() for run in runs] == [0, 0]
    assert runs[0].lines() != runs[1].lines()
    given = launch("-n", "1", program, env={"RANKMESH_TOKEN": "given"})
    assert given.finish() == 0
    assert given.lines() == ["[0] given"]


def test_arguments_arrive_unchanged(launch: Launch, script: Script) -> None:
    words = ["--", "-n", "7", "--help", "-m", "--version", "", "a b", "--log-dir=x", "é\n", "--", "*"]
    launched = launch("-n", "2", script("import json; print(json.dumps(sys.argv[1:]))"), *words)
    assert launched.finish() == 0
    assert [json.loads(launched.lines(rank)[0]) for rank in (0, 1)] == [words, words]


def test_a_script_runs_as_python_would_run_it(launch: Launch, script: Script, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("name = 'found'")
    program = script("import neighbour; print(__name__, __file__, sys.path[0], neighbour.name)")
    launched = launch("-n", "1", program)
    assert launched.finish() == 0
    assert launched.lines() == [f"[0] __main__ {program} {tmp_path} found"]


def test_a_module_with_arguments(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "job.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    launched = launch("-n", "2", "-m", "package.job", "-m", "x")
    assert launched.finish() == 0
    assert sorted(launched.lines()) == [f"[{rank}] __main__ package.job ['-m', 'x']" for rank in (0, 1)]


def test_standard_input_goes_to_rank_0_only(launch: Launch, script: Script) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "rankmesh", "run", "-n", "2", script("print(repr(sys.stdin.read()))")],
        input=b"hello",
        capture_output=True,
        timeout=scaled(DEADLINE),
        check=True,
    )
    assert sorted(process.stdout.splitlines()) == [b"[0] 'hello'", b"[1] ''"]


# What is shown


def test_lines_are_whole_and_prefixed(launch: Launch, script: Script) -> None:
    program = script(
        """
        for i in range(300):
            for piece in (f"{rank} ", "x" * (i * 7), f" {i}", "\\n"):
                sys.stdout.write(piece)
        sys.stderr.write(f"last {rank}")
        """
    )
    launched = launch("-n", "4", program)
    assert launched.finish() == 0
    for rank in range(4):
        assert launched.lines(rank) == [f"{rank} {'x' * (i * 7)} {i}" for i in range(300)]
    assert sorted(launched.errors.splitlines()) == [f"[{rank}] last {rank}" for rank in range(4)]


def test_lines_stay_whole_where_both_streams_lead_to_one_file(script: Script) -> None:
    program = script(
        """
        for i in range(200):
            print("o" * 3000)
            print("e" * 3000, file=sys.stderr)
        """
    )
    command = [sys.executable, "-m", "rankmesh", "run", "-n", "2", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text, _ = process.communicate(timeout=scaled(DEADLINE))
    assert process.returncode == 0
    whole = {f"[{rank}] {letter * 3000}": 200 for rank in (0, 1) for letter in "oe"}
    assert Counter(text.decode().splitlines()) == whole


def test_prefixes_are_aligned(launch: Launch, script: Script) -> None:
    launched = launch("-n", "11", script("print('x')"))
    assert launched.finish() == 0
    assert sorted(launched.lines()) == sorted(f"[{rank:>2}] x" for rank in range(11))


def test_without_prefix_and_with_logs(launch: Launch, script: Script, tmp_path: Path) -> None:
    program = script("print('out', rank); sys.stderr.write(f'err {rank}')")
    launched = launch("-n", "2", "--no-prefix", "--log-dir", "logs/new", program)
    assert launched.finish() == 0
    assert sorted(launched.lines()) == ["out 0", "out 1"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs" / "new").iterdir()}
    assert logs == {"rank-0.out": "out 0\n", "rank-0.err": "err 0", "rank-1.out": "out 1\n", "rank-1.err": "err 1"}


def test_binary_junk_passes_through(launch: Launch, script: Script) -> None:
    junk = bytes(set(range(256)) - {10, 13})
    launched = launch("-n", "1", script(f"sys.stdout.buffer.write({junk!r})"))
    assert launched.finish() == 0
    assert launched.out == b"[0] " + junk + b"\n"


def test_an_endless_line_does_not_fill_the_launchers_memory(launch: Launch, script: Script) -> None:
    program = script(
        """
        def peak():
            with open(f"/proc/{os.getppid()}/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        sys.stdout.buffer.write(b"z" * (1 << 20))
        before = peak()
        for _ in range(63):
            sys.stdout.buffer.write(b"z" * (1 << 20))
        print(peak() - before, file=sys.stderr)
        """
    )
    launched = launch("-n", "1", program)
    assert launched.finish() == 0
    assert launched.out.count(b"z") == 64 << 20
    kilobytes = int(launched.error_lines(0)[0])
    assert kilobytes < 16 * 1024


def test_colours_only_on_a_terminal(launch: Launch, script: Script) -> None:
    program = script("print('hello'); print('error', file=sys.stderr)")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb", 0) as terminal, os.fdopen(ours, "rb", 0) as screen:
        launched = launch("-n", "2", program, stdout=terminal, env={"TERM": "xterm", "NO_COLOR": None})
        assert launched.finish() == 0
        text = screen.read(4096)
    assert sorted(text.split(b"\r\n")) == [b"", b"\x1b[33m[1]\x1b[0m hello", b"\x1b[36m[0]\x1b[0m hello"]
    assert sorted(launched.errors.splitlines()) == ["[0] error", "[1] error"]


def test_a_reader_that_goes_away_ends_the_ranks(launch: Launch, script: Script) -> None:
    program = script("print('ready', os.getpid(), flush=True)\nwhile True: print('x' * 1000)")
    launched = launch("-n", "2", program)
    launched.wait_for("[0] ready", "[1] ready")
    started = pids(launched)
    assert launched.process.stdout is not None
    launched.process.stdout.close()
    assert launched.finish() == 128 + signal.SIGPIPE
    assert "the output cannot be written (Broken pipe)" in launched.errors
    assert all(map(is_gone, started))


# How they end


def test_the_first_failure_ends_the_others_and_gives_its_code(launch: Launch, script: Script) -> None:
    fail = """
        def fail(*_):
            for i in range(30): print("line", i, file=sys.stderr)
            print("unfinished", end="", file=sys.stderr)
            sys.exit(7)
        signal.signal(signal.SIGUSR1, fail)
        """
    launched = launch("-n", "3", script(textwrap.dedent(fail) + WAIT))
    launched.wait_for("[0] ready", "[1] ready", "[2] ready")
    os.kill(int(launched.lines(1)[0].split()[1]), signal.SIGUSR1)
    assert launched.finish() == 7
    report = launched.errors[launched.errors.index("rankmesh: ") :].splitlines()
    assert report[0].startswith("rankmesh: rank 1 (pid ")
    assert report[0].endswith("failed first: it exited with code 7.")
    assert report[1] == "rankmesh: the launcher ended ranks 0, 2."
    assert report[3:] == [*(f"  line {i}" for i in range(11, 30)), "  unfinished"]
    assert all(map(is_gone, pids(launched)))


@pytest.mark.parametrize(
    "number, words", [(signal.SIGKILL, "perhaps because the machine ran out of memory"), (signal.SIGABRT, "SIGABRT")]
)
def test_a_rank_killed_by_a_signal_is_named(launch: Launch, script: Script, number: int, words: str) -> None:
    launched = launch("-n", "3", script(WAIT))
    launched.wait_for("[0] ready", "[1] ready", "[2] ready")
    victim = int(launched.lines(2)[0].split()[1])
    os.kill(victim, number)
    assert launched.finish() == 128 + number
    assert f"rank 2 (pid {victim}) failed first" in launched.errors
    assert words in launched.errors
    assert "rank 2 wrote nothing to standard error" in launched.errors


def test_ranks_that_end_well_wait_for_the_others(launch: Launch, script: Script) -> None:
    program = script("sys.exit(0) if rank else (sys.stdin.read(), print('done'))")
    launched = launch("-n", "3", program)
    assert launched.finish() == 0
    assert launched.lines() == ["[0] done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_ends_the_ranks(launch: Launch, script: Script, number: int) -> None:
    launched = launch("-n", "2", script("signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + WAIT))
    launched.wait_for("[0] ready", "[1] ready")
    launched.process.send_signal(number)
    assert launched.finish() == 128 + number
    assert f"{signal.Signals(number).name}: the ranks were ended" in launched.errors
    assert "failed" not in launched.errors
    assert all(map(is_gone, pids(launched)))


def test_ranks_that_handle_the_signal_and_end_well_are_a_success(launch: Launch, script: Script) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda n, f: (print('checkpoint', n), sys.exit(0)))\n"
    launched = launch("-n", "2", script(handler + WAIT))
    launched.wait_for("[0] ready", "[1] ready")
    launched.process.terminate()
    assert launched.finish() == 0
    assert sorted(launched.lines())[0] == "[0] checkpoint 15"
    assert "[1] checkpoint 15" in launched.lines()


def test_user_signals_are_passed_on_and_end_nothing(launch: Launch, script: Script) -> None:
    handler = "signal.signal(signal.SIGUSR1, lambda n, f: (print('noted', flush=True)))\n"
    launched = launch("-n", "2", script(handler + WAIT))
    launched.wait_for("[0] ready", "[1] ready")
    launched.process.send_signal(signal.SIGUSR1)
    launched.wait_for("[0] noted", "[1] noted")
    launched.process.terminate()
    assert launched.finish() == 143


def test_user_signals_do_not_kill_a_launcher_that_is_ending(launch: Launch, script: Script) -> None:
    launched = launch("-n", "1", script("signal.signal(signal.SIGUSR1, signal.SIG_IGN); print('ready', flush=True)"))
    launched.wait_for("[0] ready")
    never = threading.Event()
    while launched.process.poll() is None:
        launched.process.send_signal(signal.SIGUSR1)
        never.wait(0.001)
    assert launched.process.returncode == 0


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launch: Launch, script: Script) -> None:
    program = script("signal.signal(signal.SIGTERM, lambda n, f: print('ignored', flush=True))\n" + WAIT)
    launched = launch("-n", "2", "--grace", "0.3", program)
    launched.wait_for("[0] ready", "[1] ready")
    os.kill(int(launched.lines(0)[0].split()[1]), signal.SIGKILL)
    assert launched.finish() == 137
    assert "rank 0 (pid" in launched.errors
    assert "the launcher ended rank 1." in launched.errors
    assert all(map(is_gone, pids(launched)))


def test_a_second_ctrl_c_skips_the_grace(launch: Launch, script: Script) -> None:
    program = script("signal.signal(signal.SIGINT, lambda n, f: print('ignored', flush=True))\n" + WAIT)
    launched = launch("-n", "2", "--grace", "1000", program)
    launched.wait_for("[0] ready", "[1] ready")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("[0] ignored", "[1] ignored")
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == 130
    assert all(map(is_gone, pids(launched)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_stays_ignored(launch: Launch, script: Script, number: int) -> None:
    """nohup ignores SIGHUP, and a shell's background jobs SIGINT."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        launched = launch("-n", "1", script(WAIT))
    finally:
        signal.signal(number, previous)
    launched.wait_for("[0] ready")
    launched.process.send_signal(number)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.finish() == 143


def test_a_time_limit_ends_the_ranks(launch: Launch, script: Script) -> None:
    launched = launch("-n", "2", "--timeout", "0.5", script("while True: signal.pause()"))
    assert launched.finish() == 124
    assert "--timeout 0.5 s" in launched.errors


# Nothing stays behind

#: A rank with a child of its own, which outlives its parent if nobody ends it.
WITH_CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import signal\\nwhile True: signal.pause()"])
print("child", child.pid, flush=True)
"""


def test_when_the_launcher_is_killed_ranks_and_their_children_end(launch: Launch, script: Script) -> None:
    launched = launch("-n", "2", script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_CHILD + WAIT))
    launched.wait_for("[0] ready", "[1] ready")
    everybody = pids(launched) + pids(launched, "child")
    assert len(everybody) == 4
    assert not any(map(is_gone, everybody))
    launched.process.kill()
    wait_until(lambda: all(map(is_gone, everybody)), 10, "the end of all ranks and children")


def test_the_kernel_alone_ends_a_rank_with_its_launcher(launch: Launch, script: Script) -> None:
    """Also if the guard is killed before the launcher."""
    launched = launch("-n", "1", script(WAIT))
    launched.wait_for("[0] ready")
    (rank,) = pids(launched)
    os.kill(guard_of(launched, rank), signal.SIGKILL)
    launched.process.kill()
    wait_until(lambda: is_gone(rank), 10, "the end of the rank")


@pytest.mark.parametrize("code", [0, 4])
def test_a_ranks_children_end_with_it(launch: Launch, script: Script, code: int) -> None:
    launched = launch("-n", "1", script(WITH_CHILD + f"sys.exit({code})"))
    assert launched.finish() == code
    assert all(map(is_gone, pids(launched, "child")))


def test_a_child_that_left_its_session_does_not_keep_the_launcher(launch: Launch, script: Script) -> None:
    program = script(
        """
        wait = "import signal\\nwhile True: signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
        print("child", child.pid, flush=True)
        """
    )
    launched = launch("-n", "1", program)
    launched.wait_for("child", "\n")
    (child,) = pids(launched, "child")
    try:
        assert launched.process.wait(scaled(DEADLINE)) == 0
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_left_its_session_and_keeps_talking_does_not_keep_the_launcher(
    launch: Launch, script: Script
) -> None:
    program = script(
        """
        talk = "import time\\nwhile True: print('x' * 1000); time.sleep(0.001)"
        child = subprocess.Popen([sys.executable, "-c", talk], start_new_session=True)
        print("child", child.pid, flush=True)
        """
    )
    launched = launch("-n", "1", program)
    launched.wait_for("child", "\n")
    (child,) = pids(launched, "child")
    try:
        assert launched.finish() == 0
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_rank_that_cannot_be_killed_is_given_up(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_group = supervisor._signal_group
    monkeypatch.setattr(supervisor, "UNKILLABLE", 0.1)
    monkeypatch.setattr(supervisor, "_signal_group", lambda group, number: None)
    plan = RankPlan(0, [sys.executable, script(WAIT)], {**os.environ, "RANK": "0"})
    with selectors.PollSelector() as selector, open(os.devnull, "wb") as null:
        output = Multiplexer(selector)

        def streams(rank: int, out: IO[bytes], err: IO[bytes]) -> tuple[Stream, Stream]:
            return Stream(out, output.sink(null.fileno()), bytes, None), Stream(
                err, output.sink(null.fileno()), bytes, None
            )

        with Supervisor(selector, output, grace=0.1, timeout=0.1) as running:
            outcome = running.run([plan], streams)
            (pid,) = outcome.stuck.values()
            signal_group(pid, signal.SIGKILL)  # nothing stays behind of this test either
    assert outcome.code == 124
    assert f"rank 0 (pid {pid}) cannot be killed" in outcome.report(timeout=0.1)[0]


def test_a_killed_guard_does_not_end_a_healthy_run(launch: Launch, script: Script) -> None:
    launched = launch("-n", "1", script("print('ready', os.getpid(), flush=True); signal.pause()"))
    launched.wait_for("[0] ready")
    (rank,) = pids(launched)
    guard = guard_of(launched, rank)
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: is_gone(guard), 10)
    launched.process.terminate()
    assert launched.finish() == 143
    assert "The guard" in launched.errors


# Several nodes


def test_two_nodes_number_their_ranks_and_make_one_world(launch: Launch, script: Script) -> None:
    program = script(
        """
        import rankmesh
        from rankmesh.membership.environment import detect
        with rankmesh.join() as mesh:
            place = detect(os.environ, parent_pid=1)
            print(mesh.rank, mesh.size, place.local_rank, place.node_rank, place.master[1], os.environ["MASTER_PORT"])
        """
    )
    port = free_port()
    words = ("-n", "2", "--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}")
    nodes = [launch(*words, "--node-rank", str(node), program, env={"RANKMESH_TOKEN": "t"}) for node in (0, 1)]
    assert [node.finish() for node in nodes] == [0, 0]
    for node, launched in enumerate(nodes):
        ranks = (2 * node, 2 * node + 1)
        assert sorted(launched.lines()) == [f"[{r}] {r} 4 {r % 2} {node} {port} {port + 1}" for r in ranks]


# What cannot be started


@pytest.mark.parametrize(
    "words, said",
    [
        (["-n", "2", "nosuch.py"], "The file 'nosuch.py' does not exist"),
        (["-n", "2", "nosuch"], "The file 'nosuch' does not exist"),
        (["-n", "2", "nosuch"], "or write -m nosuch if it is a module."),
        (["-n", "0", "x.py"], "at least one rank"),
        (["-n", "2"], "no program to run"),
        (["-n", "1", "--nnodes", "2", "x.py"], "Pass --rendezvous"),
        (["-n", "1", "--nnodes", "2", "--rendezvous", "127.0.0.1:7000", "x.py"], "Set RANKMESH_TOKEN"),
        (["-n", "1", "--log-dir", "/proc/nowhere", "x.py"], "--log-dir"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_line(
    launch: Launch, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "x.py").write_text("print('began')")
    launched = launch(*words, env={"RANKMESH_TOKEN": None})
    assert launched.finish() == 2
    assert launched.out == b""
    (line,) = launched.errors.splitlines()
    assert line.startswith("rankmesh: error: ")
    assert said in line


@pytest.mark.parametrize("target", ["nosuch.py", "nosuch/train"])
def test_a_file_that_cannot_be_a_module_is_not_called_one(launch: Launch, target: str) -> None:
    launched = launch("-n", "1", target)
    assert launched.finish() == 2
    assert f"The file '{target}' does not exist" in launched.errors
    assert "-m" not in launched.errors


@pytest.mark.parametrize("words", [["x.py"], ["-n", "x", "x.py"], ["-n", "1", "--rendezvous", "nowhere", "x.py"]])
def test_options_that_mean_nothing_are_usage_errors(launch: Launch, words: list[str]) -> None:
    launched = launch(*words)
    assert launched.finish() == 2
    assert "usage: rankmesh run" in launched.errors
