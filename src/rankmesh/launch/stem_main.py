"""The stem: the one interpreter of a run from which its ranks branch off (see stem).

Run by path with `python stem_main.py <descriptor of the orders>`, and the program for `ps` to show; imports nothing of
rankmesh, nor anything that starts threads or holds state that ranks must not share. Each rank, once forked:

1. leads a session of its own, has its own pipes and environment, and says so to the launcher;
2. waits for the launcher's word, which comes when the stem has ended and the rank is the launcher's own child;
3. has the kernel kill it when the launcher's main thread ends, however that ends (PR_SET_PDEATHSIG survives exec);
4. runs the program right here, as `python` would, or becomes a new interpreter that does (exec).

It is `exec` where the orders say so, where this interpreter has threads already (a `.pth` file started them), and for
programs that are not a plain `.py` file or a module.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
#: What a shell answers for a command that cannot be executed.
CANNOT_EXECUTE = 126


def main() -> None:
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file: programs have theirs there
    with open(int(sys.argv[1]), encoding="utf-8") as stream:
        orders = json.load(stream)
    in_place = orders["fork"] and len(os.listdir("/proc/self/task")) == 1
    for rank in orders["ranks"]:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(orders["report"], f"{rank['rank']} {error}\n".encode())
            return
        if pid == 0:
            branch_off(rank, orders)
            program = rank["program"]
            if in_place and (source := load(program)) is not None:
                become(program, source)
            else:
                execute(program)
            return


def branch_off(rank: dict[str, Any], orders: dict[str, Any]) -> None:
    """Make this process the rank, and wait until the launcher has made it its own."""
    os.setsid()
    if rank["stdin"] is not None:
        os.dup2(rank["stdin"], 0)
    os.dup2(rank["stdout"], 1)
    os.dup2(rank["stderr"], 2)
    for fd in orders["passed"]:
        os.close(fd)
    os.environ.update(rank["environment"])
    report, word = orders["report"], orders["word"]
    os.write(report, f"{rank['rank']} {os.getpid()}\n".encode())
    os.close(report)
    if not os.read(word, 1):
        sys.exit("rankmesh: the launcher ended before this rank began.")
    os.close(word)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"rankmesh: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}.")
    if os.getppid() != orders["launcher"]:
        sys.exit("rankmesh: the launcher ended before this rank began.")  # no signal comes for a death before prctl


def load(program: Sequence[str]) -> bytes | None:
    """The program's source, or nothing for a module, which is found later. None: not to be run here."""
    if program[0] == "-m":
        return b""
    if not program[0].endswith(".py"):
        return None
    try:
        with io.open_code(_path(program)) as file:
            return file.read()
    except OSError:
        return None  # Python itself says it best


def become(program: Sequence[str], source: bytes) -> None:
    """Run the program in this interpreter, as `python` with these words would."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update({"__builtins__": __builtins__, "__annotations__": {}})
    sys.modules["__main__"] = main_module
    sys.orig_argv = [sys.executable, *program]
    if program[0] == "-m":
        sys.argv = ["-m", *program[2:]]
        _search_first(os.getcwd())
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    path = _path(program)
    sys.argv = list(program)
    _search_first(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update({"__file__": path, "__cached__": None, "__loader__": loader})
    sys.excepthook = show
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)  # noqa: S102  # the user's program


def _path(program: Sequence[str]) -> str:
    return os.path.join(os.getcwd(), program[0])  # not in its shortest form: Python does not do so either


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print what the program raised, without the frames of this file that are below it."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def execute(program: Sequence[str]) -> NoReturn:
    """Become a new interpreter that runs the program."""
    try:
        os.execv(sys.executable, [sys.executable, *program])
    except OSError as error:
        print(f"rankmesh: {sys.executable} cannot be executed: {error.strerror}.", file=sys.stderr)
        sys.exit(CANNOT_EXECUTE)


if __name__ == "__main__":
    main()
