"""Which rank is this process, by what its launcher left in the environment.

Rules:

1. A launcher is recognised by its rank variable alone. `SCHEMES` is in order of precedence, from the most to the least
   specific: `rankmesh run` or torchrun may run under Slurm or mpiexec, whose variables are then still there.
2. Once recognised, what it must set is required. What is missing, not a number or out of range is an error that names
   the variable; nothing is guessed, and no later scheme is tried.
3. `MASTER_ADDR` (and `MASTER_PORT`), if set, says where rank 0 is, whichever launcher started us. Without it Slurm's
   node list tells; mpiexec tells nothing: its ranks find each other by `run_id` on one host, and need it on several.
4. The rendezvous port may be taken: torchrun's agent keeps its own store on MASTER_PORT, a torch program may open one
   there. Hence a few consecutive ports: rank 0 binds the first free one, the others try them in turn.

Pure: the environment is a mapping, and nothing is read from anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from rankmesh.errors import ConfigError, JoinError
from rankmesh.membership import nodelist
from rankmesh.membership.schemes import SCHEMES, Claim, Master, Scheme, Variables

_UNUSUAL = re.compile(r"[^A-Za-z0-9._@-]+")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process stands in its world."""

    #: Which launcher was recognised, for messages: "rankmesh run", "torchrun", "Slurm" …
    source: str
    rank: int
    size: int
    #: Position among the ranks of this host, and their number; 0 of 1 where the launcher does not tell.
    local_rank: int
    local_size: int
    node_rank: int | None
    #: Where the rendezvous is: host and first port. None only if `one_host`: then a file named after `run_id` tells.
    master: Master | None
    #: How many consecutive ports, from that of `master` on, may hold the rendezvous.
    candidates_ports: int
    #: The same for all ranks of this run, and different from that of other runs.
    run_id: str
    #: All ranks are on this host.
    one_host: bool
    #: The launcher hosts the rendezvous; otherwise rank 0 does.
    launcher_hosts: bool = False


def detect(environ: Mapping[str, str], *, parent_pid: int) -> Placement | None:
    """Find this process's place in the world, or None if no launcher left its mark.

    Raises ConfigError where a variable is missing or wrong, JoinError where the ranks cannot find each other."""
    for scheme in SCHEMES:
        if environ.get(scheme.rank, "").strip() and not _srun_speaks_pmi(scheme, environ):
            return _place(scheme, Variables(environ, scheme.source), parent_pid)
    return None


def _srun_speaks_pmi(scheme: Scheme, environ: Mapping[str, str]) -> bool:
    """`srun --mpi=pmi2` sets PMI_RANK beside its own variables, which know the nodes: there Slurm's count."""
    mirrored = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    return (
        scheme.rank == "PMI_RANK"
        and "SLURM_STEP_ID" in environ
        and "MPI_LOCALRANKID" not in environ
        and all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in mirrored)
    )


def _place(scheme: Scheme, variables: Variables, parent_pid: int) -> Placement:
    rank = variables.required(scheme.rank, scheme.rank)
    size = variables.required(scheme.rank, *scheme.size)
    if rank >= size:
        raise ConfigError(
            f"{scheme.rank}={rank} must be less than {' or '.join(scheme.size)}={size}. Count ranks from 0."
        )
    local_rank, local_size = variables.number(*scheme.local_rank), _local_size(scheme, variables)
    located = scheme.locate(Claim(variables, rank, size, local_size))
    one_host = size == 1 or local_size == size or (located is not None and is_loopback(located[0][0]))
    if located is None and not one_host:
        raise JoinError(
            f"{scheme.source} started {size} ranks on several hosts, as far as it tells, and MASTER_ADDR is not set. "
            f"{scheme.remedy}",
            size=size,
        )
    if local_rank is None or local_size is None:
        local_rank, local_size = (rank, size) if one_host else (0, 1)
    if not local_rank < local_size <= size:
        raise ConfigError(
            f"{scheme.source} says local rank {local_rank} of {local_size} in a world of {size}, which cannot be. "
            f"Check {', '.join((*scheme.local_rank, *scheme.local_size)) or scheme.rank}."
        )
    return Placement(
        source=scheme.source,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=variables.number(*scheme.node_rank),
        master=located[0] if located else None,
        candidates_ports=located[1] if located else 0,
        run_id=_run_id(scheme, variables, parent_pid),
        one_host=one_host,
        launcher_hosts=scheme.launcher_hosts,
    )


def _local_size(scheme: Scheme, variables: Variables) -> int | None:
    if not scheme.tasks_per_node:
        return variables.number(*scheme.local_size)
    counts, node = variables.text(*scheme.tasks_per_node), variables.number(*scheme.node_rank)
    if counts is None or node is None:
        return None
    tasks = nodelist.expand_counts(counts)
    if node >= len(tasks):
        raise ConfigError(
            f"{scheme.node_rank[0]}={node} is not one of the nodes of {scheme.tasks_per_node[-1]}={counts!r}. Use srun."
        )
    return tasks[node]


def _run_id(scheme: Scheme, variables: Variables, parent_pid: int) -> str:
    parts = [part for name in scheme.run_id if (part := variables.text(name))] or [f"parent-{parent_pid}"]
    ours = "-".join([scheme.rank.split("_")[0].lower(), *parts])
    return _UNUSUAL.sub("-", variables.text("RANKMESH_RUN_ID") or ours)  # it may become the name of a file


def is_loopback(host: str) -> bool:
    """The name or address means this very host, without looking anything up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
