"""Puts the launcher together: the token and the store, the plan, the supervisor, the report."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from rankmesh.config import Config
from rankmesh.errors import ConfigError
from rankmesh.launch.output import Multiplexer, Stream
from rankmesh.launch.plan import Meeting, Program, World, plan_ranks
from rankmesh.launch.supervisor import FORWARDED, Supervisor
from rankmesh.membership.interfaces import route_to
from rankmesh.membership.ports import free_port
from rankmesh.membership.store import StoreServer

#: Colours of the ranks' prefixes, by rank: ANSI codes that can be read on light and dark terminals.
COLOURS: Final = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the launcher behaves; what it starts is in Program and World."""

    log_dir: Path | None = None
    prefix: bool = True
    #: Seconds between SIGTERM and SIGKILL.
    grace: float = 5.0
    #: Seconds after which the ranks are ended.
    timeout: float | None = None
    #: Ranks share the addresses of one process they are forked from (see stem).
    fork: bool = True


def launch(program: Program, world: World, options: Options, environ: Mapping[str, str] = os.environ) -> int:
    """Run the ranks of this node to their end; the exit code is that of the first rank that failed, or 0.

    For the main thread, as the last thing its process does: SIGUSR1 and SIGUSR2 are ignored from then on."""
    if not program.module and not Path(program.target).exists():
        raise _no_script(program.target)
    if options.log_dir is not None:
        _make_directory(options.log_dir)
    config = Config.from_env(environ)
    config = config.override(token=config.token or _new_token(world))
    with _harmless(FORWARDED), _store(world, config) as store:
        meeting = Meeting(
            store=store,
            token=config.token,
            run_id=environ.get("RANKMESH_RUN_ID") or _new_run_id(world),
            torch_master=_torch_master(world),
        )
        plans = plan_ranks(world, program, meeting, environ, cores=len(os.sched_getaffinity(0)))
        selector = selectors.PollSelector()  # unlike epoll it takes regular files, to which output may be redirected
        output = Multiplexer(selector)
        with (
            selector,
            Supervisor(selector, output, grace=options.grace, timeout=options.timeout, fork=options.fork) as supervisor,
        ):
            outcome = supervisor.run(plans, _stream_opener(output, world, options))
            report = outcome.report(timeout=options.timeout)
            output.put(sys.stderr.fileno(), "".join(f"{line}\n" for line in report).encode())
            supervisor.flush()
    return outcome.code


def _no_script(target: str) -> ConfigError:
    could_be_a_module = os.sep not in target and not target.endswith(".py")
    advice = f"Check the name, or write -m {target} if it is a module." if could_be_a_module else "Check the name."
    return ConfigError(f"The file {target!r} does not exist (seen from {os.getcwd()}). {advice}")


def _new_token(world: World) -> str:
    if world.nnodes > 1:
        raise ConfigError(
            "Ranks on several nodes prove themselves by a common token. Set RANKMESH_TOKEN to the same secret on all "
            'nodes, for example one made by `python -c "import secrets; print(secrets.token_hex(32))"`.'
        )
    return secrets.token_hex(32)


def _new_run_id(world: World) -> str:
    """All nodes must agree on it without asking; there the store, which lives as long as the run, tells runs apart."""
    return secrets.token_hex(8) if world.rendezvous is None else f"{world.rendezvous.host}-{world.rendezvous.port}"


@contextmanager
def _harmless(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Signals that are only passed on do not kill the launcher when there are no ranks yet, or no more.

    A handler would not do for the time after: Python takes it away while the process ends."""
    deadly = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, lambda _number, _frame: None)
    try:
        yield
    finally:
        for number in deadly:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def _store(world: World, config: Config) -> Iterator[str]:
    """The address of the store, which runs here on node 0."""
    scheme = "tls" if config.tls is not None else "tcp"
    if world.rendezvous is None:
        with StoreServer(f"{scheme}://127.0.0.1:0", config) as server:
            yield server.address
        return
    address = world.rendezvous.with_scheme(scheme)
    if world.node_rank > 0:
        yield str(address)
        return
    # The name may mean loopback on the host that bears it (/etc/hosts of Debian); the others come from outside.
    host = route_to(address.host, address.port)
    with StoreServer(str(replace(address, host=host)), config):
        yield str(address)


def _torch_master(world: World) -> tuple[str, int]:
    """A place for the store that torch.distributed makes in rank 0. All nodes must agree on it without asking."""
    if world.rendezvous is not None:
        return world.rendezvous.host, world.rendezvous.port + 1
    return "127.0.0.1", free_port()


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The log directory {path} cannot be made: {error}. Choose another --log-dir.") from error


def _stream_opener(
    output: Multiplexer, world: World, options: Options
) -> Callable[[int, IO[bytes], IO[bytes]], tuple[Stream, Stream]]:
    width = len(str(world.size - 1))

    def stream(rank: int, pipe: IO[bytes], ours: IO[str], name: str) -> Stream:
        label = _line_start(rank, width, colour=_wants_colour(ours)) if options.prefix else b""
        log = None
        if options.log_dir is not None:
            path = options.log_dir / f"rank-{rank}.{name}"
            try:
                log = path.open("wb", buffering=0)
            except OSError as error:
                raise ConfigError(f"The log {path} cannot be opened: {error}. Choose another --log-dir.") from error
        return Stream(pipe, output.sink(ours.fileno()), lambda line: label + line + b"\n", log)

    return lambda rank, out, err: (stream(rank, out, sys.stdout, "out"), stream(rank, err, sys.stderr, "err"))


def _line_start(rank: int, width: int, *, colour: bool) -> bytes:
    text = f"[{rank:>{width}}]"
    return (f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


def _wants_colour(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
