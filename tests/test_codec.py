"""The codec: what comes back, where it lies, what is refused and with which words, and that no bytes can hurt it."""

from __future__ import annotations

import ast
import functools
import random
import reprlib
import struct
import sys
import threading
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.msgpack import Ext

import rankmesh.codec
from rankmesh.codec import decode, encode, layout, nbytes, pack_plain, unpack_plain
from rankmesh.codec.layout import Code
from rankmesh.errors import CodecError

Array = np.ndarray[Any, Any]


def payload_of(obj: object, **options: bool) -> bytearray:
    return bytearray(b"".join(encode(obj, **options)))


def round_trip(obj: object, **options: bool) -> Any:
    return decode(memoryview(payload_of(obj, **options)), **options)


def forge(head: object, *blobs: bytes, flags: int = 0) -> bytes:
    """A payload built by hand from the description in layout.py, so that it can lie."""
    packed = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    payload = struct.pack(f"<BBII{len(blobs)}Q", 0xA1, flags, len(packed), len(blobs), *map(len, blobs)) + packed
    for blob in blobs:
        payload += bytes(-len(payload) % 64) + blob
    return payload


def array_ext(index: int, shape: tuple[int, ...], dtype: bytes, code: int = Code.ARRAY) -> Ext:
    return Ext(code, struct.pack(f"<I?B{len(shape)}Q", index, False, len(shape), *shape) + dtype)


