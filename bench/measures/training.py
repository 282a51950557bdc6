"""Steps of training: how long, how much of it is communication, and what losses they have.

A round begins from the same weights, so its losses are the same for every subject and every round. It has as many steps
without communication: what is left of the step's time when that is subtracted is what communication costs, be it
computing, copying or waiting. Those steps have a learning rate of zero, and the weights of all ranks stay equal.
"""

from __future__ import annotations

import time

from measures.base import Reply
from measures.meeting import MeetingRank
from subjects.base import Trainer

#: DDP cuts its buckets anew after the first step.
WARMUP = 2


class TrainingRank(MeetingRank):
    def __init__(self, subject: Trainer, rank: int, size: int) -> None:
        super().__init__(subject, rank, size)
        self.subject = subject
        self.commands["train"] = self.train

    def train(self, nbytes: int, count: int) -> Reply:
        """`nbytes`: of all gradients, for the report."""
        subject = self.subject
        assert nbytes == 4 * subject.parameters, f"the table says {nbytes} bytes"
        subject.reset(learning=True)
        for number in range(WARMUP):
            subject.step(number)
        subject.reset(learning=True)
        losses, together = self._timed(count)
        subject.reset(learning=False)
        with subject.alone():
            _, alone = self._timed(count)
        slowest, computing = (max(each) for each in zip(*self.meeting.exchange((together, alone)), strict=True))
        return {
            "step_ms": slowest / count * 1e3,
            "computing_ms": computing / count * 1e3,
            "communication_ms": (slowest - computing) / count * 1e3,
            "losses": losses,
            "count": count,
            "seconds": slowest + computing,
        }

    def _timed(self, count: int) -> tuple[list[float], float]:
        self.meeting.exchange(None)
        began = time.perf_counter()
        losses = [self.subject.step(number) for number in range(count)]
        return losses, time.perf_counter() - began
