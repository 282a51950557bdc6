"""A rank's memory as plans see it: a row of blocks over one or more flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from rankmesh.buffers import readable
from rankmesh.collectives.plan import Span

Array = np.ndarray[Any, Any]


class Part(NamedTuple):
    """A flat array, and how many elements each of its blocks has."""

    array: Array
    counts: Sequence[int]


def even(total: int, blocks: int) -> list[int]:
    """`total` elements in so many blocks, the first of which may have one more."""
    each, more = divmod(total, blocks)
    return [each + 1] * more + [each] * (blocks - more)


class Space:
    """Blocks 0 … of all parts in turn. A span lies within one part."""

    def __init__(self, *parts: Part) -> None:
        self._parts: list[tuple[int, Array, memoryview, list[int]]] = []
        first = 0
        for array, counts in parts:
            self._parts.append((first, array, readable(array), [0, *accumulate(counts)]))
            first += len(counts)

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(memory.nbytes for _, _, memory, _ in self._parts)

    def array(self, span: Span) -> Array:
        """The elements of a span, where they lie."""
        first, array, _, bounds = self._part(span)
        return array[bounds[span[0] - first] : bounds[span[1] - first]]

    def memory(self, span: Span) -> memoryview:
        """Its bytes, where they lie."""
        first, array, memory, bounds = self._part(span)
        return memory[bounds[span[0] - first] * array.itemsize : bounds[span[1] - first] * array.itemsize]

    def _part(self, span: Span) -> tuple[int, Array, memoryview, list[int]]:
        for part in reversed(self._parts):
            if span[0] >= part[0]:
                return part
        raise AssertionError(f"there is no block {span[0]}")