def same(a: object, b: object) -> bool:
    """Equal in value and type all the way down; nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        assert isinstance(b, np.ndarray | np.generic)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or repr(a) == repr(b)


# ---------------------------------------------------------------------------------------------- what comes back

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, float("inf"), float("nan"), 1 - 2j,
    2**64, -(2**63) - 1, 7**5000, -(7**5000), "", "a", "ß→𝄞", "x" * 100_000, "\udcff.txt", b"", b"a", b"a" * 100_000,
    [], [1, [2, [3, []]]], (), (1,), (1, (2, [3, (4,)])), {}, {"a": 1}, {1: {None: {True: {2.5: "x"}}}},
    {(1, "a"): {(2, (3,)): 4}}, {b"k": 1}, {frozenset({1}): 2, UUID(int=5): 3}, {2**70: "\ud800", "\ud800": 2**70},
    set(), {1, "a", (2, 3)}, frozenset({frozenset({1})}), range(10), range(2**70, 0, -3), slice(None),
    slice(1, 2**80, "x"), datetime(2024, 2, 29, 12, 30, 1, 999_999),  # noqa: DTZ001  # naive ones travel too
    datetime(1, 1, 1, tzinfo=UTC), datetime(2024, 5, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    date(9999, 12, 31), time(23, 59, 59, 1), time(1, tzinfo=timezone(timedelta(hours=2))),
    timedelta.min, timedelta.max, timedelta(days=-1, microseconds=1),
    Decimal("1.50"), Decimal("-Infinity"), Decimal("1E-99"), UUID("12345678123456781234567812345678"),
    [None, True, 1, 1.5, "a", b"b", (1,), {1}, {"k": (2,)}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_values_come_back_with_their_type(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"nested": [(value,)]}), {"nested": [(value,)]})


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "overridden"


class Size(int):
    pass


CONVERTED: list[tuple[Any, Any]] = [
    (bytearray(b"ab"), b"ab"),
    (bytearray(b"ab") * 50_000, b"ab" * 50_000),
    (memoryview(b"abcd")[::2], b"ac"),
    (memoryview(b"abcd" * 50_000)[::2], b"ac" * 50_000),
    (np.arange(50_000, dtype="f4").reshape(2, -1).data, np.arange(50_000, dtype="f4").tobytes()),
    (OrderedDict(a=1, b=(2,)), {"a": 1, "b": (2,)}),
    (defaultdict(list, a=[b"x"]), {"a": [b"x"]}),
    (Counter("aab"), {"a": 2, "b": 1}),
    (Point(1, 2), (1, 2)),
    (Text("text"), "text"),
    (Size(2**70), 2**70),
    (np.str_("s"), "s"),
    (np.bytes_(b""), b""),
    (np.bytes_(b"s"), b"s"),
    (datetime(2024, 7, 1, tzinfo=ZoneInfo("UTC")), datetime(2024, 7, 1, tzinfo=UTC)),
]


@pytest.mark.parametrize("given_, arrives", CONVERTED, ids=lambda value: type(value).__name__)
def test_relatives_arrive_as_the_plain_type(given_: Any, arrives: Any) -> None:
    assert same(round_trip([given_])[0], arrives)


ARRAYS: list[Array] = [
    np.arange(12, dtype="f4").reshape(3, 4),
    np.array(2.5),
    np.zeros((0, 3)),
    np.zeros((2, 0), order="F"),
    np.array([True, False]),
    np.arange(5, dtype=">i2"),
    np.arange(4, dtype="f2"),
    np.array([1 + 2j], "c16"),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2024-01-01", "NaT"], "M8[ns]"),
    np.array([5], "m8[25us]"),
    np.array([b"xyz"], "V3"),
    np.zeros((1,) * 32),
    np.array([(1, 2.5, b"x", [[1, 2]])], [("a", "u1"), ("b", ">f8"), ("c", "S2"), ("d", "i2", (1, 2))]),
    np.array([(1, (2, 3))], np.dtype([("a", "i1"), ("n", [("x", "f4"), ("y", "M8[s]")])], align=True)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}"[:40])
def test_arrays_come_back(array: Array) -> None:
    back = round_trip({"x": array})["x"]
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


SCALARS = [
    np.float32(1.5), np.float64(2.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j),
    np.datetime64("2024-01-01"), np.timedelta64(5, "s"), np.float16(0.5), np.void(b"abc"), ARRAYS[-1][0],
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=repr)
def test_numpy_scalars_keep_their_type(scalar: Any) -> None:
    back = round_trip([scalar])[0]
    assert type(back) is type(scalar)
    assert back.dtype == scalar.dtype
    assert back == scalar


def test_bfloat16_and_float8_arrays_come_back() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"):
        array = np.arange(6).astype(getattr(ml_dtypes, name)).reshape(2, 3)
        back, scalar = round_trip([array, array[1, 1]])
        assert back.dtype == array.dtype
        assert (back == array).all()
        assert type(scalar) is type(array[1, 1])
        assert scalar == array[1, 1]


# ---------------------------------------------------------------------------------------------- where it lies


def test_array_memory_is_not_copied_and_lies_aligned() -> None:
    arrays = [np.arange(n, dtype="u1") for n in (1, 63, 0, 64, 1000)] + [np.asfortranarray(np.ones((3, 5)))]
    parts = encode({"arrays": arrays, "note": "x"})
    for array in arrays:
        assert array.size == 0 or any(np.shares_memory(array, np.frombuffer(part, "u1")) for part in parts if len(part))

    payload = payload_of({"arrays": arrays, "note": "x"})
    assert nbytes(parts) == len(payload)
    base = np.frombuffer(payload, "u1")
    backs = decode(memoryview(payload))["arrays"]
    for array, back in zip(arrays, backs, strict=True):
        assert (back == array).all()
        if array.size:
            assert np.shares_memory(back, base)
            assert (back.ctypes.data - base.ctypes.data) % 64 == 0
    backs[4][0] = 77
    assert 77 in payload[-2000:]


@pytest.mark.parametrize("order", ["C", "F"])
def test_order_is_kept_without_a_copy(order: Any) -> None:
    array = np.array(np.arange(24.0).reshape(2, 3, 4), order=order)
    (_, memory) = encode(array)
    assert np.shares_memory(array, np.frombuffer(memory, "f8"))
    back = round_trip(array)
    assert back.flags[f"{order}_CONTIGUOUS"]
    assert (back == array).all()


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[:, 1:3], np.s_[::-1], np.s_[..., None, 0]], ids=repr)
def test_other_layouts_are_copied_once(view: Any) -> None:
    array = np.arange(24.0).reshape(4, 6)[view]
    back = round_trip(array)
    assert (back == array).all()
    assert back.flags.c_contiguous


def test_read_only_payload_gives_read_only_arrays() -> None:
    back = decode(bytes(payload_of(np.arange(3))))
    assert not back.flags.writeable
    assert back.tolist() == [0, 1, 2]


def test_payload_at_an_odd_address_still_gives_aligned_arrays() -> None:
    payload = payload_of([np.arange(3.0), b"x" * 20_000])
    shifted = memoryview(bytearray(b"?") + payload)[1:]
    array, text = decode(shifted)
    assert array.flags.aligned
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert text == b"x" * 20_000


def test_large_bytes_are_not_copied_by_encode() -> None:
    big = bytearray(16 * 1024)
    parts = encode([big, big[:-1]])
    assert np.shares_memory(np.frombuffer(big, "u1"), np.frombuffer(parts[1], "u1"))
    assert len(parts) == 2, "16 KiB - 1 travel in the head"


# ---------------------------------------------------------------------------------------------- types at the receiver


class Mode(Enum):
    FAST = "fast"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Batch:
    step: int
    mode: Mode
    x: Array
    points: list[Point] = field(default_factory=list)
    when: datetime | None = None


class Job(msgspec.Struct, tag="job", rename="camel"):
    job_name: str
    level: Level
    note: str | msgspec.UnsetType = msgspec.UNSET


class Pair(msgspec.Struct, array_like=True):
    left: int
    right: tuple[int, ...]


def test_dataclass_arrives_as_dict_or_as_the_type_asked_for() -> None:
    batch = Batch(3, Mode.FAST, np.arange(3), [Point(1, 2)], datetime(2024, 1, 1, tzinfo=UTC))
    plain = round_trip(batch)
    assert list(plain) == ["step", "mode", "x", "points", "when"]
    assert plain["mode"] == "fast"
    back = decode(payload_of(batch), type=Batch)
    assert type(back) is Batch
    assert (back.step, back.mode, back.points, back.when) == (3, Mode.FAST, [Point(1, 2)], batch.when)
    assert back.x.tolist() == [0, 1, 2]


def test_structs_arrive_as_plain_objects_or_as_the_type_asked_for() -> None:
    assert round_trip(Job("a", Level.HIGH)) == {"type": "job", "jobName": "a", "level": 3}
    assert decode(payload_of(Job("a", Level.HIGH)), type=Job) == Job("a", Level.HIGH)
    assert round_trip(Pair(1, (2, 3))) == [1, (2, 3)]
    assert decode(payload_of([Pair(1, (2, 3))]), type=list[Pair]) == [Pair(1, (2, 3))]


@pytest.mark.parametrize("type_", [int, Batch, list["Nowhere"], 5], ids=str)  # type: ignore[name-defined]  # noqa: F821
def test_object_that_is_not_of_the_type_is_refused(type_: Any) -> None:
    with pytest.raises(CodecError, match=r"The object is not a .*Send what the type declares\."):
        decode(payload_of({"step": "three"}), type=type_)


# ---------------------------------------------------------------------------------------------- what is refused


class Unknown:
    """A class of the user's, which pickle can carry."""

    def __init__(self, x: Any = 0) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and bool(np.all(self.x == other.x))

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Node:
    x: Any = None


