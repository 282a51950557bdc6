"""What a benchmark shows: a table as nccl-tests prints it, row by row; JSON; a plot."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rankmesh import __version__
from rankmesh.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rankmesh import Mesh
    from rankmesh.cli.measure import Row

#: Load average above which somebody else was using the machine.
QUIET_LOAD: Final = 0.5
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
#: More rows than anybody reads; a factor that is too small makes them.
_MOST_SIZES: Final = 200


def parse_sizes(text: str) -> list[int]:
    """`8:64M` doubles from 8 B to 64 MiB, `8:64M:4` quadruples, `64,4K,1M` lists. Raises ValueError with the reason."""
    if ":" not in text:
        return [_parse_size(item) for item in text.split(",")]
    first, last, *rest = text.split(":")
    low, high, factor = _parse_size(first), _parse_size(last), float(rest[0]) if rest else 2.0
    if len(rest) > 1 or not 0 < low <= high or not factor > 1:
        raise ValueError(f"{text!r} is not MIN:MAX or MIN:MAX:FACTOR with 0 < MIN <= MAX and FACTOR > 1")
    sizes: list[int] = []
    size = float(low)
    while size < high and len(sizes) < _MOST_SIZES:
        sizes.append(round(size))
        size *= factor
    return [*dict.fromkeys(sizes), high]


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it like 64, 4K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


class Column(NamedTuple):
    title: str
    unit: str
    key: str
    width: int
    form: str


COLUMNS: Final = (
    Column("size", "B", "nbytes", 11, "d"),
    Column("count", "", "count", 8, "d"),
    Column("p50", "us", "p50_us", 12, ".2f"),
    Column("p99", "us", "p99_us", 12, ".2f"),
    Column("algbw", "GB/s", "algbw_gb_per_s", 9, ".3f"),
    Column("count", "", "stream_count", 9, "d"),
    Column("bw", "GB/s", "stream_gb_per_s", 9, ".3f"),
    Column("rate", "msg/s", "stream_per_s", 10, ".0f"),
    Column("#wrong", "B", "wrong", 8, "d"),
)


def heading() -> list[str]:
    widths = [column.width for column in COLUMNS]
    groups = "ping-pong, half a round trip".rjust(sum(widths[:5])) + "one way, back to back".rjust(sum(widths[5:8]))
    return ["#" + groups[1:], *titles(COLUMNS)]


def titles(columns: Sequence[Column]) -> list[str]:
    """Titles and units above a table, as comments."""
    names = "".join(column.title.rjust(column.width) for column in columns)
    units = "".join((f"({column.unit})" if column.unit else "").rjust(column.width) for column in columns)
    return ["#" + line[1:] for line in (names, units)]


def line_of(row: DataclassInstance, columns: Sequence[Column] = COLUMNS) -> str:
    return "".join(format(getattr(row, column.key), column.form).rjust(column.width) for column in columns)


def title(document: Mapping[str, object]) -> str:
    """The first line above a table."""
    return (
        "rankmesh {rankmesh} bench {bench} over {transport}, Python {python}, {system}, {cores} cores, "
        "load {load_before}, pinned: {pinned}, {date}"
    ).format_map(document)


def describe_ranks(document: dict[str, object], mesh: Mesh) -> None:
    """Rank 0: how the two ranks are connected, and who they are."""
    document["transport"] = mesh.peers[0].addresses[0].scheme
    document["ranks"] = [str(peer) for peer in mesh.peers[:2]]


def environment() -> dict[str, Any]:
    """Where and when figures were made."""
    return {
        "rankmesh": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def caveats(environment: Mapping[str, Any]) -> list[str]:
    """Why the figures are not to be quoted, if so."""
    found = []
    if environment["load_before"] > QUIET_LOAD:
        found.append(f"Other programs were running (load {environment['load_before']}): the figures are not its best.")
    if environment["cores"] < 2:
        found.append("There is only one core, so that nobody can poll: the figures are not its best.")
    return found


def write_json(target: str, document: dict[str, Any], rows: Sequence[DataclassInstance]) -> None:
    """To a file, or to standard output for `-`."""
    text = json.dumps({**document, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file after --json.") from error


def load_matplotlib() -> Any:
    """matplotlib.figure, which draws without a display. To be called before anything is measured."""
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--plot needs the package matplotlib ({error}). Install it with: pip install 'rankmesh[plot]'"
        ) from error


def write_plot(target: str, title: str, rows: Sequence[Row]) -> None:
    """Time and bandwidth by size, both on logarithmic axes."""
    figure = load_matplotlib().Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    time, bandwidth = figure.subplots(1, 2)
    sizes = [row.nbytes for row in rows]
    time.plot(sizes, [row.p50_us for row in rows], marker="o", label="p50")
    time.plot(sizes, [row.p99_us for row in rows], marker=".", linestyle=":", label="p99")
    time.set(xlabel="message, bytes", ylabel="half a round trip, µs", xscale="log", yscale="log")
    bandwidth.plot(sizes, [row.stream_gb_per_s for row in rows], marker="o", label="one way, back to back")
    bandwidth.plot(sizes, [row.algbw_gb_per_s for row in rows], marker=".", linestyle=":", label="ping-pong")
    bandwidth.set(xlabel="message, bytes", ylabel="GB/s", xscale="log", yscale="log")
    for axes in (time, bandwidth):
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(target, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib cannot write
        raise ConfigError(f"{target} cannot be written: {error}. Name another file after --plot.") from error
