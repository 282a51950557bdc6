"""Slurm's compressed lists: `node[01-04,7],gpu3` of hosts, `2(x3),1` of tasks per node.

A host list is a comma-separated list of names; in a name, each bracket stands for its numbers and ranges, whose zero
padding is kept; several brackets in one name count like an odometer, the last one fastest. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from rankmesh.errors import ConfigError

#: Larger than any cluster; a list that would expand further is damaged.
MAX_NODES: Final = 1 << 20

_NAME = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_nodes(text: str) -> Iterator[str]:
    """The host names in order. The list is checked whole before the first one is produced."""
    names = [_alternatives(name, text) for name in _split_names(text)]
    return itertools.chain.from_iterable(map("".join, itertools.product(*parts)) for parts in names)


def first_node(text: str) -> str:
    return next(expand_nodes(text))


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!r} is not of the form 2(x3),1. Start the program with srun.")
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NODES:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text!r} names more than {MAX_NODES} nodes. Correct or unset it.")
        counts += [int(match[1])] * times
    return counts


def _split_names(text: str) -> list[str]:
    names, position = [], 0
    while match := _NAME.match(text, position):
        names.append(match[0])
        position = match.end() + 1
        if match.end() == len(text):
            return names
        if text[match.end()] != ",":
            break
    raise _broken(text)


def _alternatives(name: str, text: str) -> list[list[str]]:
    """The name as a list of parts, each a list of what may stand there."""
    parts = [[plain] if plain else _numbers(bracket, text) for bracket, plain in _PART.findall(name)]
    total = 1
    for part in parts:
        total *= len(part)
    if total > MAX_NODES:
        raise ConfigError(
            f"The Slurm node list {text!r} names more than {MAX_NODES} nodes. Correct SLURM_JOB_NODELIST."
        )
    return parts


def _numbers(bracket: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _broken(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NODES - len(numbers):
            raise _broken(text)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _broken(text: str) -> ConfigError:
    return ConfigError(
        f"The Slurm node list {text!r} cannot be read. SLURM_JOB_NODELIST should look like node[01-04,7],gpu3."
    )
