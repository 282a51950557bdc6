"""A rank on a host of its own, for test_two_hosts.py: `host_program.py rank '[{"url": …, "config": {…}}, …]'`.

It joins the worlds one after the other, exchanges messages and objects, and writes a line of JSON for each: the address
it advertises, the other rank's, and what it received; or the type and text of the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import rankmesh as rm

COUNT = 200_000


def visit(rank: int, world: dict[str, Any]) -> dict[str, Any]:
    with rm.join(world["url"], rank=rank, size=2, **world["config"]) as mesh:
        other = 1 - rank
        out = np.empty(COUNT, np.float64)
        status = mesh.sendrecv(np.full(COUNT, rank + 1.0), out, to=other, tag=5)
        mesh.send_object({"from": rank, "array": np.arange(3)}, to=other, tag=6)
        said = mesh.recv_object(source=other, tag=6)
        mesh.barrier()
        addresses = {at: list(map(str, mesh.peers[at].addresses)) for at in (rank, other)}
        return {
            "mine": addresses[rank],
            "theirs": addresses[other],
            "sum": float(out.sum()),
            "status": list(status),
            "object": [said["from"], said["array"].tolist()],
        }


def main(rank: int, worlds: list[dict[str, Any]]) -> None:
    for world in worlds:
        try:
            said = visit(rank, world)
        except rm.RankmeshError as error:
            said = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
