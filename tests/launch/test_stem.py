"""Ranks that branch off from one interpreter: like those that Python starts itself, but for their addresses."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import textwrap
import zipapp
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launching import DEADLINE, WAIT, Launch, Script, is_gone
from rankmesh.errors import JoinError
from rankmesh.launch import stem_main, supervisor
from rankmesh.launch.output import Multiplexer, Stream
from rankmesh.launch.plan import RankPlan
from rankmesh.launch.supervisor import Supervisor
from timing import scaled, wait_until

#: What a program can see of how it is run, as far as it must not depend on who runs it.
FACTS = """
import json, os, resource, signal, sys, threading
names = {name: repr(value) for name, value in globals().items() if name.startswith("__") and name != "__builtins__"}
names["__spec__"] = repr(__spec__ and (__spec__.name, __spec__.origin, __spec__.cached, __spec__.parent))
names["__loader__"] = repr((type(__loader__).__name__, getattr(__loader__, "path", None)))
facts = {
    "names": names,
    "builtins": type(__builtins__).__name__,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "argv": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "flags": repr(sys.flags),
    "file": sys._getframe().f_code.co_filename,
    "future": sys._getframe().f_code.co_flags,
    "streams": [(f.encoding, f.errors, f.line_buffering, f.isatty()) for f in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": [repr(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)],
    "threads": [t.name for t in threading.enumerate()],
    "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "directory": os.getcwd(),
    "environment": {n: v for n, v in os.environ.items() if n not in ("MASTER_PORT",) and not n.startswith("RANKMESH_")},
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_STACK)],
    "hook": sys.excepthook is sys.__excepthook__,
    "modules": sorted(set(sys.modules) - {"ctypes", "_ctypes", "ctypes._endian", "struct", "_struct", "__future__"}),
}
print(json.dumps(facts))
"""


def seen(launch: Launch, *words: str) -> list[dict[str, object]]:
    """What the ranks of `rankmesh run` with these words tell, by rank."""
    launched = launch("-n", "2", *words)
    assert launched.finish() == 0, launched.errors
    return [json.loads(launched.lines(rank)[0]) for rank in (0, 1)]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize("place", ["program.py", "folder/../program.py", "linked.py"])
def test_a_script_cannot_tell_that_it_was_forked(launch: Launch, tmp_path: Path, place: str) -> None:
    write(tmp_path, "program.py", FACTS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked.py").symlink_to("program.py")
    assert seen(launch, place, "a", "b") == seen(launch, "--no-fork", place, "a", "b")


@pytest.mark.parametrize("module", ["package.job", "package", "job"])
def test_a_module_cannot_tell_that_it_was_forked(launch: Launch, tmp_path: Path, module: str) -> None:
    write(tmp_path, "package/__init__.py", "import sys\nargv = list(sys.argv)")
    for name in ("package/job.py", "package/__main__.py", "job.py"):
        write(tmp_path, name, FACTS)
    write(tmp_path, "package/job.py", "import package\nassert package.argv == ['-m', 'x'], package.argv\n" + FACTS)
    assert seen(launch, "-m", module, "x") == seen(launch, "--no-fork", "-m", module, "x")


def test_a_script_that_is_not_on_the_path_of_python_is_not_either(launch: Launch, tmp_path: Path) -> None:
    write(tmp_path, "program.py", FACTS)
    safe = launch("-n", "1", "program.py", env={"PYTHONSAFEPATH": "1"})
    plain = launch("-n", "1", "--no-fork", "program.py", env={"PYTHONSAFEPATH": "1"})
    assert (safe.finish(), plain.finish()) == (0, 0)
    assert json.loads(safe.lines(0)[0]) == json.loads(plain.lines(0)[0])


@pytest.mark.parametrize(
    "body, code",
    [
        ("raise ValueError('of its own')", 1),
        ("def f(): f.g\nf()", 1),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: raise KeyError('x') from error", 1),
        ("this is no Python", 1),
        ("sys.exit('with a word')", 1),
        ("sys.exit(9)", 9),
        ("raise KeyboardInterrupt", 128 + signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
        ("import atexit; atexit.register(lambda: print('at exit', file=sys.stderr)); raise OSError(2, 'x')", 1),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", 0),
        ("# \x00", 1),
        ("import traceback as t; sys.excepthook = lambda *error: t.print_tb(error[2]); raise TypeError", 1),
        ("import threading as t\ndef late(): t.main_thread().join(); 1 / 0\nt.Thread(target=late).start()", 0),
        ("hook = sys.excepthook; sys.excepthook = lambda *e: (print('mine'), hook(*e)); raise TypeError", 1),
    ],
)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_what_a_program_raises_is_shown_as_python_does(
    launch: Launch, script: Script, body: str, code: int, module: bool
) -> None:
    words = ("-m", "program") if module else (script(body),)
    script(body)
    forked, plain = launch("-n", "1", *words), launch("-n", "1", "--no-fork", *words)
    assert (forked.finish(), plain.finish()) == (code, code)
    assert forked.lines(0) == plain.lines(0)
    ours, theirs = ([line.split(" at 0x")[0] for line in run.error_lines(0)] for run in (forked, plain))
    assert ours == theirs


def test_a_program_finds_what_lies_beside_it(launch: Launch, tmp_path: Path) -> None:
    """Also where it bears the name of a module of Python's own."""
    for name in ("json", "signal", "socket"):
        write(tmp_path, f"folder/{name}.py", f"name = 'my own {name}'")
    write(tmp_path, "folder/program.py", "import json, signal, socket\nprint(json.name, signal.name, socket.name)")
    launched = launch("-n", "1", "folder/program.py")
    assert launched.finish() == 0, launched.errors
    assert launched.lines() == ["[0] my own json my own signal my own socket"]


