"""A seeded fuzzer of RPC over real sockets, in both directions.

    python fuzz/rpc.py --seconds 120 --seed 7
    python fuzz/rpc.py --seed 7 --case 1234            one case again

Requests: a case is one connection to a server in a process of its own. After a genuine handshake it sends requests that
are valid, mutated or garbage, small or announced, some of them about calls that are under way. Findings are those of
fuzz/sockets.py: the server dies, complains, grows, or a genuine client between the cases gets no answer or a wrong one.

Replies: a server in this process answers the calls and streams of a genuine client with replies that are valid, mutated
or garbage, too many or too few. A call must end with a result or an error of rankmesh, and nothing may be left of it.
Anything else is a finding.

A case draws everything from Random(f"{seed}/{number}").
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Final

import corpus
from rankmesh import Channel, Endpoint, Peer, RankmeshError
from rankmesh.endpoint.router import Router
from rankmesh.rpc import protocol
from rankmesh.rpc.protocol import Bit, Kind, Why
from rankmesh.wire.header import DATA_LIMIT, Flag, pack
from rankmesh.wire.header import Kind as FrameKind
from sockets import CONFIG, Case, Finding, Genuine, Plan, Target, hunt, read_plan

NAMES: Final = ("echo", "pooled", "count", "chat", "aecho", "acount", "rankmesh.ref.call", "rankmesh.ref.fetch", "none")
WHYS: Final = tuple(text for name, text in vars(Why).items() if not name.startswith("_"))
#: Seconds a call answered with rubbish may take: what it says may be that it shall wait.
PATIENCE: Final = 0.1


# --- bytes ------------------------------------------------------------------------------------------------------------


def arguments(random: Random) -> protocol.Body:
    args = tuple(corpus.value(random, 1) for _ in range(random.randint(0, 3)))
    kwargs = {corpus.text(random, 3): corpus.value(random, 1)} if random.random() < 0.3 else {}
    return protocol.arguments(args, kwargs, False)


def request(random: Random) -> bytes:
    """A request as a caller could send it, or nearly."""
    kind = random.choice((*range(1, 10), 0, 16, 255)) if random.random() < 0.9 else random.randrange(256)
    body = random.choice((arguments(random), protocol.Body(0, [random.randbytes(random.choice((0, 7, 8, 16)))], 0)))
    flags = random.choice((0, 0, 0, Bit.RETRY, Bit.KEEP, Bit.SHIPPED, random.randrange(256)))
    seconds = random.choice((30.0, 0.0, 0.01, float("inf"), float(random.randrange(5))))
    trace = random.choice((b"", b"", b"00-trace", random.randbytes(40)))
    parts, _ = protocol.request(kind, body, random.choice(NAMES).encode(), seconds, flags, trace)
    return b"".join(parts)


def reply(random: Random) -> bytes:
    """A reply as a server could send it, or nearly."""
    kind = random.choice((Kind.RESULT, Kind.RESULT, Kind.ITEM, Kind.ITEM, Kind.FAILURE, Kind.END, Kind.CREDIT, 0, 99))
    number = random.choice((0, 0, 1, 2, 3, 2**63))
    if kind == Kind.FAILURE and random.random() < 0.8:
        why = random.choice((*WHYS, "?"))
        return protocol.failure(why, corpus.text(random), corpus.text(random), "…", [corpus.text(random)], number)
    if kind == Kind.CREDIT:
        return protocol.credit_reply(random.choice((0, 1, 1000, 2**64 - 1)))
    body = protocol.item(corpus.value(random, 2), False)
    parts, _ = protocol.reply(kind, body, random.choice((0, 0, Bit.IDEMPOTENT, random.randrange(256) & ~1)), number)
    return b"".join(parts)


def spoilt(random: Random, data: bytes) -> bytes:
    return random.choice((lambda: data, lambda: corpus.mutate(random, data), lambda: corpus.garbage(random)))()


# --- requests ---------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Print the address, and serve until standard input ends."""
    logging.basicConfig(level=logging.WARNING)
    with Endpoint(name="target", config=CONFIG) as endpoint:
        offer(endpoint)
        print(endpoint.address, flush=True)
        sys.stdin.read()
        endpoint.abort()


def offer(endpoint: Endpoint) -> None:
    rpc = endpoint.rpc
    rpc.register(lambda *args, **kwargs: [*args, kwargs], "echo", inline=True)
    rpc.register(lambda *args, **kwargs: [*args, kwargs], "pooled")

    @rpc.register
    def count(n: int = 1000) -> Iterator[int]:
        yield from range(min(n, 1000))

    @rpc.register(channel=True)
    def chat(channel: Channel, *greetings: Any) -> None:
        for item in channel:
            channel.send([item, *greetings], timeout=5)

    @rpc.register
    async def aecho(*args: Any) -> list[Any]:
        return list(args)

    @rpc.register
    async def acount(n: int = 1000) -> Any:
        for number in range(min(n, 1000)):
            yield number


