"""The handshake: what it takes to get in, and everything that does not suffice."""

from __future__ import annotations

import ast
import contextlib
import hmac
import inspect
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankmesh.errors import ConnectError, InternalError, ProtocolError, RankmeshError
from rankmesh.wire import handshake
from rankmesh.wire.handshake import LONGEST, MAGIC, NONCE_BYTES, Handshake, Refusal, Refused, Type
from rankmesh.wire.header import VERSION
from rankmesh.wire.messages import Identity

TOKEN = "one token for all"
PREFIX_BYTES = 8


def make_identity(name: str, **changes: Any) -> Identity:
    plain = Identity(
        uid=name.encode().ljust(16, b"."),
        name=name,
        host="here",
        pid=1,
        eager_bytes=1 << 16,
        lane_credit=1 << 20,
        peer_credit=1 << 24,
        max_message=1 << 32,
        max_rpc=1 << 30,
    )
    return msgspec.structs.replace(plain, **changes)


ALICE = make_identity("alice", rank=0, addresses=("tcp://10.0.0.1:7000",))
BOB = make_identity("bob", rank=1, run="run-7", allow_pickle=True)


def nonce(letter: str) -> bytes:
    return letter.encode() * NONCE_BYTES


@dataclass
class Conversation:
    """Both sides, and every message as it travelled. `tamper` gets each message's type and bytes before it arrives."""

    token: str = TOKEN
    acceptor_token: str = TOKEN
    nonces: tuple[bytes, bytes] = (nonce("a"), nonce("b"))
    tamper: Callable[[Type, bytes], bytes] = lambda kind, message: message
    messages: dict[Type, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.initiator = Handshake(initiator=True, token=self.token, identity=ALICE, nonce=self.nonces[0])
        self.acceptor = Handshake(initiator=False, token=self.acceptor_token, identity=BOB, nonce=self.nonces[1])

    def deliver(self, kind: Type, message: bytes, to: Handshake) -> bytes:
        self.messages[kind] = message
        return feed(to, self.tamper(kind, message))

    def run(self) -> None:
        challenge = self.deliver(Type.HELLO, self.initiator.start(), self.acceptor)
        auth = self.deliver(Type.CHALLENGE, challenge, self.initiator)
        assert self.deliver(Type.AUTH, auth, self.acceptor) == b""
        if not self.acceptor.undecided:
            raise EOFError(f"the acceptor waits for {self.acceptor.wanted} more bytes")
        assert self.deliver(Type.WELCOME, self.acceptor.accept(), self.initiator) == b""
        if not self.initiator.done:
            raise EOFError(f"the initiator waits for {self.initiator.wanted} more bytes")


def feed(side: Handshake, stream: bytes) -> bytes:
    """Give a side what it wants, as long as there is that much. What it answers."""
    answer = b""
    while side.wanted and len(stream) >= side.wanted:
        piece, stream = stream[: side.wanted], stream[side.wanted :]
        answer += side.receive(piece)
    if stream:
        raise EOFError(f"{len(stream)} bytes are left over, {side.wanted} were wanted")
    return answer


def finished() -> Conversation:
    conversation = Conversation()
    conversation.run()
    return conversation


def message(kind: int, body: bytes, code: int = 0, magic: bytes = MAGIC) -> bytes:
    return struct.pack("<4sBBH", magic, kind, code, len(body)) + body


def prefix(kind: int, length: int, code: int = 0) -> bytes:
    return struct.pack("<4sBBH", MAGIC, kind, code, length)


def proof(role: bytes, identity: bytes, offered: tuple[int, int] = (VERSION, VERSION)) -> bytes:
    """The body of an AUTH or WELCOME between ALICE and BOB: from the description, not by the code under test."""
    uids_and_nonces = ALICE.uid + nonce("a") + BOB.uid + nonce("b")
    proved = b"rankmesh " + role + bytes([*offered, VERSION]) + uids_and_nonces + identity
    return hmac.digest(TOKEN.encode(), proved, "sha256") + identity


# --- the way in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, "", "漢字 \0", "x" * 10_000])
def test_both_sides_prove_themselves(token: str) -> None:
    conversation = Conversation(token, token)
    conversation.run()
    assert conversation.initiator.done is True
    assert conversation.acceptor.done is True
    assert conversation.initiator.remote == BOB
    assert conversation.acceptor.remote == ALICE
    assert conversation.initiator.wanted == conversation.acceptor.wanted == 0


def test_states_on_the_way() -> None:
    pair = Conversation()
    assert (pair.acceptor.remote_uid, pair.acceptor.remote) == (None, None)
    challenge = feed(pair.acceptor, pair.initiator.start())
    assert (pair.acceptor.remote_uid, pair.acceptor.remote) == (ALICE.uid, None)
    auth = feed(pair.initiator, challenge)
    assert (pair.initiator.remote_uid, pair.initiator.remote) == (BOB.uid, None)
    feed(pair.acceptor, auth)
    assert (pair.acceptor.remote, pair.acceptor.undecided, pair.acceptor.done) == (ALICE, True, False)
    assert pair.acceptor.wanted == 0
    pair.acceptor.accept()
    assert (pair.acceptor.undecided, pair.acceptor.done) == (False, True)
    assert (pair.initiator.done, pair.initiator.remote) == (False, None)


def test_the_messages_on_the_wire() -> None:
    """Pinned."""
    messages = finished().messages
    assert messages[Type.HELLO] == message(1, bytes([VERSION, VERSION]) + ALICE.uid + nonce("a"))
    assert messages[Type.CHALLENGE] == message(2, BOB.uid + nonce("b"), code=VERSION)
    assert messages[Type.AUTH] == message(3, proof(b"initiator", msgspec.msgpack.encode(ALICE)))
    assert messages[Type.WELCOME] == message(4, proof(b"acceptor", msgspec.msgpack.encode(BOB)))


def test_the_first_frame_is_left_for_the_frame_parser() -> None:
    pair = Conversation()
    challenge = feed(pair.acceptor, pair.initiator.start())
    feed(pair.acceptor, feed(pair.initiator, challenge))
    with pytest.raises(EOFError, match="11 bytes are left over, 0 were wanted"):
        feed(pair.initiator, pair.acceptor.accept() + b"first frame")
    assert pair.initiator.done


def test_a_stranger_is_shown_nothing_but_uid_and_nonce() -> None:
    answer = feed(Conversation().acceptor, Conversation().initiator.start())
    assert answer[PREFIX_BYTES:] == BOB.uid + nonce("b")


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_nonce_has_its_length(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Handshake(initiator=True, token="", identity=ALICE, nonce=bytes(length))


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "initiator, acceptor",
    [(TOKEN, "another"), (TOKEN, ""), ("", TOKEN), (TOKEN, TOKEN + "\n"), (TOKEN, TOKEN[:-1]), (TOKEN, TOKEN.upper())],
)
def test_another_token_is_refused(initiator: str, acceptor: str) -> None:
    conversation = Conversation(initiator, acceptor)
    with pytest.raises(Refused) as refused:
        conversation.run()
    assert refused.value.code == Refusal.TOKEN
    assert isinstance(refused.value, ConnectError)
    assert refused.value.reason == "wrong or missing token"
    assert str(refused.value).endswith("RANKMESH_TOKEN).")
    for secret in {TOKEN, initiator, acceptor} - {""}:
        assert secret not in str(refused.value)
    assert conversation.acceptor.remote is None
    assert not conversation.acceptor.undecided


def test_an_acceptor_without_the_token_is_not_believed() -> None:
    """An impostor that lets everybody in, whatever they prove: the initiator does not fall for it."""
    encoded = msgspec.msgpack.encode(BOB)
    for proof in (bytes(32), hmac.digest(b"guess", encoded, "sha256"), nonce("a")):
        initiator = Conversation().initiator
        feed(initiator, message(Type.CHALLENGE, BOB.uid + nonce("b"), VERSION))
        with pytest.raises(Refused) as refused:
            feed(initiator, message(Type.WELCOME, proof + encoded))
        assert refused.value.code == Refusal.TOKEN
        assert (initiator.done, initiator.remote) == (False, None)


def test_an_identity_is_not_decoded_before_its_proof_was_found_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(_: bytes) -> Identity:
        raise AssertionError("decoded a stranger's bytes")

    monkeypatch.setattr(handshake, "decode_identity", decoded)
    with pytest.raises(Refused):
        Conversation(TOKEN, "another").run()
    with pytest.raises(AssertionError, match="stranger"):
        Conversation().run()


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((bytes(first), bytes(second)))
        return first == second

    monkeypatch.setattr(hmac, "compare_digest", compare)
    messages = finished().messages
    proofs = [messages[kind][PREFIX_BYTES : PREFIX_BYTES + 32] for kind in (Type.AUTH, Type.WELCOME)]
    assert compared == [(proof, proof) for proof in proofs]


def test_no_other_comparison_touches_a_proof() -> None:
    names_of_proofs = {"mac", "_mac", "digest"}
    for node in ast.walk(ast.parse(inspect.getsource(handshake))):
        if isinstance(node, ast.Compare):
            named = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            named |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            assert not named & names_of_proofs, f"line {node.lineno} compares a proof with an operator"


# --- tampering --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Type.HELLO, Type.CHALLENGE, Type.AUTH, Type.WELCOME])
def test_every_flipped_bit_is_noticed(kind: Type) -> None:
    untouched = finished().messages[kind]
    for bit in range(8 * len(untouched)):
        flipped = bytearray(untouched)
        flipped[bit // 8] ^= 1 << bit % 8

        def flip(which: Type, text: bytes, flipped: bytes = bytes(flipped)) -> bytes:
            return flipped if which is kind else text

        conversation = Conversation(tamper=flip)
        with pytest.raises((ProtocolError, Refused, EOFError)):
            conversation.run()
        assert not conversation.initiator.done, f"bit {bit}"
        assert conversation.initiator.remote is None
        if kind is not Type.WELCOME:  # then the acceptor has said its yes, and cannot know that it was not heard
            assert conversation.acceptor.remote is None
            assert not conversation.acceptor.undecided


@pytest.mark.parametrize("kind", [Type.HELLO, Type.CHALLENGE, Type.AUTH, Type.WELCOME])
def test_a_message_cut_short_is_waited_for(kind: Type) -> None:
    for cut in range(len(finished().messages[kind])):
        pair = Conversation()
        steps: dict[Type, bytes] = finished().messages
        receiver = pair.acceptor if kind in (Type.HELLO, Type.AUTH) else pair.initiator
        for earlier in (Type.HELLO, Type.CHALLENGE):
            if earlier < kind and (earlier is Type.HELLO) is (receiver is pair.acceptor):
                feed(receiver, steps[earlier])
        try:
            feed(receiver, steps[kind][:cut])
        except EOFError:
            pass  # fewer bytes are there than the side wants
        assert receiver.wanted > 0
        assert receiver.done is receiver.undecided is False


def test_a_recorded_auth_is_worth_nothing_to_another_nonce() -> None:
    recorded = finished().messages
    fresh = Handshake(initiator=False, token=TOKEN, identity=BOB, nonce=nonce("c"))
    feed(fresh, recorded[Type.HELLO])
    with pytest.raises(Refused) as refused:
        feed(fresh, recorded[Type.AUTH])
    assert refused.value.code == Refusal.TOKEN


def test_a_recorded_welcome_is_worth_nothing_to_another_nonce() -> None:
    recorded = finished().messages
    fresh = Handshake(initiator=True, token=TOKEN, identity=ALICE, nonce=nonce("c"))
    feed(fresh, recorded[Type.CHALLENGE])
    with pytest.raises(Refused):
        feed(fresh, recorded[Type.WELCOME])
    assert not fresh.done


def test_a_recorded_auth_is_worth_nothing_to_another_acceptor() -> None:
    """The same nonce by accident, but another uid: the proof says for whom it was made."""
    recorded = finished().messages
    other = Handshake(initiator=False, token=TOKEN, identity=make_identity("carol"), nonce=nonce("b"))
    feed(other, recorded[Type.HELLO])
    with pytest.raises(Refused):
        feed(other, recorded[Type.AUTH])


@pytest.mark.parametrize("same_nonce", [False, True])
def test_an_acceptor_does_not_believe_its_own_proof(same_nonce: bool) -> None:
    """Reflection: a stranger opens a connection as the acceptor itself, and sends back what that one says."""
    acceptor = Conversation().acceptor
    reflected_nonce = nonce("b") if same_nonce else nonce("x")
    challenge = feed(acceptor, message(Type.HELLO, bytes([VERSION, VERSION]) + BOB.uid + reflected_nonce))
    with pytest.raises(ProtocolError, match="out of turn"):
        feed(acceptor, challenge)

    # its WELCOME to somebody else, given back as AUTH
    welcome = finished().messages[Type.WELCOME]
    acceptor = Conversation().acceptor
    feed(acceptor, message(Type.HELLO, bytes([VERSION, VERSION]) + BOB.uid + reflected_nonce))
    with pytest.raises(Refused):
        feed(acceptor, message(Type.AUTH, welcome[PREFIX_BYTES:]))


def test_an_initiator_does_not_believe_its_own_proof() -> None:
    """A stranger without the token accepts the connection, echoes uid and nonce, and gives the AUTH back as WELCOME."""
    initiator = Conversation().initiator
    hello = initiator.start()
    auth = feed(initiator, message(Type.CHALLENGE, hello[PREFIX_BYTES + 2 :], VERSION))
    with pytest.raises(Refused):
        feed(initiator, message(Type.WELCOME, auth[PREFIX_BYTES:]))
    assert (initiator.done, initiator.remote) == (False, None)


def test_an_identity_with_another_uid_than_announced_is_refused() -> None:
    """Of one who knows the token, and so can prove it."""
    pair = Conversation()
    feed(pair.acceptor, pair.initiator.start())
    mallory = msgspec.msgpack.encode(make_identity("mallory"))
    with pytest.raises(ProtocolError) as refused:
        feed(pair.acceptor, message(Type.AUTH, proof(b"initiator", mallory)))
    assert refused.value.reason == "identity mismatch"
    assert pair.acceptor.remote is None
    assert not pair.acceptor.undecided


# --- order, lengths, versions -----------------------------------------------------------------------------------------

FIRST_PREFIX = {Type.HELLO: 50, Type.CHALLENGE: 48, Type.AUTH: 100, Type.WELCOME: 100, Type.REFUSE: 5}


def at_start(initiator: bool) -> Handshake:
    pair = Conversation()
    return pair.initiator if initiator else pair.acceptor


def after_first(initiator: bool) -> Handshake:
    pair = Conversation()
    challenge = feed(pair.acceptor, pair.initiator.start())
    feed(pair.initiator, challenge)
    return pair.initiator if initiator else pair.acceptor


@pytest.mark.parametrize(
    "state, initiator, expected",
    [
        (at_start, True, {Type.CHALLENGE, Type.REFUSE}),
        (at_start, False, {Type.HELLO}),
        (after_first, True, {Type.WELCOME, Type.REFUSE}),
        (after_first, False, {Type.AUTH}),
    ],
)
def test_messages_out_of_turn_are_refused_on_their_prefix(
    state: Callable[[bool], Handshake], initiator: bool, expected: set[Type]
) -> None:
    for kind in (0, *Type, 6, 255):
        side = state(initiator)
        length = FIRST_PREFIX.get(Type(kind), 0) if kind in set(Type) else 0
        if kind in expected:
            assert side.receive(prefix(kind, length)) == b""
            assert side.wanted == length
            continue
        with pytest.raises(ProtocolError) as refused:
            side.receive(prefix(kind, length))
        assert refused.value.reason == "handshake out of turn"


@pytest.mark.parametrize(
    "state, initiator, kind, shortest, longest",
    [
        (at_start, False, Type.HELLO, 50, 50),
        (at_start, True, Type.CHALLENGE, 48, 96),
        (after_first, False, Type.AUTH, 32, 32 + 4096),
        (after_first, True, Type.WELCOME, 32, 32 + 4096),
        (at_start, True, Type.REFUSE, 0, 512),
        (after_first, True, Type.REFUSE, 0, 512),
    ],
)
def test_lengths_are_refused_on_the_prefix_alone(
    state: Callable[[bool], Handshake],
    initiator: bool,
    kind: Type,
    shortest: int,
    longest: int,
    peak_bytes: Callable[[], int],
) -> None:
    assert longest + PREFIX_BYTES <= LONGEST
    for length in {shortest, longest} - {0}:
        side = state(initiator)
        side.receive(prefix(kind, length))
        assert side.wanted == length
    for length in {max(shortest - 1, 0), longest + 1, 65535} - {shortest}:
        side = state(initiator)
        peak_bytes()
        with pytest.raises(ProtocolError) as refused:
            side.receive(prefix(kind, length))
        assert peak_bytes() < 32 * 1024
        assert refused.value.reason == "handshake message of a wrong length"


@pytest.mark.parametrize(
    "state, initiator, kind",
    [(at_start, False, Type.HELLO), (after_first, False, Type.AUTH), (after_first, True, Type.WELCOME)],
)
@pytest.mark.parametrize("code", [1, 128, 255])
def test_a_code_where_none_is_defined_is_refused_on_the_prefix(
    state: Callable[[bool], Handshake], initiator: bool, kind: Type, code: int
) -> None:
    with pytest.raises(ProtocolError, match=f"a {kind.name} message with code {code}") as refused:
        state(initiator).receive(prefix(kind, FIRST_PREFIX[kind], code))
    assert refused.value.reason == "unknown handshake code"


def test_nothing_is_taken_once_it_is_decided_or_done() -> None:
    pair = finished()
    waiting = Conversation()
    feed(waiting.acceptor, feed(waiting.initiator, feed(waiting.acceptor, waiting.initiator.start())))
    assert waiting.acceptor.undecided
    for side in (pair.initiator, pair.acceptor, waiting.acceptor):
        assert side.wanted == 0
        for kind in Type:
            with pytest.raises(ProtocolError) as refused:
                side.receive(prefix(kind, FIRST_PREFIX[kind]))
            assert refused.value.reason == "handshake out of turn"
    assert waiting.acceptor.undecided  # still to be accepted or refused
    assert (pair.initiator.remote, pair.acceptor.remote, waiting.acceptor.remote) == (BOB, ALICE, ALICE)


@pytest.mark.parametrize("state", [at_start, after_first])
@pytest.mark.parametrize("initiator", [True, False])
def test_nobody_is_accepted_who_has_not_proved_itself(state: Callable[[bool], Handshake], initiator: bool) -> None:
    side = state(initiator)
    with pytest.raises(InternalError, match="before the initiator proved itself"):
        side.accept()
    assert (side.done, side.remote) == (False, None)


def test_nobody_is_accepted_after_a_wrong_proof_or_twice() -> None:
    impostor = Conversation("guess", TOKEN)
    with pytest.raises(Refused):
        impostor.run()
    for acceptor in (impostor.acceptor, finished().acceptor):
        with pytest.raises(InternalError, match="before the initiator proved itself"):
            acceptor.accept()
    assert not impostor.acceptor.done


@pytest.mark.parametrize("initiator", [True, False])
@pytest.mark.parametrize(
    "garbage",
    [b"GET / HT", b"\x16\x03\x01\x02\x00\x01\x00\x01", bytes(8), b"\xff" * 8, b"rmsh\x01\x00\x32\x00", b"SSH-2.0-"],
)
def test_what_does_not_speak_rankmesh_is_refused_after_eight_bytes(initiator: bool, garbage: bytes) -> None:
    side = at_start(initiator)
    assert side.wanted == PREFIX_BYTES
    with pytest.raises(ProtocolError) as refused:
        side.receive(garbage)
    assert refused.value.reason == "not a rankmesh handshake"


@pytest.mark.parametrize(
    "lowest, highest, fits",
    [
        (1, 1, True),
        (0, 1, True),
        (1, 2, True),
        (0, 255, True),
        (2, 2, False),
        (2, 255, False),
        (0, 0, False),
        (2, 1, False),
    ],
)
def test_ranges_of_versions(lowest: int, highest: int, fits: bool) -> None:
    acceptor = Conversation().acceptor
    hello = message(Type.HELLO, bytes([lowest, highest]) + ALICE.uid + nonce("a"))
    if fits:
        assert feed(acceptor, hello)[5] == VERSION
        return
    with pytest.raises(Refused) as refused:
        feed(acceptor, hello)
    assert refused.value.code == Refusal.VERSION
    assert f"versions {lowest} to {highest}" in str(refused.value)


@pytest.mark.parametrize("offered", [(1, 1), (0, 1), (1, 2), (0, 255)])
@pytest.mark.parametrize("arrived", [(1, 1), (0, 1), (1, 2), (0, 255)])
def test_a_downgrade_is_noticed(offered: tuple[int, int], arrived: tuple[int, int]) -> None:
    """One in between narrows (or widens) the offered versions: the proof covers what was really offered."""
    encoded = msgspec.msgpack.encode(ALICE)
    acceptor = Conversation().acceptor
    feed(acceptor, message(Type.HELLO, bytes(arrived) + ALICE.uid + nonce("a")))
    auth = message(Type.AUTH, proof(b"initiator", encoded, offered))
    if offered == arrived:
        feed(acceptor, auth)
        assert acceptor.remote == ALICE
        # and the acceptor proves which versions it was offered, so that the initiator can notice it too
        assert acceptor.accept() == message(Type.WELCOME, proof(b"acceptor", msgspec.msgpack.encode(BOB), offered))
        return
    with pytest.raises(Refused) as refused:
        feed(acceptor, auth)
    assert refused.value.code == Refusal.TOKEN
    assert (acceptor.remote, acceptor.undecided) == (None, False)


@pytest.mark.parametrize("arrived", [(0, 1), (1, 2), (0, 255)])
def test_an_initiator_does_not_believe_an_acceptor_that_was_offered_other_versions(arrived: tuple[int, int]) -> None:
    """An acceptor that checks nothing, but is honest about what it was offered."""
    initiator = Conversation().initiator
    feed(initiator, message(Type.CHALLENGE, BOB.uid + nonce("b"), VERSION))
    with pytest.raises(Refused):
        feed(initiator, message(Type.WELCOME, proof(b"acceptor", msgspec.msgpack.encode(BOB), arrived)))
    assert (initiator.done, initiator.remote) == (False, None)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_a_version_that_was_not_offered_is_refused(version: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        feed(Conversation().initiator, message(Type.CHALLENGE, BOB.uid + nonce("b"), version))
    assert refused.value.reason == "protocol version"


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initiator", [True, False])
def test_an_identity_too_large_to_travel_is_this_sides_error(initiator: bool) -> None:
    large = make_identity("large", addresses=tuple("x" * 200 for _ in range(32)))
    pair = Conversation()
    if initiator:
        pair.initiator.identity = large
    else:
        pair.acceptor.identity = large
    with pytest.raises(RankmeshError, match=r"identity has 6\d+ bytes"):
        pair.run()
    assert not pair.initiator.done


def test_the_largest_identity_travels() -> None:
    addresses = tuple("x" * 430 for _ in range(8))
    spare = 4096 - len(msgspec.msgpack.encode(make_identity("alice", addresses=addresses, run="x" * 300)))
    pair = Conversation()
    pair.initiator.identity = make_identity("alice", addresses=addresses, run="x" * (300 + spare))
    pair.run()
    assert len(pair.messages[Type.AUTH]) == LONGEST
    assert pair.acceptor.remote == pair.initiator.identity


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(msgspec.msgpack.encode({"uid": ALICE.uid}), id="fields missing"),
        pytest.param(msgspec.msgpack.encode(ALICE) + b"\x00", id="trailing"),
        pytest.param(msgspec.msgpack.encode(ALICE).replace(b"here", b"\xff\xfe\xfd\xfc"), id="not UTF-8"),
        pytest.param(b"\x81\xa1z" + b"\x91" * 4000, id="nested"),
        pytest.param(msgspec.msgpack.encode(ALICE).replace(b"here", b"\x1b[2J"), id="not printable"),
        pytest.param(msgspec.msgpack.encode(msgspec.structs.asdict(ALICE) | {"lane_credit": 1 << 16}), id="no credit"),
    ],
)
def test_a_proved_identity_that_is_malformed_is_refused(identity: bytes) -> None:
    pair = Conversation()
    feed(pair.acceptor, pair.initiator.start())
    with pytest.raises(ProtocolError) as refused:
        feed(pair.acceptor, message(Type.AUTH, proof(b"initiator", identity)))
    assert refused.value.reason == "malformed identity"
    assert not pair.acceptor.undecided


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*Refusal, 0, 99, 255])
@pytest.mark.parametrize("state", [at_start, after_first])
def test_a_refusal_reaches_the_initiator_with_its_code_and_reason(
    state: Callable[[bool], Handshake], code: int
) -> None:
    sent = Handshake.refuse(Refusal.WORLD, "rank 3 is taken")
    sent = sent[:5] + bytes([code]) + sent[6:]
    with pytest.raises(Refused) as refused:
        feed(state(True), sent)
    assert refused.value.code == code
    assert refused.value.reason == "rank 3 is taken"
    assert "the other side refused: rank 3 is taken." in str(refused.value)
    hinted = code in (Refusal.TOKEN, Refusal.VERSION, Refusal.WORLD)
    assert bool(refused.value.hint) is hinted


