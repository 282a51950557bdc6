"""Figures by size as an SVG file, drawn with nothing but the standard library: for each collective time and bus
bandwidth, a line for each library or algorithm, all axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from rankmesh.errors import ConfigError

#: Okabe and Ito's colours, which the colour-blind can tell apart; then dashes.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8860b")
DASHES: Final = ("none", "6 3", "2 3")
PLOT_WIDTH, PLOT_HEIGHT = 400, 250
LEFT, TOP, GAP, LEGEND_WIDTH, FOOT = 66, 84, 84, 190, 46
WIDTH: Final = LEFT + 2 * PLOT_WIDTH + GAP + 16 + LEGEND_WIDTH
ROW_HEIGHT: Final = PLOT_HEIGHT + FOOT + 52

_STYLE: Final = """\
  text { font: 12px system-ui, sans-serif; fill: #222 } .small { font-size: 10px; fill: #555 }
  .title { font-size: 15px; font-weight: 600 } .grid { stroke: #ddd } .frame { fill: none; stroke: #888 }
  svg { background: #fff }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181d } text { fill: #e8e8e8 } .small { fill: #aaa } .grid { stroke: #33363d }
  }
"""


class Figures(Protocol):
    """A row of the benchmark."""

    @property
    def backend(self) -> str: ...
    @property
    def collective(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def us(self) -> float | None: ...
    @property
    def busbw_gb_per_s(self) -> float | None: ...


class Point(NamedTuple):
    x: float
    y: float


class Line(NamedTuple):
    """A named series and how it is drawn."""

    name: str
    colour: str
    dash: str
    points: list[Point]


def write(target: str, title: str, rows: Sequence[Figures]) -> None:
    """Collectives of one size have no lines, and are left out. Raises ConfigError if the file cannot be written."""
    collectives = [name for name in dict.fromkeys(row.collective for row in rows) if _sizes(rows, name) > 1]
    try:
        Path(target).write_text("\n".join(_document(title, rows, collectives)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}. Name another file after --plot.") from error


def _sizes(rows: Sequence[Figures], collective: str) -> int:
    return len({row.nbytes for row in rows if row.collective == collective})


def _document(title: str, rows: Sequence[Figures], collectives: Sequence[str]) -> Iterator[str]:
    height = TOP + ROW_HEIGHT * len(collectives)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">'
    )
    yield f"<style>\n{_STYLE}</style>"
    yield '<text class="title" x="16" y="26">Collectives by size</text>'
    yield f'<text class="small" x="16" y="44">{escape(title)}</text>'
    for number, collective in enumerate(collectives):
        top = TOP + ROW_HEIGHT * number
        mine = [row for row in rows if row.collective == collective]
        times, bandwidths = (_lines(mine, key) for key in ("us", "busbw_gb_per_s"))
        yield f'<text class="title" x="{LEFT}" y="{top - 12}">{escape(collective)}</text>'
        yield from _panel(LEFT, top, "time of a call, µs", times)
        yield from _panel(LEFT + PLOT_WIDTH + GAP, top, "bus bandwidth, GB/s", bandwidths)
        yield from _legend(LEFT + 2 * PLOT_WIDTH + GAP + 20, top, times)
    yield "</svg>"


def _lines(rows: Sequence[Figures], key: str) -> list[Line]:
    """One for each library, or each of its algorithms where there are several for one size."""
    sizes = [(row.backend, row.nbytes) for row in rows]
    several = {backend for backend, nbytes in sizes if sizes.count((backend, nbytes)) > 1}
    found: dict[str, list[Point]] = {}
    for row in rows:
        name = f"{row.backend} {row.algorithm}" if row.backend in several else row.backend
        value = getattr(row, key)
        points = found.setdefault(name, [])
        if value is not None and value > 0 and row.nbytes > 0:
            points.append(Point(row.nbytes, value))
    return [
        Line(name, COLOURS[at % len(COLOURS)], DASHES[at // len(COLOURS) % len(DASHES)], sorted(points))
        for at, (name, points) in enumerate(found.items())
        if points
    ]


class Axis:
    """From values to places, by their logarithm. Its ends are powers of `base`."""

    def __init__(self, values: Sequence[float], base: float, start: float, length: float) -> None:
        self._base, self._start, self._length = base, start, length
        self._low = math.floor(math.log(min(values), base) + 1e-9)
        self._high = max(math.ceil(math.log(max(values), base) - 1e-9), self._low + 1)

    def at(self, value: float) -> float:
        share = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._start + share * self._length

    @property
    def ticks(self) -> list[float]:
        """Ten at most."""
        step = -(-(self._high - self._low) // 10)
        return [self._base**power for power in range(self._low, self._high + 1, step)]


def _panel(left: float, top: float, title: str, lines: Sequence[Line]) -> Iterator[str]:
    points = [point for line in lines for point in line.points]
    yield f'<rect class="frame" x="{left}" y="{top}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/>'
    yield f'<text x="{left + PLOT_WIDTH}" y="{top - 12}" text-anchor="end">{title}</text>'
    if not points:
        return
    across = Axis([point.x for point in points], 2, left, PLOT_WIDTH)
    up = Axis([point.y for point in points], 10, top + PLOT_HEIGHT, -PLOT_HEIGHT)
    bottom = top + PLOT_HEIGHT
    for tick in across.ticks:
        x = across.at(tick)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        yield f'<text class="small" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{_size(tick)}</text>'
    for tick in up.ticks:
        y = up.at(tick)
        yield f'<path class="grid" d="M{left} {y:.1f}H{left + PLOT_WIDTH}"/>'
        yield f'<text class="small" x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text class="small" x="{left + PLOT_WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">size, bytes</text>'
    for line in lines:
        places = [(across.at(point.x), up.at(point.y), point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        yield (
            f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2" '
            f'stroke-dasharray="{line.dash}"/>'
        )
        for x, y, point in places:
            about = escape(f"{line.name}, {_size(point.x)}: {point.y:.4g}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"><title>{about}</title></circle>'


def _legend(left: float, top: float, lines: Sequence[Line]) -> Iterator[str]:
    for at, line in enumerate(lines):
        y = top + 10 + 18 * at
        yield (
            f'<path d="M{left} {y}h22" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dash}"/>'
            f'<text x="{left + 28}" y="{y + 4}">{escape(line.name)}</text>'
        )


def _size(nbytes: float) -> str:
    """8, 64K, 16M"""
    for unit, name in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if nbytes >= unit:
            return f"{nbytes / unit:g}{name}"
    return f"{nbytes:g}"
