"""A learner pushes new weights to actors while they act.    rankmesh run -n 3 examples/weight_push.py

Each actor has two slots for weights: it acts with one while the learner writes the next version into the other. The
notification that comes with a version is seen only when all its bytes are there, so nobody acts with a mixture. Every
trajectory says which version made it. An actor that has sent one of version v no longer needs its other slot, so the
learner writes v + 1 there as soon as all actors have: none falls behind by more than one version.
"""

from typing import Any

import numpy as np

import rankmesh as rm

LEARNER, LAST_VERSION, PARAMETERS = 0, 5, 1 << 20


def rollout(weights: Any) -> float:
    """Uses all the weights, and finds out whether they are those of one version."""
    low, high = float(weights.min()), float(weights.max())
    assert low == high, f"weights of versions {low:g} and {high:g}"
    return low


def actor(mesh: rm.Mesh) -> None:
    slots = mesh.memory.allocate("weights", (2, PARAMETERS), np.float32)
    for version in range(LAST_VERSION + 1):
        following = slots.wait_notification(version + 1, timeout=30, async_op=True)
        while True:  # at least one trajectory of each version
            assert rollout(slots.array[version % 2]) == version
            mesh.send_object({"actor": mesh.rank, "version": version, "reward": 1.0}, to=LEARNER)
            if following.done() or version == LAST_VERSION:
                break
    following.cancel()
    print(f"actor {mesh.rank} followed to version {LAST_VERSION}; no weights were mixed")


def learner(mesh: rm.Mesh) -> None:
    actors = {rank: mesh.memory.open(rank, "weights", wait=True, timeout=10) for rank in range(1, mesh.size)}
    weights, stalest = np.zeros(PARAMETERS, np.float32), 0
    for version in range(LAST_VERSION + 1):
        if version > 0:
            weights += 1  # where the training would be
            slot = version % 2 * weights.nbytes
            pushes = [remote.write(weights, slot, notify=version, async_op=True) for remote in actors.values()]
            for push in pushes:
                push.wait(timeout=30)  # from now on `weights` may change again
        behind = set(actors)
        while behind:
            trajectory = mesh.recv_object(timeout=30)
            stalest = max(stalest, version - trajectory["version"])
            if trajectory["version"] == version:
                behind.discard(trajectory["actor"])
    assert stalest <= 1
    print(f"learner pushed {LAST_VERSION} versions to {len(actors)} actors")


with rm.join() as mesh:
    learner(mesh) if mesh.rank == LEARNER else actor(mesh)
    mesh.barrier()  # an actor's memory is there until everybody has finished