REFUSED: list[tuple[Any, str, str, str]] = [
    (Unknown(), "$", "test_codec.Unknown", "allow_pickle=True on both sides"),
    ({"a": [0, 1, 2, Node(Unknown())]}, "$['a'][3].x", "test_codec.Unknown", "Send a dataclass"),
    ([{"a": (1, {2: print})}], "$[0]['a'][1][2]", "builtin_function_or_method", "there is no encoding for it"),
    ({(1, Mode.FAST): 1}, "$.keys()[0][1]", "test_codec.Mode", r"Send its \.value"),
    ({(1, 2): [Mode.FAST]}, "$[(1, 2)][0]", "test_codec.Mode", r"Send its \.value"),
    ({frozenset([Level.HIGH])}, "${…}{…}", "test_codec.Level", "Enum"),
    ([np.array([object()])], "$[0]", "numpy.ndarray", "its dtype 'object'"),
    ([np.zeros(2, "g")], "$[0]", "numpy.ndarray", "means the same on every machine"),
    ([np.zeros(2, [("a", "O")])], "$[0]", "numpy.ndarray", "its dtype 'object'"),
    ([np.zeros(2, [])], "$[0]", "numpy.ndarray", "its dtype"),
    ([np.longdouble(1)], "$[0]", "numpy.longdouble", "its dtype"),
    ([np.ma.masked_array([1], [True])], "$[0]", f"{np.ma.MaskedArray.__module__}.MaskedArray", "mask would be lost"),
    ({1 << 20_000: print}, "$[<int>]", "builtin_function_or_method", "there is no encoding for it"),
    ([1 << (8 * 1024 * 1024)], "$[0]", "int", "the limit is 1048576"),
    ([Size(1 << (8 * 1024 * 1024))], "$[0]", "test_codec.Size", "the limit is 1048576"),
    ([time(1, tzinfo=ZoneInfo("Europe/Berlin"))], "$[0]", "datetime.time", "Send a datetime"),
    ([Batch], "$[0]", "type", "there is no encoding for it"),
    (iter(()), "$", "tuple_iterator", "there is no encoding for it"),
]


