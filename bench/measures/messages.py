"""Messages between ranks: there and back, large ones, many small ones, round a ring, and none at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from measures.base import Rank, Reply, change, check_equal, latency_figures, random_bytes, warmup_of
from subjects.base import Bytes, Messenger, relay, time_round_trips

ACK_BYTES = 8


class MessageRank(Rank):
    def __init__(self, subject: Messenger, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        #: The array of `bandwidth`, kept from round to round: pages are touched once, an arena is asked once.
        self._large: Bytes | None = None
        for command in (self.pingpong, self.bandwidth, self.rate, self.ring, self.idle):
            self.commands[command.__name__] = command
        self.commands.update(
            read=self.exchange, write=self.exchange, large_read=self.bandwidth, large_write=self.bandwidth
        )

    def pingpong(self, nbytes: int, count: int) -> Reply:
        """Ranks 0 and 1 play; all others wait in a receive until rank 0 is done."""
        if self.rank > 1:
            return self._wait_for_release()
        data, into = random_bytes(nbytes), np.ones(nbytes, np.uint8)
        peer, warmup = 1 - self.rank, warmup_of(count)
        if self.rank == 1:
            self.subject.echo(peer, self.subject.buffer(into), warmup + count)
            check_equal(into, data)
            return {}
        out, back = self.subject.buffer(data), self.subject.buffer(into)
        self.subject.ping(peer, out, back, warmup)
        check_equal(into, data)
        began = time.perf_counter()
        samples = self.subject.ping(peer, out, back, count)
        seconds = time.perf_counter() - began
        self._release()
        return latency_figures(samples, seconds, nbytes)

    def exchange(self, nbytes: int, count: int) -> Reply:
        """What stands for a one-sided transfer: the question and the answer it would have to be."""
        return self.pingpong(self.subject.exchanged_bytes or nbytes, count)

    def bandwidth(self, nbytes: int, count: int) -> Reply:
        """Rank 0 sends when rank 1 is ready, and rank 1 acknowledges when the whole message lies in its memory."""
        token, total = self._token(), count + warmup_of(count)
        if self._large is None or self._large.nbytes != nbytes:
            self._large = self.subject.allocate(nbytes)
        if self.rank == 1:
            self._acknowledge_each(self._large, token, total)
            return {}
        self._large[:] = random_bytes(nbytes)
        message, send, recv = self.subject.buffer(self._large), self.subject.sender(1), self.subject.receiver(1)
        clock, samples = time.perf_counter_ns, []
        for _ in range(total):
            change(self._large)
            recv(token)
            began = clock()
            send(message)
            recv(token)
            samples.append(clock() - began)
        timed = samples[-count:]
        return {"gb_per_s": nbytes / float(np.median(timed)), "count": count, "seconds": sum(timed) / 1e9}

    def _acknowledge_each(self, into: Bytes, token: Any, total: int) -> None:
        expected = random_bytes(into.nbytes)
        buffer, send, recv = self.subject.buffer(into), self.subject.sender(0), self.subject.receiver(0)
        for _ in range(total):
            change(expected)
            send(token)
            recv(buffer)
            send(token)
            check_equal(into, expected)

    def rate(self, nbytes: int, count: int) -> Reply:
        """Rank 0 sends one message after the other; rank 1 acknowledges once, after the last."""
        data, into = random_bytes(nbytes), np.ones(nbytes, np.uint8)
        message, token = self.subject.buffer(data), self._token()
        peer, seconds = 1 - self.rank, 0.0
        for repeats in (warmup_of(count), count):
            if self.rank == 1:
                self.subject.receive_each(peer, self.subject.buffer(into), repeats)
                self.subject.sender(peer)(token)
                check_equal(into, data)
                into.fill(1)
            else:
                began = time.perf_counter()
                self.subject.send_each(peer, message, repeats)
                self.subject.receiver(peer)(token)
                seconds = time.perf_counter() - began
        return {} if self.rank == 1 else {"per_s": count / seconds, "count": count, "seconds": seconds}

    def ring(self, nbytes: int, count: int) -> Reply:
        """A message goes round all ranks, `count` times; the figure is a lap divided by its hops."""
        data, into = random_bytes(nbytes), np.ones(nbytes, np.uint8)
        out, buffer, warmup = self.subject.buffer(data), self.subject.buffer(into), warmup_of(count)
        send = self.subject.sender((self.rank + 1) % self.size)
        recv = self.subject.receiver((self.rank - 1) % self.size)
        if self.rank > 0:
            relay(recv, send, buffer, warmup + count)
            check_equal(into, data)
            return {}
        time_round_trips(send, recv, out, buffer, warmup)
        check_equal(into, data)
        began = time.perf_counter()
        samples = time_round_trips(send, recv, out, buffer, count)
        seconds = time.perf_counter() - began
        p50, p99 = (float(lap) / 1e3 / self.size for lap in np.percentile(samples, (50, 99)))
        return {"hop_us": p50, "hop_p99_us": p99, "count": count, "seconds": seconds}

    def idle(self, seconds: float) -> Reply:
        """Rank 0 talks to every other rank once, then does nothing; the others wait in a receive meanwhile."""
        token = self._token()
        if self.rank > 0:
            self.subject.receiver(0)(token)
            self.subject.sender(0)(token)
            return self._cpu_during(self._wait_for_release)
        for peer in range(1, self.size):
            self.subject.sender(peer)(token)
            self.subject.receiver(peer)(token)
        used = self._cpu_during(lambda: time.sleep(seconds))
        self._release(first=1)
        return used

    def _cpu_during(self, wait: Callable[[], object]) -> Reply:
        before, began = time.process_time(), time.perf_counter()
        wait()
        used, elapsed = time.process_time() - before, time.perf_counter() - began  # all threads, user and system
        return {"cpu_percent": 100 * used / elapsed, "seconds": elapsed}

    def _token(self) -> Any:
        return self.subject.buffer(np.ones(ACK_BYTES, np.uint8))

    def _release(self, first: int = 2) -> None:
        for peer in range(first, self.size):
            self.subject.sender(peer)(self._token())

    def _wait_for_release(self) -> Reply:
        self.subject.receiver(0)(self._token())
        return {}
