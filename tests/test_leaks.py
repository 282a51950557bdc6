"""The leak check and the hang guard catch what they are for: a pytest of its own runs tests that misbehave."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from timing import scaled

TESTS = Path(__file__).parent
SHM_NAME = f"rankmesh-leak-{uuid.uuid4().hex}"

#: Name of a leaky test → its body, and what the report on it must say.
LEAKS = {
    "zombie": (  # the first: Python warns of forks beside other threads
        "pid = os.fork(); os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) if pid else os._exit(0)",
        r"process: pid \d+ in state Z",
    ),
    "thread": (
        "threading.Thread(target=threading.Event().wait, args=(60,), name='stray', daemon=True).start()",
        r"thread: <Thread\(stray, started daemon",
    ),
    "file": ("os.open('/dev/null', os.O_RDONLY)", r"file descriptor: \d+ → /dev/null"),
    "socket": ("keep.append(socket.socket())", r"file descriptor: \d+ → socket:\["),
    "garbage": (
        "cycle = [socket.socket()]; cycle.append(cycle)",
        r"ResourceWarning: unclosed <socket",
    ),
    "child": (
        "keep.append(subprocess.Popen(['sleep', '60'])); print('started', keep[-1].pid)",
        r"process: pid \d+ in state \w: .*sleep 60",
    ),
    "orphan": (
        "print('started', subprocess.run('sleep 60 >&- 2>&- & echo $!', shell=True, stdout=-1, text=True).stdout)",
        r"process: pid \d+ in state \w: .*sleep 60",
    ),
    "shm": (f"open('/dev/shm/{SHM_NAME}', 'w').close()", f"shared memory: /dev/shm/{SHM_NAME}"),
}


def run_pytest(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one file, with the conftest of these tests and a short settling time."""
    (directory / "test_generated.py").write_text(source)
    shutil.copy(TESTS / "conftest.py", directory)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-W", "error", "--rootdir=.", "."]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "RANKMESH_TEST_SCALE": "0.1"}
    environment.pop("CI", None)  # pytest repeats whole errors in its summary there, and the report is counted in
    environment.pop("BUILD_NUMBER", None)  # likewise
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=scaled(50), check=False
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says about one leaky test of each sort, followed by a clean one."""
    tests = "".join(f"def test_{name}():\n    {body}\n" for name, (body, _) in LEAKS.items())
    source = f"import os, socket, subprocess, threading\nkeep = []\n{tests}def test_clean():\n    pass\n"
    try:
        done = run_pytest(tmp_path_factory.mktemp("leaky"), source)
    finally:
        (Path("/dev/shm") / SHM_NAME).unlink(missing_ok=True)
    for pid in re.findall(r"^started (\d+)", done.stdout, re.MULTILINE):
        with suppress(ProcessLookupError):  # the report shows it twice
            os.kill(int(pid), signal.SIGKILL)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def section(report: str, name: str) -> str:
    """The part of pytest's report on one test's teardown."""
    _, found, rest = report.partition(f" ERROR at teardown of test_{name} ")
    assert found, f"no error at the teardown of test_{name} in\n{report}"
    return re.split(r"\n_{3,} |\n={3,} ", rest)[0]


@pytest.mark.parametrize("name", LEAKS)
def test_each_sort_of_leak_fails_the_test_and_is_named(name: str, report: str) -> None:
    assert re.search(LEAKS[name][1], section(report, name)), report
    assert f"PASSED test_generated.py::test_{name}\n" in report


def test_leak_is_held_against_the_test_that_made_it_and_against_the_run(report: str) -> None:
    """The clean test comes last, so the check around the run speaks in its teardown; its own check finds nothing."""
    assert report.count("thread: <Thread(stray") == 2
    assert "stray" in section(report, "thread")
    assert "stray" in section(report, "clean")


def test_what_ends_while_the_check_waits_is_no_leak(tmp_path: Path) -> None:
    source = """
import threading
def test_lingering_thread():
    threading.Thread(target=threading.Event().wait, args=(0.05,)).start()
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 0, done.stdout + done.stderr


def test_module_fixture_that_leaks_fails_the_run(tmp_path: Path) -> None:
    source = """
import os, pytest
@pytest.fixture(scope="module")
def leaky():
    os.open("/dev/null", os.O_RDONLY)
def test_uses_it(leaky):
    pass
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"file descriptor: \d+ → /dev/null", section(done.stdout, "uses_it"))


def test_hanging_test_fails_with_all_stacks_and_the_run_goes_on(tmp_path: Path) -> None:
    source = """
import threading, pytest
@pytest.mark.timeout(0.5)
def test_hangs():
    release = threading.Event()
    helper = threading.Thread(target=release.wait, name="bystander")
    helper.start()
    try:
        threading.Event().wait()
    finally:
        release.set()
        helper.join()
def test_after():
    pass
"""
    done = run_pytest(tmp_path, source)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (>0.5s) from pytest-timeout" in done.stdout
    assert "Stack of bystander" in done.stdout + done.stderr
    assert "PASSED test_generated.py::test_after" in done.stdout