@pytest.mark.parametrize(
    "obj, path, type_name, words", REFUSED, ids=lambda value: reprlib.repr(value) if isinstance(value, str) else ""
)
def test_what_cannot_travel_is_named_with_its_place_and_a_way_out(
    obj: Any, path: str, type_name: str, words: str
) -> None:
    with pytest.raises(CodecError, match=words) as caught:
        encode(obj)
    error: Any = caught.value
    assert error.path == path
    assert error.type_name.removeprefix("tests.") == type_name
    assert str(error).startswith(f"{path} is a ")
    assert str(error).endswith(".")


def loops() -> list[tuple[Any, str]]:
    items: list[Any] = [1, []]
    items[1].append(items)
    mapping: dict[str, Any] = {}
    mapping["self"] = (mapping,)
    keyed: dict[Any, Any] = {(1, 2): []}
    keyed[1, 2].append(keyed)
    node = Node()
    node.x = [node]
    ordered: OrderedDict[str, Any] = OrderedDict()
    ordered["o"] = ordered
    return [
        (items, "$[1][0]"),
        (mapping, "$['self'][0]"),
        (keyed, "$[(1, 2)][0]"),
        (node, "$.x[0]"),
        (ordered, "$['o']"),
    ]


@pytest.mark.parametrize("obj, path", loops(), ids=["list", "dict", "keyed", "dataclass", "subclass"])
def test_circular_references_are_refused(obj: Any, path: str) -> None:
    with pytest.raises(CodecError, match="it contains itself") as caught:
        encode(obj)
    assert caught.value.path == path  # type: ignore[attr-defined]


def test_the_same_object_twice_is_no_circle() -> None:
    shared = [np.arange(3)]
    first, second = round_trip((shared, shared))
    assert first[0].tolist() == second[0].tolist() == [0, 1, 2]
    assert not np.shares_memory(first[0], second[0])


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    obj: Any = b""
    for _ in range(depth):
        obj = wrap(obj)
    return obj


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {(): x}], ids=["[]", "()", "{}", "map"]
)
def test_depth_is_limited_on_the_way_out(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(layout.MAX_DEPTH, wrap)
    assert round_trip(deepest) == deepest
    with pytest.raises(CodecError, match="nested deeper than 100"):
        encode([deepest])


# ---------------------------------------------------------------------------------------------- pickle


def test_pickle_needs_both_sides() -> None:
    payload = payload_of({"a": Unknown(5)}, allow_pickle=True)
    assert decode(payload, allow_pickle=True) == {"a": Unknown(5)}
    with pytest.raises(CodecError, match=r"pickle is not allowed here.*allow_pickle=True here too"):
        decode(payload)


def test_payload_cannot_hide_a_pickle() -> None:
    payload = payload_of([Unknown(5)], allow_pickle=True)
    payload[1] = 0
    for allow in (False, True):
        with pytest.raises(CodecError, match="holds a pickle without saying so"):
            decode(payload, allow_pickle=allow)


def test_pickle_is_not_used_where_it_is_not_needed() -> None:
    for obj in (np.arange(3), {"a": (1, 2)}, Batch(1, Mode.FAST, np.arange(2))):
        assert b"".join(encode(obj, allow_pickle=True)) == b"".join(encode(obj))


def test_pickled_arrays_stay_out_of_band() -> None:
    array, strided = np.arange(1000.0), np.arange(10)[::2]
    obj = [np.arange(2), Unknown(array), Unknown(strided), Mode.FAST, np.array([None, "x"])]
    parts = encode(obj, allow_pickle=True)
    assert any(np.shares_memory(array, np.frombuffer(part, "u1")) for part in parts)
    payload = payload_of(obj, allow_pickle=True)
    back = decode(memoryview(payload), allow_pickle=True)
    assert (back[1], back[2], back[3], back[4].tolist()) == (Unknown(array), Unknown(strided), Mode.FAST, [None, "x"])
    assert np.shares_memory(back[1].x, np.frombuffer(payload, "u1"))
    assert back[1].x.flags.writeable


class Grenade:
    def __reduce__(self) -> tuple[Any, ...]:
        return (int, ("not a number",))


def test_errors_within_pickle_are_codec_errors() -> None:
    with pytest.raises(CodecError, match=r"\$\[0\] is a _thread.lock.* pickle refuses it too") as caught:
        encode([threading.Lock()], allow_pickle=True)
    assert isinstance(caught.value.__cause__, Exception)
    with pytest.raises(CodecError, match=r"could not be restored: ValueError: .*same classes importable"):
        round_trip(Grenade(), allow_pickle=True)


def test_functions_go_by_cloudpickle_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = 3
    back = round_trip([lambda x: x + offset, len], allow_pickle=True)
    assert (back[0](4), back[1]("ab")) == (7, 2)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert round_trip(functools.partial(int, base=2), allow_pickle=True)("101") == 5
    with pytest.raises(CodecError, match="pickle refuses it too"):
        encode(lambda x: x + offset, allow_pickle=True)


def test_one_file_can_pickle() -> None:
    source = Path(rankmesh.codec.__file__).parent.parent
    importers = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {"pickle", "cloudpickle", "marshal", "shelve"}
        & {getattr(node, "module", None), *(a.name for a in node.names)}
    ]
    assert importers == ["codec/pickling.py"]


