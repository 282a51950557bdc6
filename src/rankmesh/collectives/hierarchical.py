"""Hierarchical: within a host first, then between hosts, then within a host again.

Idea. Links between hosts are slow and few; a host's memory is neither. So what leaves a host was reduced there, and
what comes is spread there. all_reduce uses all the links that a host's ranks have: of each host as many ranks as the
smallest host has are owners, and owner j of every host reduces slice j of the array, first over its host, then with
the other owners j (halving_doubling.py), and gives it to all on its host. The other collectives go through one rank
of each host, its lowest or the root.

Cost, for B bytes, h hosts, and m ranks on the smallest: all_reduce two rounds within hosts, and between them what
halving and doubling take for B/m bytes and h ranks: 2B per host and direction at most, whatever the number of its
ranks. broadcast, reduce: as binomial.py, over hosts and then within them: B crosses into or out of each host once.
all_gather: two rounds within hosts and h-1 between; every block crosses to each host once. barrier: two rounds and
ceil(log2(h)).

An owner reduces over its host in the order of ranks, its own first; between hosts the order depends on h alone; one
rank makes each block: bit-identical on all ranks for the same hosts.

`hosts[r]` is the host of rank r, as any number; all ranks are given the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankmesh.collectives import binomial, dissemination, halving_doubling
from rankmesh.collectives.plan import Into, Plan, Receive, Round, Send, among, spans

Hosts = Sequence[int]


def _by_host(hosts: Hosts) -> list[list[int]]:
    """The ranks of each host, in the order of their lowest ranks."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def _place(rank: int, groups: list[list[int]]) -> tuple[int, int]:
    """(its host's number, its own number there)."""
    at = next(at for at, group in enumerate(groups) if rank in group)
    return at, groups[at].index(rank)


def blocks(hosts: Hosts) -> int:
    """Of all_reduce: a slice for each owner, cut as halving and doubling between hosts takes it."""
    groups = _by_host(hosts)
    return min(map(len, groups)) * halving_doubling.blocks(len(groups))


def all_reduce(rank: int, hosts: Hosts) -> Plan:
    """Over m·p blocks, p the largest power of two up to h."""
    groups = _by_host(hosts)
    host, number = _place(rank, groups)
    mine, owners = groups[host], min(map(len, groups))
    count = halving_doubling.blocks(len(groups))
    slices = [((owner * count, (owner + 1) * count),) for owner in range(owners)]
    others = [other for other in mine if other != rank]
    of_others = [(mine[owner], slices[owner]) for owner in range(owners) if owner != number]
    owns = number < owners
    if others:
        yield Round(
            tuple(Send(owner, part) for owner, part in of_others),
            tuple(Receive(other, slices[number], Into.RIGHT) for other in others) if owns else (),
        )
    if owns:
        between = halving_doubling.all_reduce(host, len(groups))
        yield from among([group[number] for group in groups], between, number * count)
    if others:
        yield Round(
            tuple(Send(other, slices[number]) for other in others) if owns else (),
            tuple(Receive(owner, part) for owner, part in of_others),
        )


def _leaders(groups: list[list[int]], root: int) -> list[int]:
    """The rank of each host through which it is reached."""
    return [root if root in group else group[0] for group in groups]


def broadcast(rank: int, root: int, hosts: Hosts) -> Plan:
    """Over one block."""
    groups = _by_host(hosts)
    host, number = _place(rank, groups)
    mine, leaders = groups[host], _leaders(groups, root)
    if rank == leaders[host]:
        yield from among(leaders, binomial.broadcast(host, len(groups), leaders.index(root)))
    yield from among(mine, binomial.broadcast(number, len(mine), mine.index(leaders[host])))


def reduce(rank: int, root: int, hosts: Hosts) -> Plan:
    """Over one block, which is spent on all ranks but the root."""
    groups = _by_host(hosts)
    host, number = _place(rank, groups)
    mine, leaders = groups[host], _leaders(groups, root)
    yield from among(mine, binomial.reduce(number, len(mine), mine.index(leaders[host])))
    if rank == leaders[host]:
        yield from among(leaders, binomial.reduce(host, len(groups), leaders.index(root)))


def all_gather(rank: int, hosts: Hosts) -> Plan:
    """Block r of n is rank r's."""
    groups = _by_host(hosts)
    host, number = _place(rank, groups)
    leader, others = groups[host][0], groups[host][1:]
    every = ((0, len(hosts)),)
    if number:
        yield Round(sends=(Send(leader, ((rank, rank + 1),)),))
        yield Round(receives=(Receive(leader, every),))
        return
    if others:
        yield Round(receives=tuple(Receive(other, ((other, other + 1),)) for other in others))
    after, before = groups[(host + 1) % len(groups)][0], groups[host - 1][0]
    for step in range(len(groups) - 1):
        out, into = groups[(host - step) % len(groups)], groups[(host - step - 1) % len(groups)]
        yield Round((Send(after, spans(out)),), (Receive(before, spans(into)),))
    if others:
        yield Round(sends=tuple(Send(other, every) for other in others))


def barrier(rank: int, hosts: Hosts) -> Plan:
    """Over no blocks."""
    groups = _by_host(hosts)
    host, number = _place(rank, groups)
    leader, others = groups[host][0], groups[host][1:]
    if number:
        yield Round(sends=(Send(leader, ()),))
        yield Round(receives=(Receive(leader, ()),))
        return
    if others:
        yield Round(receives=tuple(Receive(other, ()) for other in others))
    yield from among([group[0] for group in groups], dissemination.barrier(host, len(groups)))
    if others:
        yield Round(sends=tuple(Send(other, ()) for other in others))
