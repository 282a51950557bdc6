"""Every rank adds its array to one that goes around a ring.    rankmesh run -n 4 examples/ring.py"""

import numpy as np

import rankmesh as rm

with rm.join() as mesh:
    ahead, behind = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    total = np.full(5, float(mesh.rank))
    passing, incoming = total.copy(), np.empty_like(total)
    for _ in range(mesh.size - 1):
        mesh.sendrecv(passing, incoming, to=ahead, source=behind, timeout=10)
        passing, incoming = incoming, passing
        total += passing
    print(f"rank {mesh.rank} of {mesh.size}: {total}")
