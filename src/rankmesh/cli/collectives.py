"""`rankmesh bench collectives`: time and bandwidth by size, as nccl-tests show them; beside gloo and mpi4py; and tables
of the fastest algorithms.

Inside a launch its ranks measure. Started alone it launches a world of ranks on this host for each library, one after
the other; every world's rank 0 prints its table and leaves it in a file, from which the rest is made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

from rankmesh import Mesh
from rankmesh.cli import backends, report, svg, tune, two_ranks
from rankmesh.cli.backends import FOREIGN, OTHERS, RankmeshBackend
from rankmesh.cli.exercise import KINDS, Backend, Task, Timing, dtype_of, measure
from rankmesh.collectives.choosing import ALGORITHMS
from rankmesh.collectives.kinds import kind_of
from rankmesh.collectives.reducing import OPERATIONS
from rankmesh.errors import ConfigError, UsageError
from rankmesh.membership.environment import detect

EPILOG: Final = """\
examples:
  rankmesh bench collectives --pin
  rankmesh bench collectives --collectives all_reduce,all_gather --ranks 4 --sizes 8:64M:8 --compare gloo,mpi4py
  rankmesh bench collectives --collectives all_reduce --algorithm all --plot all_reduce.svg
  rankmesh bench collectives --ranks 4 --tune table.json && RANKMESH_COLLECTIVE_TABLE=table.json rankmesh run …
  rankmesh run -n 2 --nnodes 2 … -m rankmesh bench collectives

A size is that of a rank's larger buffer: the array of all_reduce, what all_gather brings, what a rank gives to
reduce_scatter or all_to_all. A time is that of a loop of calls on the slowest rank, divided by their number. algbw is
size / time; busbw is what each rank's connection carries: times 2(n-1)/n for all_reduce, (n-1)/n for all_gather,
reduce_scatter, all_to_all, gather and scatter. #wrong counts elements that are not as numpy has them, on all ranks; if
there are any, the exit code is 1. A form that a library does not have is n/a.
"""
DEFAULT_SIZES: Final = "8:64M:8"
ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one size; None where there is no such form."""

    backend: str
    collective: str
    algorithm: str
    nbytes: int
    #: Elements of what is reduced, sent or received by each rank, as nccl-tests count them.
    count: int
    dtype: str
    op: str
    root: int
    #: What algorithms are chosen by.
    chosen_by: int
    out_us: float | None
    out_algbw_gb_per_s: float | None
    out_busbw_gb_per_s: float | None
    out_wrong: int | None
    in_us: float | None
    in_algbw_gb_per_s: float | None
    in_busbw_gb_per_s: float | None
    in_wrong: int | None

    @property
    def wrong(self) -> int:
        return (self.out_wrong or 0) + (self.in_wrong or 0)

    @property
    def us(self) -> float | None:
        """In place, where there is that."""
        return self.out_us if self.in_us is None else self.in_us

    @property
    def busbw_gb_per_s(self) -> float | None:
        return self.out_busbw_gb_per_s if self.in_us is None else self.in_busbw_gb_per_s


