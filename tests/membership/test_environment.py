"""Launchers are recognised by what they really set; what is wrong is named."""

from __future__ import annotations

import itertools

import pytest

from rankmesh.errors import ConfigError, JoinError, RankmeshError
from rankmesh.membership.environment import Placement, detect, is_loopback
from rankmesh.membership.schemes import CANDIDATE_PORTS

Environment = dict[str, str]

RUN: Environment = {
    "RANKMESH_RANK": "5",
    "RANKMESH_SIZE": "8",
    "RANKMESH_LOCAL_RANK": "1",
    "RANKMESH_LOCAL_SIZE": "4",
    "RANKMESH_NODE_RANK": "1",
    "RANKMESH_STORE": "tcp://10.0.0.1:7000",
    "RANKMESH_RUN_ID": "abc",
}
#: torchrun 2.x, two nodes of two.
TORCHRUN: Environment = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
#: Open MPI 5.0.11: mpiexec -n 2.
OPEN_MPI: Environment = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-8421@1",
    "PMIX_RANK": "1",
}
#: MPICH 4.3 with hydra: mpiexec -n 2.
MPICH: Environment = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
#: srun in a job of four nodes.
SLURM: Environment = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "1",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_STEP_NODELIST": "gnode[10,20,25,37]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
KUBERNETES: Environment = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "3", "MASTER_ADDR": "job-0.svc"}


def found(environ: Environment, parent_pid: int = 77) -> Placement:
    placement = detect(environ, parent_pid=parent_pid)
    assert placement is not None
    return placement


@pytest.mark.parametrize(
    "environ, expected",
    [
        (
            RUN,
            Placement(
                source="rankmesh run", rank=5, size=8, local_rank=1, local_size=4, node_rank=1,
                master=("10.0.0.1", 7000), candidates_ports=1, run_id="abc", one_host=False, launcher_hosts=True,
            ),
        ),
        (
            TORCHRUN,
            Placement(
                source="torchrun", rank=3, size=4, local_rank=1, local_size=2, node_rank=1,
                master=("node1", 29501), candidates_ports=8, run_id="rank-none-0-29500", one_host=False,
            ),
        ),
        (
            OPEN_MPI,
            Placement(
                source="Open MPI", rank=1, size=2, local_rank=1, local_size=2, node_rank=None,
                master=None, candidates_ports=0, run_id="ompi-prterun-vm-8421@1", one_host=True,
            ),
        ),
        (
            MPICH,
            Placement(
                source="MPICH", rank=1, size=2, local_rank=1, local_size=2, node_rank=None,
                master=None, candidates_ports=0, run_id="pmi-parent-77", one_host=True,
            ),
        ),
        (
            SLURM,
            Placement(
                source="Slurm", rank=6, size=7, local_rank=0, local_size=1, node_rank=3,
                master=("gnode10", 15000 + 8 * ((200505 + 7) % 1500)), candidates_ports=8,
                run_id="slurm-200505-1", one_host=False,
            ),
        ),
        (
            KUBERNETES,
            Placement(
                source="a Kubernetes indexed job", rank=2, size=3, local_rank=0, local_size=1, node_rank=2,
                master=("job-0.svc", 29500), candidates_ports=8, run_id="job-job-0.svc", one_host=False,
            ),
        ),
    ],
    ids=["rankmesh", "torchrun", "openmpi", "mpich", "slurm", "kubernetes"],
)  # fmt: skip
def test_each_launcher_is_recognised(environ: Environment, expected: Placement) -> None:
    assert detect(environ, parent_pid=77) == expected


def test_without_a_launcher_there_is_no_placement() -> None:
    assert detect({"PATH": "/bin", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "RANK": ""}, parent_pid=1) is None


@pytest.mark.parametrize(
    "inner, outer, source",
    [
        (RUN, TORCHRUN, "rankmesh run"),
        (TORCHRUN, SLURM, "torchrun"),
        (OPEN_MPI, SLURM, "Open MPI"),
        (MPICH, SLURM, "MPICH"),
        (SLURM, KUBERNETES, "Slurm"),
    ],
)
def test_the_inner_launcher_counts(inner: Environment, outer: Environment, source: str) -> None:
    assert found({**outer, **inner}).source == source