def test_a_module_runs_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    (tmp_path / "doomed").mkdir()
    run = f"rmdir ../doomed && exec {sys.executable} -m rankmesh run -n 1 -m this"
    done = subprocess.run(
        ["sh", "-c", run], cwd=tmp_path / "doomed", capture_output=True, timeout=scaled(DEADLINE), check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"[0] Beautiful is better than ugly." in done.stdout


def test_forked_ranks_have_the_same_addresses_and_hashes(launch: Launch, script: Script) -> None:
    program = script("print(json.dumps([hash('x'), id(int), id(sys.stdout)]) if (json := __import__('json')) else 0)")
    forked, plain = seen(launch, program), seen(launch, "--no-fork", program)
    assert forked[0] == forked[1]
    assert plain[0] != plain[1]


def test_ranks_draw_numbers_of_their_own(launch: Launch, script: Script) -> None:
    body = "import json, random, uuid; print(json.dumps([random.random(), uuid.uuid4().hex, os.urandom(8).hex()]))"
    first, second = seen(launch, script(body))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_programs_of_forked_ranks_start_processes_of_their_own(launch: Launch, script: Script) -> None:
    program = script(
        """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [rank + 2]))
        """
    )
    launched = launch("-n", "2", program)
    assert launched.finish() == 0, launched.errors
    assert sorted(launched.lines()) == ["[0] [4]", "[1] [9]"]


@pytest.mark.parametrize("kind", ["no suffix", "folder", "archive"])
def test_other_programs_are_run_by_an_interpreter_of_their_own(launch: Launch, tmp_path: Path, kind: str) -> None:
    write(tmp_path, "folder/__main__.py", "import sys; print(__name__, sys.argv)")
    write(tmp_path, "program", "import sys; print(__name__, sys.argv)")
    zipapp.create_archive(tmp_path / "folder", tmp_path / "archive.pyz")
    target = {"no suffix": "program", "folder": "folder", "archive": "archive.pyz"}[kind]
    launched = launch("-n", "2", target, "x")
    assert launched.finish() == 0, launched.errors
    assert sorted(launched.lines()) == [f"[{rank}] __main__ ['{target}', 'x']" for rank in (0, 1)]


TEXTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4)


@given(
    st.lists(st.integers(-1, 1 << 62), min_size=6, max_size=6),
    st.lists(st.integers(0, 99), max_size=9),
    st.lists(st.tuples(st.lists(st.integers(-1, 999), min_size=4, max_size=4), TEXTS, TEXTS), max_size=3),
)
def test_orders_are_read_as_they_were_written(
    numbers: list[int], passed: list[int], ranks: list[tuple[list[int], list[str], list[str]]]
) -> None:
    orders = {
        **dict(zip(stem_main.NUMBERS, numbers, strict=True)),
        "passed": passed,
        "ranks": [
            {**dict(zip(stem_main.PLACES, places, strict=True)), "program": program, "environment": environment}
            for places, program, environment in ranks
        ],
    }
    assert stem_main.read_orders(stem_main.write_orders(orders)) == orders


