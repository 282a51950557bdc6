"""The stem: the one interpreter of a run from which its ranks branch off (see stem).

Run by path with `python -P -S stem_main.py <descriptor of the orders>`, and the program for `ps` to show. Without
`site` it starts in milliseconds, and ties its life to the launcher's; then it begins anew with `site`, if programs are
to run here. It imports next to nothing: what is imported here a program would not find in its own folder, and threads
and random numbers must not be shared. Each rank, once forked:

1. leads a session of its own, has its own pipes and environment, and says so to the launcher;
2. waits for the launcher's word, which comes when the stem has ended and the rank is the launcher's own child;
3. has the kernel kill it when the launcher's main thread ends, however that ends (PR_SET_PDEATHSIG survives exec);
4. runs the program right here, as `python` would, or becomes a new interpreter that does (exec).

It is `exec` where the orders say so; where `site` has started threads, which would be missing here, or imported
something with a random state that all would share; and for programs that are not a plain `.py` file or a module, or
cannot be compiled, which Python says best itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

TYPE_CHECKING = False  # as in typing, which is not imported
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import Any, NoReturn

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

PR_SET_PDEATHSIG = 1
SIGKILL = 9
#: What a shell answers for a command that cannot be executed.
CANNOT_EXECUTE = 126
#: What ranks must not share the state of.
RANDOM = {"numpy", "torch"}
#: What orders say of all ranks, and of each.
NUMBERS = ("launcher", "fork", "soft", "hard", "report", "word")
PLACES = ("rank", "stdin", "stdout", "stderr")
HERE = __file__  # Python takes `__file__` away when the main thread has ended


def main() -> None:
    with open(int(sys.argv[1]), "rb", closefd=False) as stream:
        orders = read_orders(stream.read())
        stream.seek(0)
    if sys.flags.no_site:
        tie_to(orders["launcher"])
        if orders["fork"]:
            execute([HERE, *sys.argv[1:]])
    elif not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file: programs have theirs there
    os.close(int(sys.argv[1]))
    in_place = orders["fork"] and len(os.listdir("/proc/self/task")) == 1 and RANDOM.isdisjoint(sys.modules)
    if not in_place:
        silence_warnings()
    for rank in orders["ranks"]:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(orders["report"], f"{rank['rank']} {error}\n".encode())
            break
        if pid == 0:
            branch_off(rank, orders)
            program = rank["program"]
            if in_place and (program[0] == "-m" or (code := load(program[0])) is not None):
                become(program, None if program[0] == "-m" else code)
                return
            execute(program)
    os._exit(0)  # what `site` left to be done at the end is for the ranks to do


def write_orders(orders: dict[str, Any]) -> bytes:
    """For the launcher: texts, none of which can hold a zero, one behind the other."""
    fields = [*(orders[name] for name in NUMBERS), *_counted(orders["passed"]), len(orders["ranks"])]
    for rank in orders["ranks"]:
        fields += [*(rank[name] for name in PLACES), *_counted(rank["program"]), *_counted(rank["environment"])]
    return b"\0".join(os.fsencode(str(field)) for field in fields)


def read_orders(data: bytes) -> dict[str, Any]:
    """Without a module for it, which a program would not find in its own folder then."""
    fields = iter(data.split(b"\0"))

    def number() -> int:
        return int(next(fields))

    def texts() -> list[str]:
        return [os.fsdecode(next(fields)) for _ in range(number())]

    orders: dict[str, Any] = {name: number() for name in NUMBERS}
    orders["passed"] = [int(text) for text in texts()]
    orders["ranks"] = [
        {**{name: number() for name in PLACES}, "program": texts(), "environment": texts()} for _ in range(number())
    ]
    return orders


def _counted(items: list[Any]) -> list[Any]:
    return [len(items), *items]


def silence_warnings() -> None:
    """Python warns of forks where there are threads; whoever is forked here only calls exec."""
    import warnings

    warnings.simplefilter("ignore")


def branch_off(rank: dict[str, Any], orders: dict[str, Any]) -> None:
    """Make this process the rank, and wait until the launcher has made it its own."""
    os.setsid()
    if rank["stdin"] >= 0:
        os.dup2(rank["stdin"], 0)
    os.dup2(rank["stdout"], 1)
    os.dup2(rank["stderr"], 2)
    for fd in orders["passed"]:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (orders["soft"], orders["hard"]))
    os.environ.update(variable.split("=", 1) for variable in rank["environment"])
    report, word = orders["report"], orders["word"]
    os.write(report, f"{rank['rank']} {os.getpid()}\n".encode())
    os.close(report)
    if not os.read(word, 1):
        give_up("the launcher ended before this rank began")
    os.close(word)
    tie_to(orders["launcher"])


def tie_to(launcher: int) -> None:
    """Have the kernel kill this process when the launcher's main thread ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        give_up(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != launcher:
        give_up("the launcher ended before this rank began")  # no signal comes for a death before prctl


def give_up(reason: str, code: int = 1) -> NoReturn:
    """End this process at once: nothing of the program has begun."""
    os.write(2, f"rankmesh: {reason}.\n".encode(errors="replace"))
    os._exit(code)


def load(script: str) -> CodeType | None:
    """None: not to be run here."""
    if not script.endswith(".py"):
        return None
    path = path_of(script)
    try:
        with open(path, "rb") as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None


def become(program: list[str], code: CodeType | None) -> None:
    """Run the program in this interpreter, as `python` with these words would: this code, or a module."""
    main_module = type(sys)("__main__")
    main_module.__dict__.update({"__builtins__": __builtins__, "__annotations__": {}})
    sys.modules["__main__"] = main_module
    sys.orig_argv = [sys.executable, *program]
    try:
        if code is None:
            import runpy

            sys.argv = ["-m", *program[2:]]
            search_first(os.getcwd)
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            path = path_of(program[0])
            sys.argv = list(program)
            search_first(lambda: os.path.dirname(os.path.realpath(path)))
            loader = type(globals()["__loader__"])("__main__", path)
            main_module.__dict__.update({"__file__": path, "__cached__": None, "__loader__": loader})
            exec(code, main_module.__dict__)  # noqa: S102  # the user's program
    except BaseException:
        sys.excepthook = without_our_frames(sys.excepthook)
        raise


def path_of(script: str) -> str:
    return os.path.join(os.getcwd(), script)  # not in its shortest form: Python does not do so either


def search_first(folder: Callable[[], str]) -> None:
    if not sys.flags.safe_path:
        try:
            sys.path.insert(0, folder())
        except OSError:  # the working directory was removed: Python does without, too
            return


def without_our_frames(hook: Hook) -> Hook:
    """Show what the program raised without the frames of this file that are below it."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_code.co_filename == HERE:
            trace = trace.tb_next
        error.__traceback__ = trace
        hook(kind, error, trace)

    return show


def execute(program: list[str]) -> NoReturn:
    """Become a new interpreter that runs the program."""
    try:
        os.execv(sys.executable, [sys.executable, *program])
    except OSError as error:
        give_up(f"{sys.executable} cannot be executed: {error.strerror}", CANNOT_EXECUTE)


if __name__ == "__main__":
    main()