def test_srun_that_speaks_pmi_is_slurm() -> None:
    assert found({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7"}).source == "Slurm"


def test_master_addr_set_by_hand_beats_what_the_launcher_knows() -> None:
    for environ in (OPEN_MPI, MPICH, SLURM):
        placement = found({**environ, "MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "6000"})
        assert placement.master == ("fd00::1", 6000)
        assert placement.candidates_ports == CANDIDATE_PORTS


def test_torchrun_without_its_own_store_leaves_master_port_to_us() -> None:
    assert found({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).master == ("node1", 29500)


def test_candidate_ports_end_with_the_last_port() -> None:
    placement = found({**TORCHRUN, "MASTER_PORT": "65532"})
    assert placement.master == ("node1", 65533)
    assert placement.candidates_ports == 3


def test_a_restarted_torchrun_world_is_another_run() -> None:
    assert found(TORCHRUN).run_id != found({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).run_id


def test_rankmesh_run_id_beats_the_launchers() -> None:
    assert found({**MPICH, "RANKMESH_RUN_ID": "mine"}).run_id == "mine"


def test_a_run_id_can_be_the_name_of_a_file() -> None:
    assert found({**MPICH, "RANKMESH_RUN_ID": "../../etc/x y\x00"}).run_id == "..-..-etc-x-y-"


def test_loopback_master_without_local_variables_means_one_host() -> None:
    placement = found({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"})
    assert (placement.local_rank, placement.local_size, placement.one_host) == (1, 3, True)


def test_remote_master_without_local_variables_means_one_rank_a_host() -> None:
    placement = found({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"})
    assert (placement.local_rank, placement.local_size, placement.one_host) == (0, 1, False)


def test_slurm_on_one_node_needs_no_address() -> None:
    environ = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "gnode10"}
    placement = found(environ)
    assert placement.master is None
    assert placement.one_host


def test_a_slurm_step_on_some_nodes_of_the_job_counts_its_own() -> None:
    environ = {**SLURM, "SLURM_STEP_NODELIST": "gnode[20,25]", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "1"}
    placement = found(environ)
    assert placement.master is not None
    assert placement.master[0] == "gnode20"
    assert placement.local_size == 3


def test_slurms_ports_differ_between_neighbouring_jobs_and_stay_below_the_ephemeral_range() -> None:
    ports = {job: found({**SLURM, "SLURM_JOB_ID": str(job)}).master for job in range(200500, 200600)}
    numbers = sorted(master[1] for master in ports.values() if master is not None)
    assert len(numbers) == 100
    assert all(b - a >= CANDIDATE_PORTS for a, b in itertools.pairwise(numbers))
    assert 15000 <= numbers[0] <= numbers[-1] + CANDIDATE_PORTS <= 32768


def test_the_batch_script_of_a_slurm_job_is_not_a_rank() -> None:
    environ = {name: value for name, value in SLURM.items() if "STEP" not in name}
    with pytest.raises(JoinError, match="srun") as caught:
        detect({**environ, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, parent_pid=1)
    assert caught.value.size == 7


@pytest.mark.parametrize(
    "environ, variable",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE='four'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "²"}, "LOCAL_RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "ssh"}, "MASTER_PORT"),
        ({**RUN, "RANKMESH_STORE": ""}, "RANKMESH_STORE"),
        ({**RUN, "RANKMESH_STORE": "inproc://h"}, "RANKMESH_STORE"),
        ({**RUN, "RANKMESH_STORE": "tcp://h:0"}, "RANKMESH_STORE"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS"),
        ({**SLURM, "SLURM_NODEID": "4"}, "SLURM_NODEID=4"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n["}, "SLURM_JOB_NODELIST"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETIONS"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environ: Environment, variable: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ, parent_pid=1)
    assert variable in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
        {**MPICH, "PMI_SIZE": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
    ],
)
def test_mpi_on_several_hosts_needs_to_be_told_where_rank_0_is(environ: Environment) -> None:
    with pytest.raises(JoinError, match="MASTER_ADDR"):
        detect(environ, parent_pid=1)


def test_every_error_is_ours_whatever_the_variables_hold() -> None:
    for base in (RUN, TORCHRUN, OPEN_MPI, MPICH, SLURM, KUBERNETES):
        for name in base:
            for value in ("", " ", "-1", "1.5", "x" * 100, "9" * 5000, "\x00", "[", "٣"):
                try:
                    detect({**base, name: value}, parent_pid=1)
                except RankmeshError:
                    pass  # a sentence, not a traceback


@pytest.mark.parametrize(
    "host, expected",
    [("localhost", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("localhost.evil.org", False)],
)
def test_loopback_by_name_or_number(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