def test_arguments_and_variables_need_not_be_text(tmp_path: Path) -> None:
    """Any bytes but zeros."""
    (tmp_path / "program.py").write_text("import os, sys; print(os.fsencode(sys.argv[1]), os.environb[b'ODD'])")
    command: list[str | bytes] = [sys.executable, "-m", "rankmesh", "run", "-n", "2"]
    command += [str(tmp_path / "program.py"), b"\xff=\n"]
    environ = {**os.environb, b"ODD": b"\xfe=\n="}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=scaled(DEADLINE), check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [rb"[%d] b'\xff=\n' b'\xfe=\n='" % rank for rank in (0, 1)]


# What `site` does before

STEM = f"import os, signal, sys, threading, time\nif {stem_main.__file__!r} in sys.orig_argv:\n"
#: It says that it is there, and does not get on.
HANG = "open('stem', 'w').write(str(os.getpid())); os.rename('stem', 'started'); signal.pause()"


def with_site(tmp_path: Path, body: str) -> dict[str, str]:
    """An environment in which the stem does this while it starts."""
    write(tmp_path, "site/sitecustomize.py", STEM + textwrap.indent(textwrap.dedent(body), "    "))
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_nothing_is_forked_off_an_interpreter_with_threads(launch: Launch, script: Script, tmp_path: Path) -> None:
    """What they hold would be held for ever in the rank."""
    body = "threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()"
    program = script(
        "import threading; print(threading.active_count(), 'stem_main' in open('/proc/self/cmdline').read())"
    )
    launched = launch("-n", "2", program, env=with_site(tmp_path, body))
    assert launched.finish() == 0, launched.errors
    assert sorted(launched.lines()) == ["[0] 1 False", "[1] 1 False"]


