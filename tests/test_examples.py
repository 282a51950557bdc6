"""The examples run, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from timing import scaled

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Generous: the first import of torch on a machine reads a gigabyte from its disk.
DEADLINE = 120

pytestmark = pytest.mark.timeout(scaled(2 * DEADLINE + 20))
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install 'rankmesh[torch]'"
)


def run(*words: str) -> list[str]:
    command = [sys.executable, *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=scaled(DEADLINE), check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return sorted(result.stdout.splitlines())


def launch(size: int, example: str, *arguments: str) -> list[str]:
    return run("-m", "rankmesh", "run", "-n", str(size), str(EXAMPLES / example), *arguments)


def test_all_examples_are_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "ring.py",
        "endpoints.py",
        "asyncio_messages.py",
        "rpc_server.py",
        "kv_handover.py",
        "weight_push.py",
        "torch_ddp.py",
        "torch_fsdp2.py",
        "torch_dtensor.py",
        "torch_checkpoint.py",
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ring(size: int) -> None:
    total = sum(range(size))
    expected = [f"[{rank}] rank {rank} of {size}: [{' '.join([f'{total}.'] * 5)}]" for rank in range(size)]
    assert launch(size, "ring.py") == expected


def test_asyncio_messages() -> None:
    assert launch(3, "asyncio_messages.py") == [
        "[0] rank 0 heard from [1, 2], sum 3; tag 2 never came",
        "[1] rank 1 heard from [0, 2], sum 2; tag 2 never came",
        "[2] rank 2 heard from [0, 1], sum 1; tag 2 never came",
    ]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    example, role = getattr(request, "param", "endpoints.py serve").split()
    command = [sys.executable, str(EXAMPLES / example), role]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


def test_endpoints(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert address.startswith("tcp://127.0.0.1:")
    for _ in range(2):
        answer = run(str(EXAMPLES / "endpoints.py"), "ask", address)
        assert answer == ["mean 2.5, doubled [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]"]
        assert server.stdout.readline().startswith("answered peer 'client' (host ")


@pytest.mark.parametrize("server", ["rpc_server.py serve"], indirect=True)
def test_rpc_server(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert run(str(EXAMPLES / "rpc_server.py"), "ask", address) == [
        "accumulate [1, 3, 6]",
        "countdown [3, 2, 1]",
        "predict [False, True]",
        "refused predict",
        "slow_add [0, 2, 4]",
    ]
    assert server.wait(scaled(DEADLINE)) == 0


@pytest.mark.parametrize("server", ["kv_handover.py prefill"], indirect=True)
def test_kv_handover(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert run(str(EXAMPLES / "kv_handover.py"), "decode", address) == [
        "200 tokens in 13 blocks, 1703936 bytes, as they were computed",
        "333 tokens in 21 blocks, 2752512 bytes, as they were computed",
        "5 tokens in 1 blocks, 131072 bytes, as they were computed",
    ]
    assert server.wait(scaled(DEADLINE)) == 0


def test_weight_push() -> None:
    assert launch(3, "weight_push.py") == [
        "[0] learner pushed 5 versions to 2 actors",
        "[1] actor 1 followed to version 5; no weights were mixed",
        "[2] actor 2 followed to version 5; no weights were mixed",
    ]


@needs_torch
def test_torch_ddp_has_the_losses_of_gloo() -> None:
    ours = launch(2, "torch_ddp.py")
    # Gloo's is ended when it has said what it has to say: at its end its thread may wait for the interpreter for ever,
    # or be aborted by it.
    words = ("run", "-n", "2", "--timeout", str(scaled(60)), str(EXAMPLES / "torch_ddp.py"), "--backend", "gloo")
    command = [sys.executable, "-m", "rankmesh", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        gloo = [process.stdout.readline().strip() for _ in ours]
        process.terminate()
    assert [line.partition(": ")[0] for line in ours] == [f"[0] rankmesh, step {step}" for step in (10, 20, 30)]
    assert float(ours[-1].split()[-1]) < 0.1
    assert [line.replace("gloo", "rankmesh") for line in gloo] == ours


@needs_torch
def test_torch_fsdp2() -> None:
    assert launch(2, "torch_fsdp2.py") == [
        "[0] rank 0 holds 6305 of 12545 numbers; its loss fell: True",
        "[1] rank 1 holds 6240 of 12545 numbers; its loss fell: True",
    ]


@needs_torch
def test_torch_dtensor() -> None:
    assert launch(2, "torch_dtensor.py") == [
        f"[{rank}] rank {rank}: (96, 64) @ (64, 64) is P(sum), then (48, 64); right: True" for rank in range(2)
    ]


@needs_torch
def test_torch_checkpoint(tmp_path: Path) -> None:
    (saved,) = launch(4, "torch_checkpoint.py", "save", str(tmp_path))
    (loaded,) = launch(2, "torch_checkpoint.py", "load", str(tmp_path))
    assert saved.startswith("[0] save with 4 ranks; after one more step the weights add up to ")
    assert loaded == saved.replace("save with 4", "load with 2")