# ---------------------------------------------------------------------------------------------- plain


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()))
def test_plain_values_come_back_or_need_the_long_way(values: list[Any]) -> None:
    packed = pack_plain(values)
    if packed is None:
        assert any(isinstance(value, int) and not -(2**63) <= value < 2**64 for value in values)
    else:
        assert unpack_plain(packed) == values


@pytest.mark.parametrize(
    "values", [[[1]], [(1,)], [np.ones(1)], [2**64], ["\udc80"], [b"x" * 20_000], [True, object()]]
)
def test_other_values_are_not_plain(values: list[Any]) -> None:
    assert pack_plain(values) is None


@pytest.mark.parametrize(
    "payload", [b"", b"\x01", b"\xc1", b"\x91", b"\x91\xc7\x01\x05x", b"\x91\xa1\xff", b"\x90\x90"]
)
def test_bytes_that_are_no_plain_values_are_refused(payload: bytes) -> None:
    with pytest.raises(CodecError, match="not plain values"):
        unpack_plain(payload)


# ---------------------------------------------------------------------------------------------- torch


def test_tensors_come_back_over_the_payload() -> None:
    torch = pytest.importorskip("torch")
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn"
    tensors = [torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names.split()]
    tensors += [torch.tensor(1.5), torch.zeros(0, 3), torch.nn.Parameter(torch.ones(2))]
    payload = payload_of(tensors)
    base = np.frombuffer(payload, "u1")
    for tensor, back in zip(tensors, decode(memoryview(payload)), strict=True):
        assert type(back) is torch.Tensor
        assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert back.tolist() == tensor.tolist()
        start = back.data_ptr() - base.ctypes.data
        assert back.numel() == 0 or (0 < start < len(payload) and start % 64 == 0)


def test_tensor_memory_is_not_copied_unless_strided() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(100.0).reshape(10, 10)
    (_, memory) = encode(tensor)
    assert np.shares_memory(tensor.numpy(), np.frombuffer(memory, "f4"))
    assert torch.equal(round_trip(tensor.T), tensor.T)
    assert torch.equal(round_trip(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))
    assert torch.equal(decode(bytes(payload_of(tensor))), tensor), "a read-only payload is copied, without a warning"


def test_tensors_without_plain_cpu_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CodecError, match=r"it is on meta\. Send x\.cpu\(\)\."):
        encode([torch.zeros(2, device="meta")])
    with pytest.raises(CodecError, match=r"layout torch.sparse_coo is not plain memory\. Send x\.to_dense\(\)"):
        encode({"s": torch.eye(2).to_sparse()})


def test_without_torch_or_ml_dtypes_the_receiver_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CodecError, match=r"no torch here that knows it\. Install a recent torch"):
        decode(forge(array_ext(0, (2,), b"float32", Code.TENSOR), bytes(8)))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(CodecError, match="pip install -U ml_dtypes"):
        decode(forge(array_ext(0, (2,), b"float8_e3m4"), bytes(2)))


# ---------------------------------------------------------------------------------------------- payloads that lie

F4 = b"<f4"