def test_nothing_is_forked_off_an_interpreter_with_random_numbers(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    program = script("import json, numpy; print(json.dumps(numpy.random.random(3).tolist()))")
    launched = launch("-n", "2", program, env=with_site(tmp_path, "import numpy"))
    assert launched.finish() == 0, launched.errors
    assert launched.lines(0) != launched.lines(1)


def test_what_site_prints_is_read(launch: Launch, script: Script, tmp_path: Path) -> None:
    """More of it than a pipe holds."""
    launched = launch("-n", "2", script("print('began')"), env=with_site(tmp_path, "print('x\\n' * 200_000)"))
    assert launched.finish() == 0, launched.errors
    assert launched.lines(0) == [*["x"] * 200_000, "", "began"]


def test_a_hook_that_site_has_set_is_used(launch: Launch, script: Script, tmp_path: Path) -> None:
    body = "sys.excepthook = lambda kind, error, trace: print('seen', error, trace.tb_frame.f_code.co_name)"
    launched = launch("-n", "1", script("raise ValueError('x')"), env=with_site(tmp_path, body))
    assert launched.finish() == 1
    assert launched.lines(0) == ["seen x <module>"]


def test_a_rank_that_ends_before_it_begins_is_noticed(launch: Launch, script: Script, tmp_path: Path) -> None:
    """Killed when it has reported, while another has not: so that nothing tells of it once all have."""
    body = """
        real, stem = os.write, os.getpid()
        def write(fd, data):
            if data.startswith(b"1 "):
                while os.getppid() == stem:
                    time.sleep(0.01)
                time.sleep(0.2)
            written = real(fd, data)
            if data.startswith(b"0 "):
                os.kill(os.getpid(), signal.SIGKILL)
            return written
        os.write = write
    """
    launched = launch("-n", "2", script(WAIT), env=with_site(tmp_path, body))
    assert launched.finish() == 128 + signal.SIGKILL
    assert "failed first: it was ended by SIGKILL" in launched.errors


def test_the_start_of_many_ranks_needs_no_higher_limit(launch: Launch, script: Script) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = script("import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        launched = launch("-n", "24", program)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert launched.finish() == 0, launched.errors
    assert sorted(launched.lines()) == sorted(f"[{rank:>2}] 64 {hard}" for rank in range(24))


def test_the_stem_ends_with_the_launcher(launch: Launch, script: Script, tmp_path: Path) -> None:
    launched = launch("-n", "2", script("print('began')"), env=with_site(tmp_path, HANG))
    wait_until((tmp_path / "started").exists, DEADLINE, "the stem")
    launched.process.kill()
    stem = int((tmp_path / "started").read_text())
    wait_until(lambda: is_gone(stem), 10, "the end of the stem")


def test_a_rank_that_cannot_be_forked_is_named_and_no_other_begins(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    body = """
        real, ranks = os.fork, []
        def fork():
            if ranks:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            ranks.append(None)
            return real()
        os.fork = fork
    """
    launched = launch("-n", "3", script("print('began')"), env=with_site(tmp_path, body))
    assert launched.finish() != 0
    assert launched.out == b""
    assert "Rank 1 cannot be started: [Errno 11] Resource temporarily unavailable." in launched.errors


def test_an_interpreter_that_does_not_start_is_told(launch: Launch, script: Script, tmp_path: Path) -> None:
    body = "print('no licence', file=sys.stderr); os._exit(3)"
    launched = launch("-n", "2", script("print('began')"), env=with_site(tmp_path, body))
    assert launched.finish() != 0
    assert launched.out == b""
    assert launched.error_lines(0) == ["no licence"]
    assert "Rank 0 cannot be started: its interpreter ended with code 3." in launched.errors


def test_an_interpreter_that_takes_too_long_to_start_is_given_up(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_TIMEOUT", 0.5)
    environ = {**os.environ, **with_site(tmp_path, f"os.chdir({str(tmp_path)!r})\n" + HANG)}
    plan = RankPlan(0, [sys.executable, script(WAIT)], environ)
    with selectors.PollSelector() as selector, open(os.devnull, "wb") as null:
        output = Multiplexer(selector)

        def streams(rank: int, *pipes: IO[bytes]) -> tuple[Stream, Stream]:
            out, err = (Stream(pipe, output.sink(null.fileno()), bytes, None) for pipe in pipes)
            return out, err

        running = Supervisor(selector, output, grace=0.1, timeout=None)
        with running, pytest.raises(JoinError, match=r"did not start within 0\.5 s"):
            running.run([plan], streams)
    if (tmp_path / "started").exists():  # on a slow machine not even that
        assert is_gone(int((tmp_path / "started").read_text()))


def test_ctrl_c_before_the_ranks_begin(launch: Launch, script: Script, tmp_path: Path) -> None:
    launched = launch("-n", "2", script("print('began')"), env=with_site(tmp_path, HANG))
    wait_until((tmp_path / "started").exists, DEADLINE, "the stem")
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish() == 128 + signal.SIGINT
    assert is_gone(int((tmp_path / "started").read_text()))
    assert launched.out == b""


#: A launcher that is killed when its ranks have branched off, before they are given the word.
HALF = """
import os, signal, sys
from rankmesh.launch.plan import RankPlan
from rankmesh.launch.stem import Stem
with Stem([RankPlan(rank, [sys.executable, sys.argv[1]], dict(os.environ)) for rank in (0, 1)]) as stem:
    while not stem.complete:
        stem.read()
    print(*(process.pid for process in stem.settle()), flush=True)
    signal.pause()
"""


def test_a_rank_whose_launcher_is_gone_does_not_begin(tmp_path: Path) -> None:
    write(tmp_path, "program.py", f"open({str(tmp_path / 'began')!r}, 'w')")
    command = [sys.executable, "-c", HALF, str(tmp_path / "program.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        ranks = [int(word) for word in launcher.stdout.readline().split()]
        assert len(ranks) == 2
        assert not any(map(is_gone, ranks))
        launcher.kill()
        wait_until(lambda: all(map(is_gone, ranks)), 10, "the end of the ranks")
    assert not (tmp_path / "began").exists()


def test_a_launcher_adopts_nobody_but_its_ranks(launch: Launch, script: Script) -> None:
    """What a rank leaves behind on purpose is nobody's child, as after any other program."""
    program = script(
        """
        read, write = os.pipe()
        waiting = f"import os; os.read({read}, 1); print('parent', os.getppid(), flush=True)"
        starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {waiting!r}], pass_fds=[{read}])"
        subprocess.run([sys.executable, "-c", starter], pass_fds=[read], check=True)
        print("launcher", os.getppid(), flush=True)
        os.write(write, b"x")  # one speaks after the other: they share a pipe
        signal.pause()
        """
    )
    launched = launch("-n", "1", program)
    launched.wait_for("[0] parent", "[0] launcher")
    parents = dict(line.split()[1:3] for line in launched.lines())
    launched.process.terminate()
    assert launched.finish() == 143
    assert parents["launcher"] == str(launched.process.pid) != parents["parent"]
