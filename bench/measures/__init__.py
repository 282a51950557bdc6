"""The measurements, by kind of subject; they run in the worker processes."""

from __future__ import annotations

from measures.base import Rank
from measures.calls import CallRank
from measures.copying import CopyRank
from measures.crowd import CrowdRank
from measures.messages import MessageRank
from measures.together import TogetherRank
from subjects.base import Caller, Collectives, Copier, Messenger, OneSided, Subject


def measured(subject: Subject, rank: int, size: int) -> Rank:
    """What measures a subject of this kind."""
    match subject:
        case Messenger():
            return MessageRank(subject, rank, size)
        case Caller():
            return CallRank(subject, rank, size)
        case OneSided():
            return CrowdRank(subject, rank, size)
        case Collectives():
            return TogetherRank(subject, rank, size)
        case Copier():
            return CopyRank(subject, rank, size)
    raise TypeError(f"Nothing measures a {type(subject).__name__}: add its kind to bench/measures/__init__.py.")