def structured(itemsize: int, *fields: tuple[Any, ...]) -> bytes:
    return msgspec.msgpack.encode((itemsize, fields))


def russian_doll(depth: int) -> bytes:
    description = F4
    for _ in range(depth):
        description = structured(4, ("a", description, 0, ()))
    return description


LIES: dict[str, bytes] = {
    "empty": b"",
    "half a prefix": forge(1)[:5],
    "another format": b"\x80" + forge(1)[1:],
    "an unknown flag": forge(1, flags=2),
    "head cut off": forge([1, 2, 3])[:-1],
    "trailing byte": forge(1) + b"\0",
    "buffer cut off": forge(array_ext(0, (2,), F4), bytes(8))[:-1],
    "trailing byte after a buffer": forge(array_ext(0, (2,), F4), bytes(8)) + b"\0",
    "head of 4 GiB": struct.pack("<BBII", 0xA1, 0, 2**32 - 1, 0) + b"\xc0",
    "table of 4 G buffers": struct.pack("<BBII", 0xA1, 0, 1, 2**32 - 1) + b"\xc0",
    "buffer of 2**64 - 1 bytes": struct.pack("<BBIIQ", 0xA1, 0, 1, 1, 2**64 - 1) + b"\xc0",
    "two values": forge(b"\x01\x02"),
    "no value": forge(b""),
    "list of 4 G items": forge(b"\xdd\xff\xff\xff\xff"),
    "map of 4 G items": forge(b"\xdf\xff\xff\xff\xff"),
    "text of 4 GiB": forge(b"\xdb\xff\xff\xff\xff"),
    "text that is not UTF-8": forge(b"\xa1\xff"),
    "lists without end": forge(b"\x91" * 200_000),
    "maps without end": forge(b"\x81\x01" * 200_000),
    "unhashable key": forge(b"\x81\x80\x01"),
    "unknown extension": forge(Ext(99, b"")),
    "timestamp out of range": forge(Ext(-1, b"\xff" * 12)),
    "tuple of no list": forge(Ext(Code.TUPLE, b"\x01")),
    "set of lists": forge(Ext(Code.SET, b"\x91\x90")),
    "map of one and a half pairs": forge(Ext(Code.MAP, b"\x93\x01\x01\x01")),
    "map with an unhashable key": forge(Ext(Code.MAP, b"\x92\x90\x01")),
    "range of one too many": forge(Ext(Code.RANGE, b"\x94\x01\x01\x01\x01")),
    "range without a step": forge(Ext(Code.RANGE, b"\x93\x01\x01\x00")),
    "range of text": forge(Ext(Code.RANGE, b"\x91\xa1a")),
    "slice of nothing": forge(Ext(Code.SLICE, b"\x90")),
    "integer too large": forge(Ext(Code.INT, b"\1" * (1024 * 1024 + 1))),
    "half a complex": forge(Ext(Code.COMPLEX, bytes(8))),
    "date of no month": forge(Ext(Code.DATE, b"2024-13-01")),
    "date in no script": forge(Ext(Code.DATE, b"\xff\xfe")),
    "no datetime": forge(Ext(Code.DATETIME, b"yesterday")),
    "no time": forge(Ext(Code.TIME, b"25:00")),
    "time span out of range": forge(Ext(Code.TIMEDELTA, struct.pack("<iii", 2**31 - 1, 0, 0))),
    "no decimal": forge(Ext(Code.DECIMAL, b"1,5")),
    "half a UUID": forge(Ext(Code.UUID, bytes(8))),
    "bytes of no buffer": forge(Ext(Code.BYTES, struct.pack("<I", 0))),
    "buffer used twice": forge([Ext(Code.BYTES, struct.pack("<I", 0))] * 2, bytes(10)),
    "array of no buffer": forge(array_ext(1, (2,), F4), bytes(8)),
    "array too long": forge(array_ext(0, (3,), F4), bytes(8)),
    "array too short": forge(array_ext(0, (1,), F4), bytes(8)),
    "shape that overflows to its size": forge(array_ext(0, (2**63, 2, 2), F4), b""),
    "shape that overflows": forge(array_ext(0, (2**32, 2**32), F4), b""),
    "empty array of absurd shape": forge(array_ext(0, (0, 2**64 - 1, 2**64 - 1), F4), b""),
    "too many dimensions": forge(array_ext(0, (1,) * 255, F4), bytes(4)),
    "shape cut off": forge(Ext(Code.ARRAY, struct.pack("<I?BQ", 0, False, 2, 1)), bytes(4)),
    "array fields cut off": forge(Ext(Code.ARRAY, b"\0\0")),
    "array of objects": forge(array_ext(0, (1,), b"|O"), bytes(8)),
    "array of objects by name": forge(array_ext(0, (1,), b"object"), bytes(8)),
    "array of no bytes each": forge(array_ext(0, (10**15,), b"|V0"), b""),
    "array of long doubles": forge(array_ext(0, (1,), b"<f16"), bytes(16)),
    "dtype with a comma": forge(array_ext(0, (1,), b"<f4,|O"), bytes(12)),
    "dtype of nothing": forge(array_ext(0, (1,), b""), bytes(4)),
    "dtype in no script": forge(array_ext(0, (1,), b"<f\xff"), bytes(4)),
    "structure with an object": forge(array_ext(0, (1,), structured(8, ("a", b"|O", 0, ()))), bytes(8)),
    "structure without fields": forge(array_ext(0, (1,), structured(8)), bytes(8)),
    "structure of no bytes": forge(array_ext(0, (10**15,), structured(0, ("a", F4, 0, (0,)))), b""),
    "structure with a field outside": forge(array_ext(0, (1,), structured(4, ("a", F4, 4, ()))), bytes(4)),
    "structure with a field before": forge(array_ext(0, (1,), structured(4, ("a", F4, -4, ()))), bytes(4)),
    "structure with one name twice": forge(
        array_ext(0, (1,), structured(8, ("a", F4, 0, ()), ("a", F4, 4, ()))), bytes(8)
    ),
    "structure of absurd size": forge(array_ext(0, (1,), structured(2**62, ("a", F4, 0, ()))), bytes(8)),
    "structure with an absurd sub-array": forge(
        array_ext(0, (1,), structured(8, ("a", F4, 0, (2**31, 2**31)))), bytes(8)
    ),
    "structure with a negative sub-array": forge(array_ext(0, (1,), structured(8, ("a", F4, 0, (-1,)))), bytes(8)),
    "structures without end": forge(array_ext(0, (1,), russian_doll(200)), bytes(4)),
    "scalar without a value": forge(Ext(Code.SCALAR, struct.pack("<H", 3) + F4)),
    "two scalars": forge(Ext(Code.SCALAR, struct.pack("<H", 3) + F4 + bytes(8))),
    "scalar object": forge(Ext(Code.SCALAR, struct.pack("<H", 2) + b"|O" + bytes(8))),
    "tensor of an unknown dtype": forge(array_ext(0, (1,), b"load", Code.TENSOR), bytes(4)),
    "tensor of a private dtype": forge(array_ext(0, (1,), b"__doc__", Code.TENSOR), bytes(4)),
    "pickle": forge(Ext(Code.PICKLE, struct.pack("<II", 0, 0) + b"N.")),
    "pickle that is announced": forge(Ext(Code.PICKLE, struct.pack("<II", 0, 0) + b"N."), flags=1),
}


