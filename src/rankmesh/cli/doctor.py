"""`rankmesh doctor`: examine this machine and its network, and say what is wrong with them.

Every examination is a function that returns findings; `EXAMINATIONS` lists them. A finding is fine, or worth a note, or
broken: then ranks cannot work here, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from rankmesh.cli.main import Subparsers
from rankmesh.cli.reach import reach
from rankmesh.config import Config
from rankmesh.errors import ConfigError, RankmeshError
from rankmesh.membership import environment, interfaces
from rankmesh.membership.schemes import SCHEMES
from rankmesh.transport import segment, shm
from rankmesh.transport.address import Address
from rankmesh.transport.place import Place
from rankmesh.transport.pulling import Puller

Verdict = Literal["ok", "note", "broken"]

#: A rank keeps one connection per peer, and libraries open files of their own.
FEW_FILES: Final = 1024
#: Whom a user's processes may trace: above 0, and without that right, only their descendants.
YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
#: (package, whether rankmesh needs it)
PACKAGES: Final = (
    ("rankmesh", True),
    ("numpy", True),
    ("msgspec", True),
    ("rich", True),
    ("cryptography", False),
    ("torch", False),
)
#: Seconds until an address counts as unreachable.
REACH_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("doctor", description="Examine this machine and its network.", allow_abbrev=False)
    parser.add_argument(
        "--rendezvous", default="127.0.0.1:0", metavar="HOST:PORT", help="where ranks meet (default: this host)"
    )
    parser.add_argument("--interface", metavar="SPEC", help="as in Config.interface: names, globs, ^exclude, CIDR")
    parser.add_argument(
        "--reach", action="append", default=[], metavar="ADDRESS", help="try to connect to tcp://host:port"
    )
    parser.add_argument(
        "--timeout", type=float, default=REACH_TIMEOUT, metavar="S", help="seconds for each --reach (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    findings = [finding for examine in EXAMINATIONS for finding in examine(args)]
    broken = any(finding.verdict == "broken" for finding in findings)
    if args.json:
        print(json.dumps({"healthy": not broken, "findings": [asdict(f) for f in findings]}, indent=2))
    elif sys.stdout.isatty():
        _print_table(findings)
    else:
        _print_lines(findings)
    return 1 if broken else 0


def _python(_: argparse.Namespace) -> list[Finding]:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    build = f"{platform.python_implementation()} {platform.python_version()}" + (
        " free-threaded" if free_threaded else ""
    )
    return [
        Finding("python", "version", build),
        Finding("python", "build", f"{platform.python_compiler()}, {platform.platform()}"),
        Finding("python", "executable", sys.executable),
    ]


def _cores(_: argparse.Namespace) -> list[Finding]:
    usable = sorted(os.sched_getaffinity(0))
    machine = platform.machine()
    ordered = shm.ORDERED
    note = (
        ""
        if ordered
        else "Shared-memory rings ring a doorbell for every message here: correct, but slower than on x86."
    )
    quota = _cpu_quota()
    return [
        Finding("cores", "machine", f"{os.cpu_count()} cores"),
        Finding("cores", "affinity", f"this process may use {len(usable)}: {','.join(map(str, usable))}"),
        Finding("cores", "quota", "none" if quota is None else f"{quota:g} cores by cgroup")
        if quota is None or quota >= len(usable)
        else Finding(
            "cores",
            "quota",
            f"{quota:g} cores by cgroup",
            "note",
            "Start no more ranks than that: polling ranks use it up.",
        ),
        Finding(
            "cores",
            "architecture",
            f"{machine}, {'ordered' if ordered else 'weakly ordered'} stores",
            "ok" if ordered else "note",
            note,
        ),
    ]


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None  # no cgroup v2, or its root: no limit
    return None if quota == "max" else int(quota) / int(period)


def _network(args: argparse.Namespace) -> list[Finding]:
    there = interfaces.list_interfaces()
    findings = [
        Finding(
            "network",
            i.name,
            f"{i.address}/{i.prefix}" + ("" if i.up else " (down)") + (" (loopback)" if i.loopback else ""),
        )
        for i in there
    ]
    try:
        address = _address(args.rendezvous)
        spec = Config.from_env().interface if args.interface is None else args.interface
        choice = interfaces.choose(there, spec, interfaces.route_to(address.host, address.port or 1))
    except RankmeshError as error:
        return [*findings, Finding("network", "advertised", "none", "broken", str(error))]
    return [*findings, Finding("network", "advertised", str(choice)), _bind(choice.address)]


def _bind(host: str) -> Finding:
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            return Finding(
                "network", "listening", f"a free port can be bound on {host} (such as {server.getsockname()[1]})"
            )
    except OSError as error:
        advice = f"No port can be bound on {host}: {error}. Choose another interface."
        return Finding("network", "listening", "no port can be bound", "broken", advice)


def _limits(_: argparse.Namespace) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Finding("limits", "open files", f"{soft} (at most {hard})")
    if 0 <= soft < FEW_FILES:
        files = Finding(
            "limits", files.name, files.value, "note", f"Raise it for worlds of many ranks: ulimit -n {FEW_FILES}."
        )
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    threads = "unlimited" if processes == resource.RLIM_INFINITY else str(processes)
    return [
        files,
        Finding("limits", "threads and processes", f"{threads} (this user), {_pids_limit()} (cgroup)"),
        _shared_memory(),
        _pulling(),
    ]


def _pids_limit() -> str:
    try:
        text = Path("/sys/fs/cgroup/pids.max").read_text().strip()
    except OSError:
        return "no limit"
    return "no limit" if text == "max" else text


def _shared_memory() -> Finding:
    """Try what two ranks of this host would do. It is anonymous memory: the size of /dev/shm does not matter."""
    try:
        place = Place.here()
        shared, fd = segment.create()
    except OSError as error:
        reason = error.strerror or error
        return Finding("limits", "shared memory", f"none ({reason})", "note", "Ranks on one host fall back to TCP.")
    shared.close()
    os.close(fd)
    return Finding("limits", "shared memory", f"works, for uid {place.user} in network namespace {place.network}")


def _pulling() -> Finding:
    """Whether ranks of this host may read each other's memory, which spares a copy."""
    name, advice = "memory of other ranks", "Large collectives and registered memory inside this host take a copy more."
    try:
        scope = int(YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope > 0 and os.geteuid() > 0:
        return Finding("limits", name, f"cannot be read ({YAMA} is {scope})", "note", advice)
    word = ctypes.c_uint64(os.getpid())
    if not Puller(os.getpid()).finds(ctypes.addressof(word), word.value):
        return Finding("limits", name, "cannot be read (process_vm_readv is not allowed here)", "note", advice)
    return Finding("limits", name, "can be read")


def _packages(_: argparse.Namespace) -> list[Finding]:
    findings = []
    for name, needed in PACKAGES:
        try:
            findings.append(Finding("packages", name, version(name)))  # reads metadata: torch is not imported
        except PackageNotFoundError:
            advice = f"Install it: pip install {name}." if needed else ""
            findings.append(Finding("packages", name, "not installed", "broken" if needed else "ok", advice))
    return findings


def _launcher(_: argparse.Namespace) -> list[Finding]:
    findings = [Finding("environment", name, value) for name, value in _seen_variables(os.environ)]
    try:
        Config.from_env()
        placement = environment.detect(os.environ, parent_pid=os.getppid())
    except RankmeshError as error:
        return [*findings, Finding("environment", "launcher", "unclear", "broken", str(error))]
    if placement is None:
        return [
            *findings,
            Finding("environment", "launcher", "none: join() needs arguments, or a launcher such as `rankmesh run`"),
        ]
    place = f"rank {placement.rank} of {placement.size}, local {placement.local_rank} of {placement.local_size}"
    where = "{}:{}".format(*placement.master) if placement.master else "a file on this host"
    return [*findings, Finding("environment", "launcher", f"{placement.source}: {place}, rendezvous by {where}")]


def _seen_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The variables that tell rankmesh something; secrets are not shown."""
    exact = {name for s in SCHEMES for name in (s.rank, *s.size, *s.local_rank, *s.local_size, *s.node_rank, *s.run_id)}
    exact |= {"MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"}
    seen = sorted(name for name in environ if name in exact or name.startswith("RANKMESH_"))
    return [(name, "(set)" if name == "RANKMESH_TOKEN" else environ[name]) for name in seen]


def _reachability(args: argparse.Namespace) -> list[Finding]:
    findings = []
    for text in args.reach:
        try:
            address = _address(text)
        except ConfigError as error:
            findings.append(Finding("reach", text, "not an address", "broken", str(error)))
            continue
        result = reach(address.host, address.port, args.timeout)
        findings.append(Finding("reach", text, result.text, "ok" if result.reached else "broken", result.advice))
    return findings


def _address(text: str) -> Address:
    address = Address.parse(text if "://" in text else f"tcp://{text}")
    if address.scheme == "inproc":
        raise ConfigError(f"{text!r} names a place inside one process. Give tcp://host:port.")
    return address


EXAMINATIONS: Final[Sequence[Callable[[argparse.Namespace], list[Finding]]]] = (
    _python,
    _cores,
    _network,
    _limits,
    _packages,
    _launcher,
    _reachability,
)

_MARKS: Final[Mapping[Verdict, str]] = {"ok": "ok", "note": "note", "broken": "BROKEN"}
_STYLES: Final[Mapping[Verdict, str]] = {"ok": "green", "note": "yellow", "broken": "bold red"}


def _print_lines(findings: Sequence[Finding]) -> None:
    width = max(len(f"{f.topic} {f.name}") for f in findings)
    for f in findings:
        print(
            f"{_MARKS[f.verdict]:6} {f'{f.topic} {f.name}':{width}}  {f.value}{f'  → {f.advice}' if f.advice else ''}"
        )


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console  # only where it is shown: it takes as long to load as all the rest
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    topic = ""
    for f in findings:
        shown = Text(f.value)
        if f.advice:
            shown.append(f"\n{f.advice}", style=_STYLES[f.verdict])
        table.add_row(
            Text(f.topic if f.topic != topic else "", style="bold"),
            f.name,
            Text(_MARKS[f.verdict], style=_STYLES[f.verdict]),
            shown,
        )
        topic = f.topic
    Console().print(table)