def test_a_refusal_without_a_reason() -> None:
    with pytest.raises(Refused) as refused:
        feed(at_start(True), Handshake.refuse(Refusal.CLOSING, ""))
    assert (refused.value.code, refused.value.reason) == (Refusal.CLOSING, "")


@pytest.mark.parametrize(
    "sent, shown",
    [
        (b"line\nbreak\r\x1b[31mred\x07", "line?break??[31mred?"),
        (b"\x00\x7f", "??"),
        ("right\u202eleft\u2028\u200b".encode(), "right?left??"),
        ("漢字 é".encode(), "漢字 é"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("é".encode()[:1], "\ufffd"),
    ],
)
def test_a_strangers_reason_cannot_write_to_the_terminal(sent: bytes, shown: str) -> None:
    with pytest.raises(Refused) as refused:
        feed(at_start(True), message(Type.REFUSE, sent, Refusal.WORLD))
    assert refused.value.reason == shown
    assert str(refused.value).isprintable()


@given(st.text(max_size=50) | st.text(min_size=1, max_size=50).map(lambda text: text * 40))
@example("surrogates, as file names have: \udcff")
def test_any_reason_can_be_sent(reason: str) -> None:
    sent = Handshake.refuse(Refusal.DUPLICATE, reason)
    assert len(sent) <= PREFIX_BYTES + 512
    with pytest.raises(Refused) as refused:
        feed(at_start(True), sent)
    assert refused.value.reason.isprintable()


@pytest.mark.parametrize("padding", ["", "x"])
def test_a_long_reason_is_cut_even_within_a_character(padding: str) -> None:
    sent = Handshake.refuse(Refusal.DUPLICATE, padding + "é" * 1000)
    assert len(sent) == PREFIX_BYTES + 512
    with pytest.raises(Refused) as refused:
        feed(at_start(True), sent)
    assert refused.value.reason == ("é" * 256 if not padding else "x" + "é" * 255 + "\ufffd")


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_garbage_is_refused_or_waited_for(garbage: bytes, initiator: bool, with_prefix: bool) -> None:
    side = at_start(initiator)
    stream = (
        prefix(Type.CHALLENGE if initiator else Type.HELLO, 48 if initiator else 50) if with_prefix else b""
    ) + garbage
    try:
        feed(side, stream)
    except (ProtocolError, Refused, EOFError):
        pass
    assert side.done is side.undecided is False
    assert side.remote is None


# ---------------------------------------------------------------------- shortcuts

HERE, ELSEWHERE = "boot/net/1000", "boot/other/1000"
SHORTCUT = b"0123456789abcdef"


def offer(
    place: str = HERE, acceptor_place: str = HERE, tokens: tuple[str, str] = (TOKEN, TOKEN), shortcut: bytes = SHORTCUT
) -> Conversation:
    """A conversation in which the acceptor offers a shortcut."""
    talk = Conversation(token=tokens[0], acceptor_token=tokens[1])
    alice, bob = (msgspec.structs.replace(who, place=at) for who, at in ((ALICE, place), (BOB, acceptor_place)))
    talk.initiator = Handshake(initiator=True, token=tokens[0], identity=alice, nonce=nonce("a"))
    talk.acceptor = Handshake(initiator=False, token=tokens[1], identity=bob, nonce=nonce("b"), shortcut=shortcut)
    return talk


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_shortcut_is_understood_by_who_is_in_the_same_place(token: str) -> None:
    talk = offer(tokens=(token, token))
    talk.run()
    assert talk.initiator.shortcut == SHORTCUT
    assert talk.initiator.done, "who does not take it goes on where it is"
    assert talk.acceptor.done
    assert talk.initiator.remote == talk.acceptor.identity


@pytest.mark.parametrize(
    "talk",
    [
        offer(place=ELSEWHERE),
        offer(place=""),
        offer(acceptor_place=""),
        offer(place="", acceptor_place=""),
        offer(shortcut=b""),
        offer(tokens=("another", TOKEN)),
        offer(tokens=("", TOKEN)),
    ],
    ids=["elsewhere", "nowhere", "unknown there", "unknown to both", "none offered", "another token", "no token"],
)
def test_a_shortcut_is_not_understood_by_others(talk: Conversation) -> None:
    with contextlib.suppress(Refused):  # by the token, where that is another
        talk.run()
    assert talk.initiator.shortcut == b""
    assert talk.initiator.done == (talk.messages.get(Type.WELCOME) is not None)


def test_an_offer_shows_a_stranger_nothing_of_the_place() -> None:
    talk = offer()
    challenge = feed(talk.acceptor, talk.initiator.start())
    assert HERE.encode() not in challenge
    assert len(challenge) == PREFIX_BYTES + 16 + NONCE_BYTES + 32 + len(SHORTCUT)


def test_an_offer_to_one_nonce_is_worth_nothing_to_another() -> None:
    """A recorded offer does not send anybody to a name that somebody else may have by now."""
    challenge = feed(offer().acceptor, offer().initiator.start())
    other = Handshake(initiator=True, token=TOKEN, identity=offer().initiator.identity, nonce=nonce("c"))
    other.start()
    feed(other, challenge)
    assert other.shortcut == b""


def cut(challenge: bytes) -> bytes:
    return message(Type.CHALLENGE, challenge[PREFIX_BYTES:][: 16 + NONCE_BYTES], VERSION)


def rename(challenge: bytes) -> bytes:
    return challenge[:-1] + bytes([challenge[-1] ^ 1])


@pytest.mark.parametrize("change", [cut, rename])
def test_an_offer_that_was_changed_on_the_way_is_noticed(change: Callable[[bytes], bytes]) -> None:
    """By who stays: the proofs cover it. Who leaves proves itself where it goes."""
    talk = offer()
    talk.tamper = lambda kind, message: change(message) if kind is Type.CHALLENGE else message
    with pytest.raises(Refused) as caught:
        talk.run()
    assert caught.value.code == Refusal.TOKEN


@pytest.mark.parametrize("extra", [1, 16, 32, 47])
def test_an_offer_of_a_wrong_length_is_refused(extra: int) -> None:
    talk = offer()
    feed(talk.acceptor, talk.initiator.start())
    body = BOB.uid + nonce("b") + bytes(extra)
    with pytest.raises(ProtocolError, match="CHALLENGE message"):
        feed(talk.initiator, message(Type.CHALLENGE, body, VERSION))


@pytest.mark.parametrize("length", [1, 15, 17, 32])
def test_a_shortcut_has_its_length(length: int) -> None:
    with pytest.raises(ValueError, match="shortcut has 16 bytes"):
        Handshake(initiator=False, token=TOKEN, identity=BOB, nonce=nonce("b"), shortcut=bytes(length))
