"""Two hosts in network namespaces, each with an interface that leads nowhere: the ranks meet, talk, and advertise the
address that the other can reach."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Host, TwoHosts, finish, needs_namespaces

pytestmark = needs_namespaces

TOKEN = "the secret of both hosts"
COUNT = 200_000


@pytest.fixture(scope="module")
def two() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        yield hosts


def world(url: str, specs: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """What each of the two ranks is told."""
    return {"ranks": [{"url": url, "config": {"interface": spec}} for spec in specs]}


def check(said: dict[str, Any], rank: int, mine: str, theirs: str) -> None:
    """It advertised the right address, and what the other rank sent is what arrived."""
    other = 1 - rank
    assert "error" not in said, said
    assert [re.sub(r":\d+$", "", address) for address in said["mine"] + said["theirs"]] == [mine, theirs]
    assert said["sum"] == COUNT * (other + 1.0)
    assert said["status"] == [other, 5, COUNT * 8]
    assert said["object"] == [other, [0, 1, 2]]


def cases(a: Host, b: Host) -> dict[str, tuple[dict[str, Any], str]]:
    """Name → the world, and which address the ranks must take in it."""
    ipv4, ipv6 = f"tcp://{a.ipv4}:7{{}}", f"tcp://[{a.ipv6}]:7{{}}"
    specs = {
        "by route": ("", ""),
        "by name": (a.link, b.link),
        "by glob": ("rmv*", "rmv*"),
        "by exclusion": (f"^{a.dummy}", "^rmd*,^lo"),
        "by network": ("10.77.0.0/16", f"{b.dummy[:2]}x*,10.77.0.0/24"),
    }
    made = {name: (world(ipv4.format(100 + n), spec), "ipv4") for n, (name, spec) in enumerate(specs.items())}
    made["IPv6 by route"] = (world(ipv6.format(200)), "ipv6")
    made["IPv6 by network"] = (world(ipv6.format(201), ("fd77::/64", "fd77::/16")), "ipv6")
    return made


def test_ranks_on_two_hosts_meet_and_advertise_the_address_that_can_be_reached(two: TwoHosts) -> None:
    a, b = two.hosts
    made = cases(a, b)
    said = two.join([settings for settings, _ in made.values()], TOKEN)
    for n, (name, (_, family)) in enumerate(made.items()):
        print(name)  # shown when this test fails
        form = "tcp://[{}]" if family == "ipv6" else "tcp://{}"
        first, second = form.format(getattr(a, family)), form.format(getattr(b, family))
        check(said[0][n], 0, first, second)
        check(said[1][n], 1, second, first)


def test_without_a_token_nothing_goes_off_this_host(two: TwoHosts) -> None:
    settings = world(f"tcp://{two.hosts[0].ipv4}:7300")
    for (said,) in two.join([settings], token=""):
        assert said["error"] == "ConfigError"
        assert "needs a cluster token" in said["text"]
        assert "RANKMESH_TOKEN" in said["text"]


def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are(two: TwoHosts) -> None:
    a, _ = two.hosts
    program = a.start(
        "-c",
        f"import rankmesh as rm\ntry: rm.join('tcp://{a.ipv4}:7301', rank=0, size=1, interface='eth*')\n"
        "except rm.ConfigError as error: print(error)",
        RANKMESH_TOKEN=TOKEN,
    )
    (text,) = finish(program)
    assert "'eth*' fits no usable address" in text
    for name in (a.link, a.dummy, a.ipv4, *a.unreachable):
        assert name in text


@pytest.mark.parametrize("family", ["ipv4", pytest.param("ipv6", marks=pytest.mark.soak)])
def test_rankmesh_run_over_two_hosts(two: TwoHosts, tmp_path: Path, family: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import rankmesh as rm\n"
        "with rm.join() as mesh:\n"
        "    got = [mesh.recv_object(source=r) for r in range(4) if mesh.send_object(mesh.rank, to=r) is None]\n"
        "    print('all', mesh.size, sum(got), *(str(a) for p in mesh.peers for a in p.addresses), flush=True)\n"
        "    mesh.barrier()\n"
    )
    host = getattr(two.hosts[0], family)
    meeting = f"[{host}]:7400" if family == "ipv6" else f"{host}:7402"
    launchers = [
        host.start(
            *("-m", "rankmesh", "run", "-n", "2", "--nnodes", "2", "--node-rank", str(rank)),
            *("--rendezvous", meeting, str(script)),
            RANKMESH_TOKEN=TOKEN,
            RANKMESH_RUN_ID="two-hosts",
        )
        for rank, host in enumerate(two.hosts)
    ]
    for node, out in enumerate(finish(*launchers)):
        lines = out.splitlines()
        assert sorted(line[:9] for line in lines) == [f"[{rank}] all 4" for rank in (2 * node, 2 * node + 1)]
        for line in lines:
            assert line.split()[3] == "6"
            assert not any(bad in line for host in two.hosts for bad in host.unreachable)
