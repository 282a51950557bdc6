"""Chooser: the algorithm of each call, by what the user has set; and the file in which measured choices are kept.

The first of these that says something decides:

1. `algorithm=` of the call.
2. `Config.algorithms`, or RANKMESH_ALGORITHM_ALL_REDUCE=ring and its like.
3. The file of `Config.collective_table`, where it has an entry for exactly this many ranks on this many hosts.
4. The built-in table (choosing.py).

Ranks that decide differently do not compute anything: the algorithm is part of a call's Signature (calls.py), so
DesyncError says who chose what.

The file is JSON: a list of worlds, each with its number of ranks and hosts, where and when it was measured, and for
each collective rows of (up to so many bytes, algorithm), of which the first that holds counts and the last holds for
all. Bytes are counted as in choosing.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from rankmesh.collectives.choosing import ALGORITHMS, choose
from rankmesh.config import MIB, Config
from rankmesh.errors import ConfigError

FORMAT: Final = "rankmesh collective table"
VERSION: Final = 1
#: More than any table has: a world's is some ten kilobytes.
MAX_FILE_BYTES: Final = 4 * MIB
MAX_WORLDS: Final = 256
#: Of choices that are remembered, each a call's collective, bytes and world.
_REMEMBERED: Final = 4096

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: for any number of bytes."""

    up_to: _NotNegative | None
    algorithm: _Text


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a choice rests on. Nothing is decided by it."""

    collective: _Text
    nbytes: _NotNegative
    algorithm: _Text
    us: float


class TunedWorld(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The choices for so many ranks on so many hosts."""

    ranks: _Positive
    hosts: _Positive = 1
    date: _Text = ""
    machine: dict[str, Any] = {}
    rows: dict[str, list[Row]]
    measured: list[Measured] = []

    def __post_init__(self) -> None:
        for collective, rows in self.rows.items():
            known = ALGORITHMS.get(collective)
            if known is None:
                raise ValueError(f"there is no collective {collective!r}")
            for row in rows:
                if row.algorithm not in known:
                    raise ValueError(f"{collective} has no algorithm {row.algorithm!r}, but {', '.join(known)}")
            limits = [row.up_to for row in rows]
            ordered = [limit for limit in limits if limit is not None]
            if not rows or limits[-1] is not None or len(ordered) < len(rows) - 1 or ordered != sorted(ordered):
                raise ValueError(f"the rows of {collective} do not ascend to one without a limit")


class TuningTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the file holds."""

    format: str = FORMAT
    version: int = VERSION
    worlds: Annotated[list[TunedWorld], msgspec.Meta(max_length=MAX_WORLDS)]

    def with_world(self, world: TunedWorld) -> TuningTable:
        """The same with this one, in place of what was known of as many ranks and hosts."""
        others = [one for one in self.worlds if (one.ranks, one.hosts) != (world.ranks, world.hosts)]
        return TuningTable(worlds=sorted([*others, world], key=lambda one: (one.hosts, one.ranks)))


class _Head(msgspec.Struct):
    """Read first: another version may have other contents."""

    format: str = ""
    version: int = 0


def read_table(path: str) -> TuningTable:
    """Raises ConfigError if it cannot be read, or is not what it should be."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The table of algorithms {path!r} cannot be read: {error.strerror}. Correct Config.collective_table, or "
            f"make the table with `rankmesh bench collectives --tune {path}`."
        ) from error
    if len(text) > MAX_FILE_BYTES:
        raise _bad(path, f"it has more than {MAX_FILE_BYTES} bytes")
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise _bad(path, f"its format is not {FORMAT!r}")
        if head.version != VERSION:
            raise _bad(path, f"it has version {head.version}, and this rankmesh reads version {VERSION}")
        return msgspec.json.decode(text, type=TuningTable)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, str(error)) from error


def _bad(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path!r} is not a table of algorithms: {reason}. Make one with `rankmesh bench collectives --tune FILE`."
    )


def write_table(path: str, table: TuningTable) -> None:
    """In place of what is there, whole or not at all."""
    fresh = Path(f"{path}.{os.getpid()}.new")
    try:
        try:
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The table of algorithms {path!r} cannot be written: {error.strerror}. Name another file."
        ) from error


def parse_algorithms(text: str) -> dict[str, str]:
    """`Config.algorithms`: "all_reduce=ring, broadcast=binomial". Of one collective's the last counts."""
    named = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        collective, equals, algorithm = (part.strip() for part in item.partition("="))
        known = ALGORITHMS.get(collective)
        if not equals or known is None:
            raise ConfigError(
                f"Config.algorithms has {item!r}, which is not COLLECTIVE=ALGORITHM. Collectives are "
                f"{', '.join(ALGORITHMS)}; correct Config.algorithms or RANKMESH_ALGORITHM_…"
            )
        if algorithm not in known:
            raise ConfigError(
                f"Config.algorithms wants {algorithm!r} for {collective}, which it has not. Use one of "
                f"{', '.join(known)}, there or in RANKMESH_ALGORITHM_{collective.upper()}."
            )
        named[collective] = algorithm
    return named


class Chooser:
    """Decides for one mesh and its groups. The file is read once, here. Raises ConfigError for settings that cannot
    work."""

    def __init__(self, config: Config) -> None:
        self._named = parse_algorithms(config.algorithms)
        worlds: Iterable[TunedWorld] = read_table(config.collective_table).worlds if config.collective_table else ()
        self._tuned = {
            (collective, world.ranks, world.hosts): rows for world in worlds for collective, rows in world.rows.items()
        }
        #: (collective, bytes, ranks, hosts, what the call names, whether memory may be shared) → name of the algorithm.
        self.choose = lru_cache(maxsize=_REMEMBERED)(self._choose)

    def _choose(
        self, collective: str, nbytes: int, size: int, hosts: int, algorithm: str | None = None, shared: bool = True
    ) -> str:
        algorithm = self._named.get(collective) if algorithm is None else algorithm
        rows = self._tuned.get((collective, size, hosts))
        if algorithm is None and rows is not None:
            return next(row.algorithm for row in rows if row.up_to is None or nbytes <= row.up_to)
        return choose(collective, nbytes, size, algorithm, hosts, shared)