class Requests(Case):
    """One connection with requests in it."""

    def _frames(self) -> str:
        random = self._random
        idents = [random.randrange(1, 6) for _ in range(4)]
        for _ in range(random.randint(1, 12)):
            payload = spoilt(random, request(random))
            ident = random.choice(idents)
            if len(payload) <= corpus.LIMITS.eager and random.random() < 0.9:
                header = pack(FrameKind.REQUEST, group=protocol.SERVICE, tag=ident, nbytes=len(payload))
                self._send(header + payload)
            elif payload:
                self._announce(ident, payload[:DATA_LIMIT])
            if random.random() < 0.5:
                self._look()
        return "requests"

    def _announce(self, ident: int, payload: bytes) -> None:
        flags, transfer = int(Flag.REQUEST), self._random.randrange(1 << 32)
        service, size = protocol.SERVICE, len(payload)
        self._send(pack(FrameKind.ANNOUNCE, flags=flags, group=service, tag=ident, ident=transfer, extra=size))
        self._look()  # the grant
        self._send(pack(FrameKind.DATA, ident=transfer, nbytes=size) + payload)


class Caller(Genuine):
    """The client that must notice nothing."""

    def check(self) -> None:
        self._count += 1
        try:
            answers = [self._peer.call(name, self._count) for name in ("echo", "pooled", "aecho")]
            counted = sum(self._peer.stream("count", 100))
        except RankmeshError as error:
            raise Finding(f"the genuine client noticed something: {error!r}") from error
        if answers != [[self._count, {}], [self._count, {}], [self._count]] or counted != 4950:
            raise Finding(f"the genuine client got {answers} and {counted}")


# --- replies ----------------------------------------------------------------------------------------------------------


class Hostile:
    """A server that answers with whatever the case's Random says."""

    def __init__(self) -> None:
        self.random = Random(0)
        self.endpoint = Endpoint(name="hostile", config=CONFIG, services={protocol.SERVICE: self._answer})

    def _answer(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        random = self.random
        for _ in range(random.choice((0, 1, 1, 1, 2, 5))):
            data = spoilt(random, reply(random))[: CONFIG.max_rpc_bytes - 64]
            service = protocol.SERVICE if random.random() < 0.95 else random.randrange(4)
            at = ident if random.random() < 0.95 else ident + random.choice((-1, 1))
            if data:
                router.reply(at, [memoryview(data)], len(data), random.random() < 0.1, service)


def answer_case(random: Random, hostile: Hostile, client: Endpoint, peer: Peer) -> str:
    """One call or stream of the genuine client's. How it went; raises Finding."""
    with hostile.endpoint.hub.engine:
        hostile.random = random
    verb = random.choice(("call", "stream", "channel", "notify"))
    try:
        _use(verb, peer)
        outcome = "answered"
    except RankmeshError:
        outcome = "refused"
    except StopIteration:
        outcome = "ended"
    except Exception as error:
        raise Finding(f"a {verb} raised {error!r}") from error
    left = client.rpc.statistics()["calls_waiting"]
    if left or not peer.connected:
        raise Finding(f"after a {verb}, {left} calls are left, and the peer is {peer!r}")
    return outcome


def _use(verb: str, peer: Peer) -> None:
    if verb == "call":
        peer.call("anything", 1, timeout=PATIENCE)
    elif verb == "notify":
        peer.notify("anything", 1)
    elif verb == "stream":
        with peer.stream("anything", timeout=PATIENCE) as stream:
            for _ in range(5):
                next(stream)
    else:
        with peer.channel("anything", timeout=PATIENCE) as channel:
            channel.send("item")
            next(channel)


# --- the loop ---------------------------------------------------------------------------------------------------------


def fuzz_requests(plan: Plan) -> Counter[str]:
    target = Target(__file__)
    return hunt(target, Caller(target), Requests, plan)


def fuzz_replies(plan: Plan) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    hostile = Hostile()
    try:
        with Endpoint(None, name="client", config=CONFIG) as client:
            peer = client.connect(hostile.endpoint.address)
            for random in plan.randoms(repetitions=1):
                outcomes[answer_case(random, hostile, client, peer)] += 1
    except Finding as finding:
        raise Finding(f"{finding}\n--seed {plan.seed} --case {plan.case(outcomes.total())}") from finding.__cause__
    finally:
        hostile.endpoint.abort()
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    plan = read_plan("Fuzz RPC over sockets.", arguments)
    if plan is None:
        serve()
        return 0
    for name, fuzz in (("requests", fuzz_requests), ("replies", fuzz_replies)):
        try:
            outcomes = fuzz(replace(plan, seconds=plan.seconds / 2))
        except Finding as finding:
            print(f"FINDING in {name} with seed {plan.seed}\n{finding}", flush=True)
            return 1
        told = ", ".join(f"{n:,} {how}" for how, n in outcomes.most_common())
        print(f"{name}: {outcomes.total():,} cases, no finding: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