COLUMNS: Final = (
    report.Column("size", "B", "nbytes", 12, "d"),
    report.Column("count", "elements", "count", 12, "d"),
    report.Column("type", "", "dtype", 11, "s"),
    report.Column("redop", "", "op", 7, "s"),
    report.Column("root", "", "root", 6, "d"),
    report.Column("algorithm", "", "algorithm", 20, "s"),
    *(
        report.Column(title, unit, f"{place}_{key}", width, form)
        for place in ("out", "in")
        for title, unit, key, width, form in (
            ("time", "us", "us", 12, ".2f"),
            ("algbw", "GB/s", "algbw_gb_per_s", 9, ".3f"),
            ("busbw", "GB/s", "busbw_gb_per_s", 9, ".3f"),
            ("#wrong", "", "wrong", 8, "d"),
        )
    ),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--collectives",
        type=_listed(tuple(KINDS)),
        metavar="C",
        help=f"comma-separated, of {', '.join(KINDS)} (default all_reduce; with --tune all of them)",
    )
    two_ranks.add_sizes(parser, DEFAULT_SIZES)
    parser.add_argument("--ranks", type=int, metavar="N", help="default 2; inside a launch, all of it")
    parser.add_argument("--dtype", default="float32", help="of numpy, or bfloat16 with ml_dtypes (default float32)")
    parser.add_argument("--op", choices=tuple(OPERATIONS), default="sum", help="of reductions (default sum)")
    parser.add_argument("--root", type=int, default=0, metavar="R", help="of broadcast, reduce … (default 0)")
    parser.add_argument("--iterations", type=_positive, metavar="N", help="calls of a loop, instead of --seconds")
    parser.add_argument(
        "--algorithm", metavar="A", help="a name, or 'all' of them in turn (default: as the table chooses)"
    )
    parser.add_argument("--backend", choices=("rankmesh", *OTHERS), default="rankmesh", help="what is measured")
    parser.add_argument(
        "--compare", type=_listed(tuple(OTHERS)), default=[], metavar="B", help=f"also measure {', '.join(OTHERS)}"
    )
    two_ranks.add_options(parser)
    parser.add_argument("--plot", metavar="FILE.svg", help="also draw time and bus bandwidth")
    parser.add_argument(
        "--tune",
        metavar="FILE",
        help="measure all algorithms, and write which is the fastest: for Config(collective_table=FILE). Entries of "
        "other numbers of ranks stay in it",
    )
    parser.add_argument("--table-on-stderr", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    placement = detect(os.environ, parent_pid=os.getppid())
    inside = placement is not None and placement.size > 1
    if args.tune:
        args.algorithm, args.collectives = ALL, args.collectives or list(KINDS)
    args.collectives = args.collectives or ["all_reduce"]
    args.table_on_stderr |= args.json == "-"
    _check(args, placement.size if placement is not None and inside else args.ranks or 2, inside)
    if inside and args.backend != "rankmesh":
        return _foreign_rank(args, placement.local_rank if placement is not None else 0)
    if inside:
        return two_ranks.run("collectives", args, iter(()), _rank)
    return _start_worlds(args)


def _check(args: argparse.Namespace, ranks: int, inside: bool) -> None:
    """What cannot work is told before anything is measured."""
    if inside and (args.compare or args.ranks not in (None, ranks)):
        raise ConfigError("Inside a launch its ranks measure: leave --compare and --ranks out, or start it alone.")
    if ranks < 2:
        raise ConfigError(f"Collectives need two ranks at least, not {ranks}. Pass --ranks 2 or more.")
    if not 0 <= args.root < ranks:
        raise ConfigError(f"There is no rank {args.root} in a world of {ranks}. Correct --root.")
    if args.plot and not args.plot.endswith(".svg"):
        raise ConfigError(f"--plot draws SVG: name a file that ends in .svg, not {args.plot!r}.")
    if args.plot and (len({*args.sizes}) < 2 or args.collectives == ["barrier"]):
        raise ConfigError("--plot draws lines over sizes, and there is only one. Pass two --sizes or more.")
    if args.tune and (args.backend != "rankmesh" or args.compare):
        raise ConfigError("--tune is about rankmesh's own algorithms. Leave --backend and --compare out.")
    if args.algorithm not in (None, ALL):
        for collective in args.collectives:
            if args.algorithm not in ALGORITHMS[collective]:
                raise ConfigError(
                    f"{collective} has no algorithm {args.algorithm!r}. Use one of "
                    f"{', '.join(ALGORITHMS[collective])}, or 'all'."
                )
    _check_operation(args)
    if args.tune:
        tune.check_target(args.tune)
    backends.check_installed([name for name in dict.fromkeys((args.backend, *args.compare)) if name in OTHERS])


def _check_operation(args: argparse.Namespace) -> None:
    kind = kind_of(dtype_of(args.dtype))
    if any(KINDS[collective].reduces for collective in args.collectives):
        try:
            kind.operation(args.op)
        except UsageError as error:
            raise ConfigError(f"Arrays of {kind.name} have no {args.op}. Choose another --op or --dtype.") from error


# ---------------------------------------------------------------------- a world for each library


def _start_worlds(args: argparse.Namespace) -> int:
    documents, codes = [], []
    with TemporaryDirectory(prefix="rankmesh-bench-") as folder:
        for name in dict.fromkeys((args.backend, *args.compare)):
            target = Path(folder, name)
            codes.append(_start_world(args, name, target))
            if target.exists():
                documents.append(json.loads(target.read_text(encoding="utf-8")))
            else:
                print(f"# {name} was not measured to its end: see above.", file=_table_stream(args), flush=True)
    if documents:
        _conclude(args, documents)
    return max(codes)


def _start_world(args: argparse.Namespace, name: str, target: Path) -> int:
    """Measure one library; its exit code."""
    words = list(_words(args, name, target))
    ranks = args.ranks or 2
    if name == "mpi4py":
        command = [str(backends.mpiexec()), "-n", str(ranks), sys.executable, "-m", "rankmesh", "bench", "collectives"]
        return subprocess.run([*command, *words], check=False).returncode
    transport = args.transport if name == "rankmesh" else None
    own: dict[str, object] = {"transport": transport, "json": str(target), "compare": [], "plot": None, "tune": None}
    member = argparse.Namespace(**{**vars(args), **own})
    return two_ranks.run("collectives", member, iter(words), _rank, ranks)


def _words(args: argparse.Namespace, backend: str, target: Path) -> Iterator[str]:
    """The command line of one world's ranks: they measure, and write to `target`."""
    yield from ("--backend", backend, "--collectives", ",".join(args.collectives))
    yield from ("--sizes", ",".join(map(str, args.sizes)), "--dtype", args.dtype, "--op", args.op)
    yield from ("--root", str(args.root), "--seconds", str(args.seconds), f"--json={target}")
    yield from ("--pin",) * args.pin
    yield from ("--table-on-stderr",) * args.table_on_stderr
    if args.iterations is not None:
        yield from ("--iterations", str(args.iterations))
    if args.algorithm is not None and backend == "rankmesh":
        yield from ("--algorithm", args.algorithm)


def _conclude(args: argparse.Namespace, documents: list[dict[str, Any]]) -> None:
    """Everything that is made of the rows."""
    rows = [Row(**row) for document in documents for row in document["rows"]]
    document = {**documents[0], "libraries": [one["library"] for one in documents]}
    if len(documents) > 1:
        for line in comparison(rows):
            print(line, file=_table_stream(args), flush=True)
    if args.json:
        report.write_json(args.json, document, rows)
    if args.plot:
        svg.write(args.plot, _title(document), rows)
    if args.tune:
        table = tune.table_of(rows, document)
        tune.write(args.tune, table)
        print(f"# Written to {args.tune}: the fastest algorithm by size.", file=_table_stream(args), flush=True)


# ---------------------------------------------------------------------- on each rank


def _rank(args: argparse.Namespace, local_rank: int, enter: Callable[[], Mesh]) -> int:
    """rankmesh, in the mesh that `enter` joins; the exit code."""
    document: dict[str, Any] = {"bench": "collectives", **report.environment(), "pinned": args.pin}
    two_ranks.pin(args, local_rank)
    with enter() as mesh:
        backend = RankmeshBackend(mesh)
        document["transport"], document["hosts"] = backend.transport(), backend.hosts
        rows = _measure(args, backend, document)
        mesh.barrier()
    return _leave(args, mesh.rank, document, rows)


def _foreign_rank(args: argparse.Namespace, local_rank: int) -> int:
    document: dict[str, Any] = {"bench": "collectives", **report.environment(), "pinned": args.pin}
    two_ranks.pin(args, local_rank)
    backend = FOREIGN[args.backend]()
    document["transport"] = "its own transport"
    rows = _measure(args, backend, document)
    rank = backend.rank
    backend.close()
    return _leave(args, rank, document, rows)


def _leave(args: argparse.Namespace, rank: int, document: dict[str, Any], rows: list[Row]) -> int:
    if rank == 0:
        _conclude(args, [{**document, "rows": [_as_dict(row) for row in rows]}])
    return int(any(row.wrong for row in rows))


def _measure(args: argparse.Namespace, backend: Backend, document: dict[str, Any]) -> list[Row]:
    """Rank 0 prints each row when it is there."""
    document["library"], document["ranks"] = backend.title, backend.size
    table = _table_stream(args) if backend.rank == 0 else None
    _print(table, f"# {_title(document)}", *(f"# {remark}" for remark in report.caveats(document)))
    rows = []
    for collective in args.collectives:
        _print(table, "#", f"# {collective}", *headings())
        sizes = args.sizes if collective != "barrier" else [0]
        for nbytes in sizes:
            task = Task(collective, nbytes, dtype_of(args.dtype), args.op, args.root)
            for algorithm in _algorithms(args, backend, collective):
                rows.append(_row(args, backend, task, algorithm))
                _print(table, line_of(rows[-1]))
    return rows


def _algorithms(args: argparse.Namespace, backend: Backend, collective: str) -> list[str | None]:
    if args.algorithm != ALL:
        return [args.algorithm]
    return (
        list(ALGORITHMS[collective]) if isinstance(backend, RankmeshBackend) and backend.names(collective) else [None]
    )


def _row(args: argparse.Namespace, backend: Backend, task: Task, algorithm: str | None) -> Row:
    timings = [measure(backend, task, place, algorithm, args.seconds, args.iterations) for place in (False, True)]
    kind, size = task.kind, backend.size
    if isinstance(backend, RankmeshBackend):
        algorithm = algorithm or backend.algorithm(task)
    whole, part = task.whole(size), task.part(size)
    nbytes = whole * task.dtype.itemsize
    return Row(
        args.backend,
        task.collective,
        algorithm or "-",
        nbytes,
        part if kind.gives_parts or kind.gets_parts else whole,
        task.dtype.name if nbytes else "-",
        task.op if kind.reduces else "none",
        task.root if kind.rooted else -1,
        task.chosen_by(size),
        *(figure for timing in timings for figure in _figures(timing, nbytes, kind.bus(size))),  # type: ignore[arg-type]  # four of each
    )


def _figures(timing: Timing | None, nbytes: int, bus: float) -> tuple[float | None, float | None, float | None, Any]:
    if timing is None:
        return None, None, None, None
    rate = nbytes / timing.us / 1e3
    return timing.us, rate, rate * bus, timing.wrong


# ---------------------------------------------------------------------- what is shown


def headings() -> list[str]:
    widths = [column.width for column in COLUMNS]
    groups = " " * sum(widths[:6]) + "out of place".center(sum(widths[6:10])) + "in place".center(sum(widths[10:]))
    return ["#" + groups[1:].rstrip(), *report.titles(COLUMNS)]


def line_of(row: Row) -> str:
    values = ((getattr(row, column.key), column) for column in COLUMNS)
    return "".join(
        ("n/a" if value is None else format(value, column.form)).rjust(column.width) for value, column in values
    )


def comparison(rows: list[Row]) -> Iterator[str]:
    """The first library beside the others: times, and how many times theirs is of the first's."""
    first, *others = dict.fromkeys(row.backend for row in rows)
    found = {(row.backend, row.collective, row.nbytes): row for row in reversed(rows)}
    yield "#"
    yield f"# Times in us; in brackets, how many times as long as {first} (in place where both are)."
    titles = "".join(name.rjust(26) for name in others)
    yield "#" + "collective".rjust(15) + "size".rjust(12) + first.rjust(14) + titles
    for collective, nbytes in dict.fromkeys((row.collective, row.nbytes) for row in rows):
        ours = found.get((first, collective, nbytes))
        cells = [_beside(ours, found.get((name, collective, nbytes))) for name in others]
        own = "n/a" if ours is None or ours.us is None else f"{ours.us:.2f}"
        yield collective.rjust(16) + str(nbytes).rjust(12) + own.rjust(14) + "".join(cell.rjust(26) for cell in cells)


def _beside(ours: Row | None, theirs: Row | None) -> str:
    if ours is None or theirs is None:
        return "n/a"
    for own, other in ((ours.in_us, theirs.in_us), (ours.out_us, theirs.out_us), (ours.us, theirs.us)):
        if own is not None and other is not None:
            return f"{other:.2f} ({other / own:.2f}x)"
    return "n/a"


def _title(document: dict[str, Any]) -> str:
    return (
        "{library}, {ranks} ranks over {transport}, Python {python}, {system}, {cores} cores, load {load_before}, "
        "pinned: {pinned}, {date}"
    ).format_map(document)


def _table_stream(args: argparse.Namespace) -> IO[str]:
    return sys.stderr if args.table_on_stderr else sys.stdout


def _print(stream: IO[str] | None, *lines: str) -> None:
    if stream is not None:
        print(*lines, sep="\n", file=stream, flush=True)


def _as_dict(row: Row) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
