"""Compression for all_reduce: fewer bytes for a result that is nearly right, and right in the long run.

    from rankmesh.collectives.compression import TopK
    topk = TopK(0.01)
    mesh.all_reduce(gradient, "avg", compression=topk.named("layer1.weight"))

`base.py` has the interface, for compressors of your own too; `exchange.py` how payloads travel and what they cost.
"""

from __future__ import annotations

from rankmesh.collectives.compression.base import Compressor, Exchange
from rankmesh.collectives.compression.cast import Cast
from rankmesh.collectives.compression.int8 import Int8
from rankmesh.collectives.compression.randomk import RandomK
from rankmesh.collectives.compression.topk import TopK

__all__ = ["Cast", "Compressor", "Exchange", "Int8", "RandomK", "TopK"]
