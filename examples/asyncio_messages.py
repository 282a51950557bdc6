"""Messages beside other work of an event loop.    rankmesh run -n 3 examples/asyncio_messages.py"""

import asyncio

import numpy as np

import rankmesh as rm


async def main(mesh: rm.Mesh) -> None:
    others = [rank for rank in range(mesh.size) if rank != mesh.rank]
    inbox = {rank: np.empty(1000) for rank in others}
    receives = [mesh.irecv(inbox[rank], source=rank, tag=1, timeout=10) for rank in others]
    sends = [mesh.isend(np.full(1000, float(mesh.rank)), to=rank, tag=1) for rank in others]
    statuses = await asyncio.gather(*receives)  # the loop is free meanwhile
    await asyncio.gather(*sends)
    sources = sorted(status.source for status in statuses)
    try:
        async with asyncio.timeout(0.1):
            await mesh.irecv(np.empty(1), source=others[0], tag=2)  # nobody sends it; the receive is cancelled
    except TimeoutError:
        print(f"rank {mesh.rank} heard from {sources}, sum {sum(box[0] for box in inbox.values()):g}; tag 2 never came")


with rm.join() as mesh:
    asyncio.run(main(mesh))
    mesh.barrier()
