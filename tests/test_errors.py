"""The error tree: as drawn in its docstring, whole after pickling, and every message ends with what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

from rankmesh import errors
from rankmesh.errors import ConnectError, DeadlineError, PeerError, PeerLost, RankmeshError

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, RankmeshError)]

#: Attributes by their annotated type → a value that is not the default.
SAMPLES: dict[str, Any] = {
    "str": "sample",
    "int": 7,
    "float": 2.5,
    "int | None": 3,
    "float | None": 1.5,
    "tuple[int, ...]": (1, 2),
    "tuple[str, ...]": ("one", "two"),
    "Mapping[int, str]": {0: "all_reduce #3", 1: "barrier #3"},
}

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def drawn_tree() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name → (parent, other bases), read from the docstring's drawing."""
    tree: dict[str, tuple[str, tuple[str, ...]]] = {}
    path: list[str] = []
    line = re.compile(
        r"^ {4}(?P<branch>[│ ]*[├└]── )?(?P<name>[A-Z]\w+)(?: \((?P<others>[\w, ]+)\))?(?P<meaning>  .*)?$"
    )
    for match in filter(None, map(line.match, (errors.__doc__ or "").splitlines())):
        depth = len(match["branch"] or "") // 4
        assert depth == 0 or (match["meaning"] or "").strip(), f"the drawing does not say what {match['name']} means"
        del path[depth:]
        tree[match["name"]] = (path[-1] if path else "Exception", tuple((match["others"] or "").split()))
        path.append(match["name"])
    return tree


def attributes_of(kind: type[RankmeshError]) -> dict[str, Any]:
    annotations: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        annotations |= inspect.get_annotations(base)
    return {name: SAMPLES[annotation] for name, annotation in annotations.items()}


def test_tree_is_as_drawn() -> None:
    bases = {kind.__name__: [base.__name__ for base in kind.__bases__] for kind in KINDS}
    assert drawn_tree() == {name: (parent, tuple(others)) for name, (parent, *others) in bases.items()}


@every_kind
def test_docstring_names_every_attribute(kind: type[RankmeshError]) -> None:
    """Those of its own, not of its parents."""
    own = inspect.get_annotations(kind).keys() - {"hint"}
    assert all(re.search(rf"\b{name}\b", kind.__doc__ or "") for name in own), (kind.__doc__, own)


@every_kind
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_with_all_attributes(kind: type[RankmeshError], protocol: int) -> None:
    given = attributes_of(kind) | {"hint": "Do this.", "extra": [1, {"two": 3}]}
    error = kind("it failed.", **given)
    error.add_note("seen by rank 3")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert again.__dict__ == error.__dict__ == given | {"message": "it failed.", "__notes__": ["seen by rank 3"]}
    assert (again.args, str(again)) == (error.args, str(error))


@every_kind
def test_copies_are_whole(kind: type[RankmeshError]) -> None:
    error = kind("it failed.", **attributes_of(kind))
    assert copy.copy(error).__dict__ == copy.deepcopy(error).__dict__ == error.__dict__


@every_kind
def test_attributes_have_defaults(kind: type[RankmeshError]) -> None:
    error = kind("it failed.")
    assert all(hasattr(error, name) for name in attributes_of(kind))
    assert error.message == "it failed."
    assert error.args == ("it failed.",)


@every_kind
def test_message_ends_with_the_hint(kind: type[RankmeshError]) -> None:
    assert str(kind("it failed.")) == f"it failed. {kind.hint}".strip()
    assert str(kind("it failed.", hint="Do this.")) == "it failed. Do this."
    assert kind.hint == "" or re.fullmatch(r"[A-Z].*\.", kind.hint), "a hint is a sentence"


def test_attributes_are_typed_and_readable() -> None:
    lost = PeerLost("rank 1 is gone.", rank=1, host="node-1", pid=4711, op="recv", tag=7, reason="closed")
    assert (lost.rank, lost.host, lost.pid, lost.op, lost.tag, lost.reason) == (1, "node-1", 4711, "recv", 7, "closed")
    assert (lost.peer, PeerLost.rank) == ("", None)


@pytest.mark.parametrize(
    "kind, builtin",
    [
        ("ConfigError", ValueError),
        ("UsageError", ValueError),
        ("CodecError", ValueError),
        ("DeadlineError", TimeoutError),
        ("FunctionNotFound", LookupError),
        ("InvalidMessage", ValueError),
    ],
)
def test_builtin_handlers_catch_their_kind(kind: str, builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match=r"^it failed\."):
        raise getattr(errors, kind)("it failed.")


def test_late_broken_and_closed_are_told_apart() -> None:
    """A handler for one must not take the others: what to do next differs."""
    kinds = (DeadlineError, PeerLost, ConnectError, errors.ClosedError, errors.CancelledError, errors.InternalError)
    assert not [(a, b) for a in kinds for b in kinds if a is not b and issubclass(a, b)]
    assert not issubclass(PeerError, OSError), "PeerLost is not a ConnectionError of this process's own sockets"