def tuples_without_end() -> bytes:
    data = b"\x90"
    for _ in range(layout.MAX_DEPTH + 2):
        data = msgspec.msgpack.encode([Ext(Code.TUPLE, data)])
    return data


LIES["tuples without end"] = forge(Ext(Code.TUPLE, tuples_without_end()))


@pytest.mark.parametrize("payload", LIES.values(), ids=LIES.keys())
def test_lies_are_codec_errors_and_cost_no_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=r"\.$"):
            decode(memoryview(bytearray(payload)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 100 * len(payload)


def test_forged_payloads_are_read_if_they_do_not_lie() -> None:
    """So that the cases above fail for the reason they name, and not because `forge` is wrong."""
    assert decode(forge({"a": [1]})) == {"a": [1]}
    assert decode(forge([array_ext(1, (2,), F4), Ext(Code.BYTES, struct.pack("<I", 0))], b"x", bytes(8)))[1] == b"x"
    assert decode(forge(array_ext(0, (1,), structured(8, ("a", F4, 4, ()))), bytes(8))).dtype["a"] == np.float32
    assert decode(forge(array_ext(0, (1,), russian_doll(3)), bytes(4))).nbytes == 4
    assert decode(forge(Ext(Code.SCALAR, struct.pack("<H", 3) + F4 + bytes(4)))) == 0
    assert decode(forge(Ext(Code.PICKLE, struct.pack("<II", 0, 0) + b"N."), flags=1), allow_pickle=True) is None


def test_pickle_that_names_other_buffers_is_refused() -> None:
    for first, count in ((0, 2), (1, 1), (0, 2**32 - 1), (2**32 - 1, 2**32 - 1)):
        payload = forge(Ext(Code.PICKLE, struct.pack("<II", first, count) + b"N."), b"x", flags=1)
        with pytest.raises(CodecError, match="is used twice or does not exist"):
            decode(payload, allow_pickle=True)


# ---------------------------------------------------------------------------------------------- generated input

hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()
    | st.uuids() | st.dates() | st.decimals(allow_nan=False) | st.timedeltas() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
plain_dtypes = hnp.scalar_dtypes().filter(lambda dtype: dtype.char not in "gG")


def has_no_titles(dtype: np.dtype[Any]) -> bool:
    """A field with a title has three entries; titles do not travel."""
    return all(len(entries) == 2 for entries in (dtype.fields or {}).values())


dtypes = plain_dtypes | hnp.array_dtypes(plain_dtypes).filter(has_no_titles)
leaves = (
    hashables | st.floats() | st.datetimes(timezones=st.just(UTC) | st.none())
    | hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
    | st.builds(np.asfortranarray, hnp.arrays(np.float32, hnp.array_shapes(max_side=3)))
)  # fmt: skip
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(objects)
def test_any_object_comes_back(obj: Any) -> None:
    parts = encode(obj)
    payload = b"".join(parts)
    assert len(payload) == nbytes(parts)
    assert same(decode(payload), obj)


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_codec_error(data: bytes) -> None:
    for payload in (data, b"\xa1" + data, forge(data)):
        try:
            decode(payload)
        except CodecError as error:
            assert str(error).endswith(".")  # noqa: PT017  # either outcome is right


RICH: dict[Any, Any] = {
    "values": [value for value in VALUES if len(repr(value)) < 200],
    "arrays": ARRAYS,
    "scalars": SCALARS,
    "blob": b"x" * 20_000,
    (1, "key"): {2**70: frozenset({1.5})},
}


def mutated(original: bytes, source: random.Random) -> bytes:
    """A copy with a few bytes changed, cut out or put in; often near the start, where the sizes are."""
    data = bytearray(original)
    for _ in range(source.randint(1, 4)):
        at = source.randint(0, source.choice((10, 200, len(data))))
        match source.randrange(5):
            case 0:
                data[at : at + 1] = source.randbytes(1)
            case 1:
                data[at : at + 1] = bytes(byte ^ 1 << source.randrange(8) for byte in data[at : at + 1])
            case 2:
                del data[at : at + source.randint(1, 8)]
            case 3:
                data[at:at] = source.randbytes(source.randint(1, 8))
            case _:
                data[at : at + 4] = source.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
    return bytes(data)


def with_mutated_head(payload: bytes, source: random.Random) -> bytes:
    """The sizes stay true, so that the mutation gets past them."""
    _, _, head_bytes, count = struct.unpack_from("<BBII", payload)
    start = 10 + 8 * count
    at = start + head_bytes
    blobs = []
    for size in struct.unpack_from(f"<{count}Q", payload, 10):
        at += -at % 64
        blobs.append(payload[at : at + size])
        at += size
    return forge(mutated(payload[start : start + head_bytes], source), *blobs)


CORPUS = [RICH, RICH["arrays"], RICH["values"], RICH["scalars"], *VALUES[:60], *ARRAYS]


def test_mutated_payloads_give_an_object_or_a_codec_error() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    corpus = [bytes(payload_of(obj)) for obj in CORPUS]
    outcomes: Counter[bool] = Counter()
    tracemalloc.start()
    try:
        for _ in range(20_000):
            mutate = source.choice((mutated, with_mutated_head))
            try:
                decode(memoryview(bytearray(mutate(source.choice(corpus), source))))
                outcomes[True] += 1
            except CodecError:
                outcomes[False] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(outcomes[True], outcomes[False]) > 1000, "the mutations are too mild or too wild to show anything"
    assert peak < 64_000_000


def test_every_truncation_is_a_codec_error() -> None:
    payload = bytes(payload_of({"values": RICH["values"][:20], "array": ARRAYS[0]}))
    for end in range(len(payload)):
        with pytest.raises(CodecError):
            decode(payload[:end])
