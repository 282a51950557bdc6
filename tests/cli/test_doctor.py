"""`rankmesh doctor` says what is there and what is broken."""

from __future__ import annotations

import errno
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from rankmesh.cli import doctor, reach
from rankmesh.cli.main import main
from rankmesh.transport import shm
from timing import scaled

Findings = dict[tuple[str, str], dict[str, Any]]


def examine(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Findings]:
    code = main(["doctor", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is (code == 0)
    return code, {(f["topic"], f["name"]): f for f in report["findings"]}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANKMESH_", "SLURM_", "OMPI_", "PMI_")) and "TEST" not in name:
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examine(capsys)
    assert code == 0
    assert ".".join(map(str, sys.version_info[:3])) in findings["python", "version"]["value"]
    assert f"this process may use {len(os.sched_getaffinity(0))}" in findings["cores", "affinity"]["value"]
    assert findings["packages", "numpy"]["value"] == version("numpy")
    assert "127.0.0.1 on lo" in findings["network", "advertised"]["value"]
    assert "can be bound on 127.0.0.1" in findings["network", "listening"]["value"]
    assert findings["limits", "shared memory"]["value"].startswith(f"works, for uid {os.geteuid()}")
    assert findings["environment", "launcher"]["value"].startswith("none")
    assert {f["verdict"] for f in findings.values()} <= {"ok", "note"}


def test_the_launcher_is_named_and_the_token_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "RANKMESH_TOKEN": "sesame"}.items():
        monkeypatch.setenv(name, value)
    code, findings = examine(capsys)
    assert code == 0
    assert "torchrun: rank 1 of 2" in findings["environment", "launcher"]["value"]
    assert findings["environment", "MASTER_ADDR"]["value"] == "10.0.0.9"
    assert findings["environment", "RANKMESH_TOKEN"]["value"] == "(set)"
    assert "sesame" not in str(findings)


@pytest.mark.parametrize(
    "environ, words, finding, said",
    [
        ({"RANK": "1"}, [], ("environment", "launcher"), "WORLD_SIZE"),
        ({"RANKMESH_TIMEOUT": "soon"}, [], ("environment", "launcher"), "RANKMESH_TIMEOUT"),
        ({}, ["--interface", "nosuch*"], ("network", "advertised"), "nosuch*"),
        ({}, ["--rendezvous", "nosuchhost.invalid:7000"], ("network", "advertised"), "nosuchhost.invalid"),
        ({}, ["--rendezvous", "nowhere"], ("network", "advertised"), "nowhere"),
        ({}, ["--reach", "inproc://x"], ("reach", "inproc://x"), "inside one process"),
        ({}, ["--reach", "nosuchhost.invalid:1"], ("reach", "nosuchhost.invalid:1"), "Check the name"),
    ],
)
def test_what_is_broken_is_said_and_gives_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environ: Mapping[str, str],
    words: list[str],
    finding: tuple[str, str],
    said: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, findings = examine(capsys, *words)
    assert code == 1
    assert findings[finding]["verdict"] == "broken"
    assert said in findings[finding]["advice"]


def test_a_missing_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if name in ("numpy", "torch"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", find)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test's
    code, findings = examine(capsys)
    assert code == 1
    assert findings["packages", "numpy"]["verdict"] == "broken"
    assert findings["packages", "torch"] == {
        "topic": "packages", "name": "torch", "value": "not installed", "verdict": "ok", "advice": "",
    }  # fmt: skip
    assert "torch" not in sys.modules


def test_missing_shared_memory_is_a_note(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    code, findings = examine(capsys)
    assert code == 0
    assert findings["limits", "shared memory"]["verdict"] == "note"
    assert "not implemented" in findings["limits", "shared memory"]["value"]
    assert "TCP" in findings["limits", "shared memory"]["advice"]


def test_memory_of_other_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = ("limits", "memory of other ranks")
    monkeypatch.setattr(doctor, "YAMA", tmp_path / "ptrace_scope")
    assert examine(capsys)[1][key]["value"] == "can be read"
    doctor.YAMA.write_text("1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = examine(capsys)[1][key]
    assert found["verdict"] == "note"
    assert "ptrace_scope is 1" in found["value"]
    doctor.YAMA.write_text("0\n")
    monkeypatch.setattr("rankmesh.transport.pulling.system_call", lambda _: None)
    found = examine(capsys)[1][key]
    assert found["verdict"] == "note"
    assert "process_vm_readv" in found["value"]
    assert "a copy more" in found["advice"]


def test_weakly_ordered_machines_are_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "ORDERED", False)
    _, findings = examine(capsys)
    assert findings["cores", "architecture"]["verdict"] == "note"
    assert "weakly ordered" in findings["cores", "architecture"]["value"]


def test_an_address_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        code, findings = examine(capsys, "--reach", address)
    assert code == 0
    assert "connected from 127.0.0.1 to 127.0.0.1 in" in findings["reach", address]["value"]


def test_an_address_where_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        code, findings = examine(capsys, "--reach", address)
    assert code == 1
    assert "refused: the host answers" in findings["reach", address]["value"]
    assert findings["reach", address]["advice"]


def test_an_address_that_does_not_answer() -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        host, port = server.getsockname()
        with socket.create_connection((host, port)):
            result = reach.reach(host, port, 0.3)
    assert not result.reached
    assert "no answer within 0." in result.text
    assert "firewall" in result.advice


def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        release.wait(scaled(30))
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    result = reach.reach("slow.example", 1, 0.1)
    release.set()
    assert not result.reached
    assert "not resolved within 0.1 s" in result.text


def test_a_name_service_that_takes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_resolve", lambda host, port, timeout: [(socket.AF_INET, 0, 0, "", (host, port))])
    result = reach.reach("127.0.0.1", 1, 0.0)
    assert not result.reached
    assert "--timeout" in result.advice


def test_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--interface", "nosuch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok ") and "python version" in line for line in lines)
    assert any(line.startswith("BROKEN") and "'nosuch'" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_a_table_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb", 0) as terminal:
        command = [sys.executable, "-m", "rankmesh", "doctor"]
        process = subprocess.Popen(command, stdout=terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"})
    text = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux says EIO when the other end of a terminal closes
            break
        if not data:
            break
        text += data
    os.close(ours)
    assert process.wait(scaled(30)) == 0
    assert b"python" in text
    assert b"\x1b[" in text
