"""Credit: a sender and a receiver in any interleaving, and every way in which a peer may cheat."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rankmesh.errors import ProtocolError
from rankmesh.wire.credit import BATCH, OVERHEAD, CreditIn, CreditOut, Lane, batch
from rankmesh.wire.header import CONTROL_LIMIT

ENTRY = struct.Struct("<IqQ")


def credit_frame(*entries: tuple[int, int, int]) -> memoryview:
    return memoryview(b"".join(ENTRY.pack(*entry) for entry in entries))


def total(messages: Iterable[tuple[Lane, int]]) -> int:
    return sum(cost for _, cost in messages)


LANES = st.sampled_from([*((n % 2, n) for n in range(8)), (2**32 - 1, 2**63 - 1), (2**32 - 1, -(2**63))])


class CreditMachine(RuleBasedStateMachine):
    """Messages and credit frames are in order each way, and anything may happen between two of them."""

    @initialize(lane_limit=st.sampled_from([256, 257, 511, 512, 600, 1000, 4096]), quarters=st.integers(4, 20))
    def connect(self, lane_limit: int, quarters: int) -> None:
        peer_limit = lane_limit * quarters // 4
        self.sender = CreditOut(lane_limit, peer_limit)
        self.receiver = CreditIn(lane_limit, peer_limit)
        self.eager_bytes = lane_limit // 2  # the most that Config allows
        self.sent: deque[tuple[Lane, int]] = deque()
        self.unexpected: list[tuple[Lane, int]] = []
        self.credit: deque[bytes] = deque()

    @rule(lane=LANES, eighths=st.integers(0, 8), count=st.sampled_from([1, 2, 40]))
    def send(self, lane: Lane, eighths: int, count: int) -> None:
        cost = self.eager_bytes * eighths // 8 + OVERHEAD
        for _ in range(count):
            before = self.sender.used, dict(self.sender.lanes)
            full = self.sender.lane_full(lane, cost)
            assert full is (self.sender.lanes.get(lane, 0) + cost > self.sender.lane_limit)
            if not self.sender.take(lane, cost):  # it waits, or is announced instead: both must cost nothing
                assert (self.sender.used, self.sender.lanes) == before
                return
            assert not full
            self.sent.append((lane, cost))

    @precondition(lambda self: self.sent)
    @rule()
    def cancel_the_last(self) -> None:
        self.sender.give_back(*self.sent.pop())

    @rule(count=st.integers(1, 8))
    def messages_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.sent))):
            lane, cost = self.sent.popleft()
            self.receiver.arrived(cost)
            self.unexpected.append((lane, cost))

    @rule(count=st.integers(1, 8))
    def messages_find_their_receives(self, count: int) -> None:
        for _ in range(min(count, len(self.sent))):
            lane, cost = self.sent.popleft()
            if self.receiver.passed(lane, cost):
                self.credit.extend(self.receiver.pay())

    @rule(first=st.integers(0, 99), count=st.integers(1, 8))
    def messages_are_received(self, first: int, count: int) -> None:
        for _ in range(min(count, len(self.unexpected))):
            lane, cost = self.unexpected.pop(first % len(self.unexpected))
            if self.receiver.consumed(lane, cost):
                self.credit.extend(self.receiver.pay())

    @rule()
    def receiver_pays_before_it_is_due(self) -> None:
        self.credit.extend(self.receiver.pay())
        assert (self.receiver.owed, self.receiver.total_owed) == ({}, 0)

    @precondition(lambda self: self.credit)
    @rule()
    def credit_arrives(self) -> None:
        self.sender.returned(memoryview(self.credit.popleft()))

    @rule()
    def everything_is_received(self) -> None:
        """The promise: whoever waits for credit, and whose messages have all been received, can send again."""
        self.messages_arrive(len(self.sent))
        self.messages_are_received(0, len(self.unexpected))
        while self.credit:
            self.credit_arrives()
        cost = self.eager_bytes + OVERHEAD
        for lane in [*self.sender.lanes, (0, 99)]:
            assert self.sender.take(lane, cost), f"stuck with {self.sender.used} outstanding"
            self.sender.give_back(lane, cost)

    @invariant()
    def the_sender_keeps_its_limits(self) -> None:
        assert 0 <= self.sender.used <= self.sender.peer_limit
        assert all(0 < outstanding <= self.sender.lane_limit for outstanding in self.sender.lanes.values())
        assert self.sender.used == sum(self.sender.lanes.values())

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        returning = sum(amount for frame in self.credit for _, _, amount in ENTRY.iter_unpack(frame))
        assert self.receiver.total_owed == sum(self.receiver.owed.values())
        assert self.receiver.outstanding == total(self.unexpected) + self.receiver.total_owed
        assert self.sender.used == total(self.sent) + self.receiver.outstanding + returning

    @invariant()
    def what_is_due_is_paid(self) -> None:
        assert self.receiver.total_owed < self.sender.peer_limit // 4
        assert all(owed < self.sender.lane_limit // 4 for owed in self.receiver.owed.values())

    @invariant()
    def finished_lanes_cost_nothing(self) -> None:
        outstanding = {lane for lane, _ in [*self.sent, *self.unexpected]} | set(self.receiver.owed)
        outstanding |= {(group, tag) for frame in self.credit for group, tag, _ in ENTRY.iter_unpack(frame)}
        assert set(self.sender.lanes) == outstanding


CreditMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCredit = CreditMachine.TestCase


def test_a_message_costs_more_than_its_bytes() -> None:
    """Empty messages are bounded too: each costs OVERHEAD."""
    sender = CreditOut(lane_limit=10 * OVERHEAD, peer_limit=10 * OVERHEAD)
    assert [sender.take((0, 0), OVERHEAD) for _ in range(11)] == [True] * 10 + [False]


def test_a_full_lane_leaves_the_others_their_credit() -> None:
    sender = CreditOut(lane_limit=1000, peer_limit=2500)
    assert sender.take((0, 1), 1000)
    assert not sender.take((0, 1), 1)
    assert sender.take((0, 2), 1000)
    assert not sender.take((1, 1), 501)
    assert sender.take((1, 1), 500)
    assert (sender.used, sender.lanes) == (2500, {(0, 1): 1000, (0, 2): 1000, (1, 1): 500})


def test_the_receiver_pays_in_batches() -> None:
    receiver = CreditIn(lane_limit=1000, peer_limit=2000)
    receiver.arrived(1000)
    assert receiver.consumed((0, 1), 200) is False
    assert receiver.consumed((0, 2), 200) is False
    assert receiver.consumed((0, 1), 50) is True  # a quarter of the lane's
    assert receiver.pay() == [credit_frame((0, 1, 250), (0, 2, 200)).tobytes()]
    assert receiver.outstanding == 550
    for tag in range(4):
        assert receiver.consumed((0, tag), 120) is False
    assert receiver.consumed((0, 9), 20) is True  # a quarter of the peer's
    assert receiver.pay()
    assert receiver.pay() == []


def test_a_hundred_thousand_finished_tags_leave_nothing_behind() -> None:
    peer_limit = 1 << 20
    sender, receiver = CreditOut(1 << 16, peer_limit), CreditIn(1 << 16, peer_limit)
    for tag in range(100_000):
        assert sender.take((1, tag), OVERHEAD)
        receiver.arrived(OVERHEAD)
        if receiver.consumed((1, tag), OVERHEAD):
            for payload in receiver.pay():
                sender.returned(memoryview(payload))
        assert len(receiver.owed) <= len(sender.lanes) <= peer_limit // 4 // OVERHEAD
    for payload in receiver.pay():
        sender.returned(memoryview(payload))
    assert (sender.used, sender.lanes, receiver.outstanding, receiver.owed) == (0, {}, 0, {})


def test_credit_for_more_lanes_than_fit_into_a_frame() -> None:
    lanes = 10_000
    sender, receiver = CreditOut(OVERHEAD, lanes * OVERHEAD), CreditIn(1 << 40, 1 << 40)
    for tag in range(lanes):
        assert sender.take((0, tag), OVERHEAD)
        receiver.arrived(OVERHEAD)
        receiver.consumed((0, tag), OVERHEAD)
    payloads = receiver.pay()
    assert len(payloads) == 4
    assert max(map(len, payloads)) <= CONTROL_LIMIT
    for payload in payloads:
        sender.returned(memoryview(payload))
    assert (sender.used, sender.lanes) == (0, {})


@pytest.mark.parametrize(
    "frame, reason",
    [
        pytest.param(credit_frame((0, 1, 501)), "credit overflow", id="one too much"),
        pytest.param(credit_frame((0, 1, 2**64 - 1)), "credit overflow", id="huge"),
        pytest.param(credit_frame((0, 2, 1)), "credit overflow", id="another tag"),
        pytest.param(credit_frame((1, 1, 1)), "credit overflow", id="another group"),
        pytest.param(credit_frame((0, 1, 300), (0, 1, 201)), "credit overflow", id="twice"),
        pytest.param(credit_frame((0, 1, 500), (0, 1, 1)), "credit overflow", id="after the last"),
        pytest.param(credit_frame((0, 1, 1))[:-1], "malformed credit", id="cut off"),
        pytest.param(memoryview(b"\0"), "malformed credit", id="one byte"),
    ],
)
def test_credit_that_was_never_spent_is_refused(frame: memoryview, reason: str) -> None:
    sender = CreditOut(lane_limit=1000, peer_limit=1000)
    sender.take((0, 1), 500)
    with pytest.raises(ProtocolError) as refused:
        sender.returned(frame)
    assert refused.value.reason == reason
    assert 0 <= sender.used <= 500
    assert sender.used == sum(sender.lanes.values())


@pytest.mark.parametrize("frame", [credit_frame(), credit_frame((0, 1, 0)), credit_frame((7, 7, 0))])
def test_credit_of_nothing_changes_nothing(frame: memoryview) -> None:
    sender = CreditOut(lane_limit=1000, peer_limit=1000)
    sender.take((0, 1), 500)
    sender.returned(frame)
    assert (sender.used, sender.lanes) == (500, {(0, 1): 500})


def test_a_sender_without_credit_is_refused() -> None:
    receiver = CreditIn(lane_limit=1000, peer_limit=1000)
    receiver.arrived(600)
    receiver.arrived(400)
    with pytest.raises(ProtocolError) as refused:
        receiver.arrived(1)
    assert refused.value.reason == "credit exceeded"
    assert "1001" in str(refused.value)
    assert "1000" in str(refused.value)


def test_a_sender_without_credit_is_refused_although_a_receive_waits() -> None:
    receiver = CreditIn(lane_limit=1000, peer_limit=1000)
    assert receiver.passed((0, 0), 249) is False
    assert receiver.passed((0, 0), 1) is True
    assert (receiver.outstanding, receiver.owed, receiver.total_owed) == (250, {(0, 0): 250}, 250)
    with pytest.raises(ProtocolError) as refused:
        receiver.passed((0, 0), 751)
    assert refused.value.reason == "credit exceeded"


def test_received_but_unpaid_credit_still_counts_against_the_sender() -> None:
    """It was not told yet, so it cannot have spent it again: who does, cheats."""
    receiver = CreditIn(lane_limit=1000, peer_limit=1000)
    receiver.arrived(1000)
    assert receiver.consumed((0, 0), 200) is False
    with pytest.raises(ProtocolError, match="1200"):
        receiver.arrived(200)


@pytest.mark.parametrize("lane_limit", [1025 + 2, 3 * 1024, 64 * 1024, 1024 * 1024])
@pytest.mark.parametrize("nbytes", [0, 64, 1000, 30_000])
def test_batches_never_hold_back_what_a_lane_needs(lane_limit: int, nbytes: int) -> None:
    """A sender that spends in advance and a receiver that accounts later: when all that was sent was received, the
    largest message may still be sent in the same lane, at any moment of either side's batch."""
    lane, cost = (0, 7), nbytes + OVERHEAD
    largest = (lane_limit - 1024) // 2 + OVERHEAD  # what Config allows
    if cost > largest:
        return
    sender, receiver = CreditOut(lane_limit, lane_limit), CreditIn(lane_limit, lane_limit)
    prepaid = unsettled = 0
    for _ in range(5 * BATCH + 3):
        if not prepaid:
            prepaid = sender.take_batch(lane, cost)
            assert prepaid
        prepaid -= 1
        unsettled += 1
        if unsettled >= batch(lane_limit, cost):
            if receiver.passed(lane, unsettled * cost):
                for payload in receiver.pay():
                    sender.returned(memoryview(payload))
            unsettled = 0
        assert sender.take(lane, largest)
        sender.give_back(lane, largest)


def test_a_batch_is_small_beside_its_lane() -> None:
    for lane_limit in (1, 1024, 1 << 20):
        for cost in (OVERHEAD, 1000, 1 << 16):
            many = batch(lane_limit, cost)
            assert many == 1 or (many <= BATCH and many * cost <= lane_limit // BATCH)
