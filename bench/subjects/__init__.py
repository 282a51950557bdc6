"""What is measured, by the name it has on the command line and in the table.

A subject is described here and implemented in its own file; that file is imported only in the worker process, after it
is pinned, so that a library which is not installed costs one row and not the run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from subjects.base import Subject


@dataclass(frozen=True)
class Entry:
    """A row of the table: where its code is, and how its processes start."""

    name: str
    title: str
    #: "file:class" in this folder.
    code: str
    #: Started as its users start it, by MPIEXEC or RUN; directly if there is none.
    launcher: str = ""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.name.startswith("rankmesh")


#: The launchers, which are installed beside Python: that of MPI's wheel, and our own.
MPIEXEC, RUN = "mpiexec", "rankmesh"

#: MPICH's wheel speaks UCX; this leaves it TCP only, also between processes of one host.
MPICH_TCP_ONLY = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}

GLOO = {"GLOO_SOCKET_IFNAME": "lo"}

#: TensorPipe looks the host's name up and binds to that address, unless it is told an interface.
TORCH_RPC = {"TP_SOCKET_IFNAME": "lo", **GLOO}

#: Errors only: it tells its life on stderr otherwise.
MOONCAKE_QUIET = {"GLOG_minloglevel": "2"}

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("copyto", "np.copyto inside one process", "copyto:CopyTo"),
        Entry("socket-try", "bare socket, polled by try recv_into", "sockets:TryPolledSocket"),
        Entry("socket-epoll", "bare socket, polled by epoll.poll(0)", "sockets:EpollPolledSocket"),
        Entry("socket", "bare socket, blocking", "sockets:BlockingSocket"),
        Entry("rankmesh-tcp", "rankmesh tcp://", "rankmesh_messages:RankmeshTcp", launcher=RUN),
        Entry("rankmesh-shm", "rankmesh, shared memory", "rankmesh_messages:RankmeshShm", launcher=RUN),
        Entry("rankmesh-arena", "rankmesh, arrays of mesh.empty()", "rankmesh_messages:RankmeshArena", launcher=RUN),
        Entry("gloo", "gloo (torch.distributed)", "gloo:Gloo", env=GLOO),
        Entry("mpi", "mpi4py + MPICH, shared memory", "mpi:Mpi", launcher=MPIEXEC),
        Entry("mpi-tcp", "mpi4py + MPICH, TCP only", "mpi:Mpi", launcher=MPIEXEC, env=MPICH_TCP_ONLY),
        Entry("zmq", "pyzmq PAIR over tcp", "zeromq:ZmqPair"),
        Entry("zmq-ipc", "pyzmq PAIR over ipc", "zeromq:ZmqPairIpc"),
        Entry("rankmesh-inline", "rankmesh tcp://, inline", "rankmesh_calls:InlineTcp", launcher=RUN),
        Entry("rankmesh-pooled", "rankmesh tcp://, pooled", "rankmesh_calls:PooledTcp", launcher=RUN),
        Entry("rankmesh-shm-inline", "rankmesh, shared memory, inline", "rankmesh_calls:InlineShm", launcher=RUN),
        Entry("rankmesh-shm-pooled", "rankmesh, shared memory, pooled", "rankmesh_calls:PooledShm", launcher=RUN),
        Entry("grpc", "grpcio, threads", "grpc_calls:Grpc"),
        Entry("grpc-aio", "grpcio, asyncio", "grpc_calls:GrpcAio"),
        Entry("rpyc", "RPyC", "rpyc_calls:Rpyc"),
        Entry("zmq-req", "pyzmq REQ/REP over tcp", "zeromq_calls:ZmqReqRep"),
        Entry("zmq-dealer", "pyzmq DEALER/ROUTER over tcp", "zeromq_calls:ZmqDealerRouter"),
        Entry("socket-try-64", "bare socket, try, 64 B each way", "sockets:SmallTryPolledSocket"),
        Entry("socket-epoll-64", "bare socket, epoll, 64 B each way", "sockets:SmallEpollPolledSocket"),
        Entry("socket-memory", "bare sockets, a thread of the owner's serves", "socket_memory:SocketMemory"),
        Entry("rankmesh-memory-tcp", "rankmesh tcp://, registered", "rankmesh_memory:RegisteredTcp", launcher=RUN),
        Entry("rankmesh-registered", "rankmesh, same host, registered", "rankmesh_memory:RegisteredShm", launcher=RUN),
        Entry("rankmesh-allocated", "rankmesh, same host, allocated", "rankmesh_memory:AllocatedShm", launcher=RUN),
        Entry("mooncake", "Mooncake over tcp", "mooncake_memory:Mooncake", env=MOONCAKE_QUIET),
        Entry("mpi-rma-tcp", "MPICH RMA, TCP only", "mpi_rma:Created", launcher=MPIEXEC, env=MPICH_TCP_ONLY),
        Entry("mpi-rma", "MPICH RMA, same host, Win.Create", "mpi_rma:Created", launcher=MPIEXEC),
        Entry("mpi-rma-allocated", "MPICH RMA, same host, Win.Allocate", "mpi_rma:Allocated", launcher=MPIEXEC),
        Entry("memory-bound", "memory alone, both cores at once", "bounds:MemoryBound"),
        Entry("exchange-poll", "bare socket, both ways, polled", "bounds:PolledExchange"),
        Entry("exchange-threads", "bare socket, both ways, a thread sends", "bounds:ThreadedExchange"),
        Entry("rankmesh-collectives", "rankmesh", "rankmesh_collectives:SameHost", launcher=RUN),
        Entry("rankmesh-collectives-tcp", "rankmesh tcp://", "rankmesh_collectives:Tcp", launcher=RUN),
        Entry("rankmesh-float32", "rankmesh, torch.float32", "rankmesh_collectives:Float32", launcher=RUN),
        Entry("rankmesh-float16", "rankmesh, torch.float16", "rankmesh_collectives:Float16", launcher=RUN),
        Entry("rankmesh-bfloat16", "rankmesh, torch.bfloat16", "rankmesh_collectives:BFloat16", launcher=RUN),
        Entry("mpi-collectives", "mpi4py + MPICH, shared memory", "mpi_collectives:MpiCollectives", launcher=MPIEXEC),
        Entry("gloo-collectives", "gloo (torch.distributed)", "gloo_collectives:GlooCollectives", env=GLOO),
        Entry("rankmesh-torch", "torch.distributed over rankmesh", "torch_collectives:RankmeshTorch"),
        Entry("rankmesh-ddp", "DDP over rankmesh", "torch_training:RankmeshDdp"),
        Entry("gloo-ddp", "DDP over gloo", "torch_training:Ddp", env=GLOO),
        Entry("torch-rpc", "torch.distributed.rpc", "torch_rpc:TorchRpc", env=TORCH_RPC),
        Entry("torch-rpc-tcp", "torch.distributed.rpc, TCP only", "torch_rpc:TorchRpcTcp", env=TORCH_RPC),
    )
}


def load(name: str) -> Subject:
    """Import the subject's file and make the subject. Raises ImportError where its library is missing."""
    module, _, attribute = ENTRIES[name].code.partition(":")
    subject: Subject = getattr(importlib.import_module(f"subjects.{module}"), attribute)()
    return subject
