"""How each launcher tells a process its rank: a table, and where each says that rank 0 is found. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rankmesh.errors import ConfigError, JoinError
from rankmesh.membership import nodelist
from rankmesh.transport.address import MAX_PORT, Address

#: torchrun's default for MASTER_PORT.
DEFAULT_PORT: Final = 29500
#: How many consecutive ports the ranks try for the rendezvous.
CANDIDATE_PORTS: Final = 8
#: A Slurm job has one of SLURM_SLOTS blocks of candidate ports from SLURM_FIRST_PORT on: below the ephemeral range, and
#: neighbouring jobs on one node do not meet.
SLURM_FIRST_PORT: Final = 15000
SLURM_SLOTS: Final = 1500

Master = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Variables:
    """The environment, read with errors that name the variable. An empty variable counts as not set."""

    environ: Mapping[str, str]
    source: str

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((value for name in names if (value := self.environ.get(name, "").strip())), None)

    def number(self, *names: str) -> int | None:
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise ConfigError(f"{name}={text!r} is not a number, as {self.source} sets it. Correct or unset it.")
            return int(text)
        return None

    def required(self, rank: str, *names: str) -> int:
        number = self.number(*names)
        if number is None:
            raise ConfigError(
                f"{rank} is set, as {self.source} does it, but {' or '.join(names)} is not. "
                f"Set it too, or unset {rank} and pass rank= and size= to join()."
            )
        return number


@dataclass(frozen=True, slots=True)
class Claim:
    """What a launcher says of the world, for its scheme's `locate`."""

    variables: Variables
    rank: int
    size: int
    local_size: int | None


#: Says where the rendezvous is and how many ports to try; None: nobody said so.
Locate = Callable[[Claim], tuple[Master, int] | None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one launcher tells a process its rank. Where several names stand, the first that is set counts."""

    source: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    node_rank: tuple[str, ...]
    #: Variables which together tell one run from another; the parent's pid if none is set.
    run_id: tuple[str, ...]
    locate: Locate
    #: What to do if ranks are on several hosts and nobody says where rank 0 is.
    remedy: str = "Set MASTER_ADDR to the host of rank 0 for all ranks."
    #: Variables with the tasks of every node, `2(x3),1`, for launchers that have no variable for the local size.
    tasks_per_node: tuple[str, ...] = ()
    #: The launcher hosts the rendezvous; otherwise rank 0 does.
    launcher_hosts: bool = False


def _store(claim: Claim) -> tuple[Master, int] | None:
    text = claim.variables.text("RANKMESH_STORE")
    if text is None:
        raise ConfigError("RANKMESH_RANK is set but RANKMESH_STORE is not. Start the ranks with `rankmesh run`.")
    address = Address.parse(text)
    if address.scheme not in ("tcp", "tls") or not address.port:
        raise ConfigError(f"RANKMESH_STORE={text!r} is not of the form tcp://host:port. `rankmesh run` sets it.")
    return (address.host, address.port), 1


def _master(claim: Claim) -> tuple[Master, int] | None:
    variables = claim.variables
    host = variables.text("MASTER_ADDR")
    if host is None:
        return None
    port = variables.number("MASTER_PORT")
    first = DEFAULT_PORT if port is None else port
    if variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        first += 1
    if not 0 < first <= MAX_PORT:
        raise ConfigError(f"MASTER_PORT={port} leaves no port for the rendezvous. Choose one between 1 and 65000.")
    return (host.removeprefix("[").removesuffix("]"), first), min(CANDIDATE_PORTS, MAX_PORT + 1 - first)


def _master_required(claim: Claim) -> tuple[Master, int] | None:
    found = _master(claim)
    if found is None and claim.size > 1:
        raise ConfigError(
            f"MASTER_ADDR is not set, so {claim.variables.source} gives no way to find rank 0. "
            f"Set it to the host name or address of rank 0 for all ranks."
        )
    return found


def _slurm(claim: Claim) -> tuple[Master, int] | None:
    variables = claim.variables
    if variables.number("SLURM_STEP_ID", "SLURM_STEPID") is None and claim.size > 1:
        raise JoinError(
            f"This process is the batch script of a Slurm job, not one of its {claim.size} tasks "
            "(SLURM_STEP_ID is not set). Start the program with srun.",
            size=claim.size,
        )
    found = _master(claim)
    if found is not None:
        return found
    nodes = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if nodes is None or claim.local_size == claim.size:
        return None
    job, step = (
        variables.number(*names) or 0 for names in (("SLURM_JOB_ID", "SLURM_JOBID"), ("SLURM_STEP_ID", "SLURM_STEPID"))
    )
    port = SLURM_FIRST_PORT + CANDIDATE_PORTS * ((job + 7 * step) % SLURM_SLOTS)
    return (nodelist.first_node(nodes), port), CANDIDATE_PORTS


SCHEMES: Final = (
    Scheme(
        source="rankmesh run",
        rank="RANKMESH_RANK",
        size=("RANKMESH_SIZE",),
        local_rank=("RANKMESH_LOCAL_RANK",),
        local_size=("RANKMESH_LOCAL_SIZE",),
        node_rank=("RANKMESH_NODE_RANK",),
        run_id=("RANKMESH_RUN_ID",),
        locate=_store,
        launcher_hosts=True,
    ),
    Scheme(
        source="torchrun",
        rank="RANK",
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        run_id=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"),
        locate=_master_required,
    ),
    Scheme(
        source="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is the position on the node among all jobs, not the number of the node.
        node_rank=(),
        run_id=("PMIX_NAMESPACE",),
        locate=_master,
        remedy="Pass it on with `mpirun -x MASTER_ADDR=<host of rank 0>`.",
    ),
    Scheme(
        source="MPICH",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        node_rank=(),
        run_id=(),
        locate=_master,
        remedy="Pass it on with `mpiexec -genv MASTER_ADDR <host of rank 0>`.",
    ),
    Scheme(
        source="Slurm",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        local_size=(),
        node_rank=("SLURM_NODEID",),
        run_id=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        locate=_slurm,
        tasks_per_node=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ),
    Scheme(
        source="a Kubernetes indexed job",
        rank="JOB_COMPLETION_INDEX",
        size=("WORLD_SIZE", "JOB_COMPLETIONS"),
        local_rank=(),
        local_size=(),
        node_rank=("JOB_COMPLETION_INDEX",),
        run_id=("MASTER_ADDR", "MASTER_PORT"),
        locate=_master_required,
    ),
)
