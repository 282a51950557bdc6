"""numpy's copy of one array into another: the reference for moving large data through memory."""

from __future__ import annotations

import numpy as np

from subjects.base import Bytes, Copier


class CopyTo(Copier):
    def open(self, rank: int, size: int, port: int) -> None:
        return None

    def close(self) -> None:
        return None

    def version(self) -> str:
        return f"numpy {np.__version__}, one process, the other core idle"

    def copy(self, out: Bytes, source: Bytes) -> None:
        np.copyto(out, source)
