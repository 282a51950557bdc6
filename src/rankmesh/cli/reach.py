"""Can a TCP connection to an address be made, how long does it take, and if not, why."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: What an error of connect() means, and what to do about it.
REASONS: Final[Mapping[int, tuple[str, str]]] = {
    errno.ECONNREFUSED: (
        "refused: the host answers, but nothing listens there",
        "Start the other side, or check the port.",
    ),
    errno.ENETUNREACH: ("no route to that network", "Check the address, and the routes with `ip route`."),
    errno.EHOSTUNREACH: ("the network says that the host cannot be reached", "Check that it is up, and its firewall."),
    errno.ECONNRESET: ("reset while connecting", "A proxy or firewall on the way cuts it: allow the port."),
    errno.EACCES: ("forbidden on this host", "A local firewall rule or sandbox denies it: allow the port."),
    errno.EPERM: ("forbidden on this host", "A local firewall rule or sandbox denies it: allow the port."),
}


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether, how fast, and if not why."""

    reached: bool
    text: str
    advice: str = ""


def reach(host: str, port: int, timeout: float) -> Reach:
    """Resolve the name and connect to each of its addresses until one answers, all within `timeout` seconds."""
    start = time.monotonic()
    resolved = _resolve(host, port, timeout)
    if isinstance(resolved, Reach):
        return resolved
    lookup = time.monotonic() - start
    failures: list[Reach] = []
    for family, _, _, _, target in resolved:
        left = timeout - (time.monotonic() - start)
        if left <= 0:
            break
        attempt = _connect(family, target, left, lookup)
        if attempt.reached:
            return attempt
        failures.append(attempt)
    if not failures:
        return Reach(False, f"the name took {lookup:.1f} s, which left no time to connect", "Pass a larger --timeout.")
    texts = "; ".join(dict.fromkeys(failure.text for failure in failures))
    return Reach(False, texts, failures[-1].advice)


def _resolve(host: str, port: int, timeout: float) -> list[Any] | Reach:
    # getaddrinfo cannot be given a deadline. It runs on a daemon thread, which a process may leave behind when it ends.
    answers: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except OSError as error:
            answers.put(error)

    threading.Thread(target=look_up, name="rankmesh-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout)
    except queue.Empty:
        return Reach(
            False,
            f"the name {host} was not resolved within {timeout:g} s",
            "Check the DNS servers in /etc/resolv.conf.",
        )
    if isinstance(answer, OSError):
        return Reach(
            False, f"the name {host} cannot be resolved: {answer.strerror}", "Check the name, or give the address."
        )
    return answer


def _connect(family: int, target: tuple[Any, ...], timeout: float, lookup: float) -> Reach:
    start = time.monotonic()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(target)
            source = connection.getsockname()[0]
    except TimeoutError:
        advice = "A firewall drops the packets, or the host is down: check both."
        return Reach(False, f"{target[0]}: no answer within {timeout:.1f} s", advice)
    except OSError as error:
        reason, advice = REASONS.get(error.errno or 0, (error.strerror or str(error), "Check the address."))
        return Reach(False, f"{target[0]}: {reason}", advice)
    took = time.monotonic() - start
    return Reach(True, f"connected from {source} to {target[0]} in {took * 1e3:.1f} ms (name {lookup * 1e3:.1f} ms)")
