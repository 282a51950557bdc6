"""Calls between endpoints: functions by name, streams, channels, references. `RpcAgent` is the way in.

The files, in the order in which a call passes them: `agent` (the verbs), `client` and `opening` (calls and streams
under way), `protocol` (the bytes), then on the other side `prompt` (the hot path), `server` (dispatch), `registry`
(functions and their signatures), `pool` and `loop` (where handlers run), `producing` (streams), `context` (the call
that a handler serves), `answers` (why there is no result). `streams` is what both ends of a stream have in common,
`broadcast` a call to many, `refs` remote objects, `hooks` who watches.
"""

from rankmesh.rpc.agent import RpcAgent
from rankmesh.rpc.broadcast import Broadcast
from rankmesh.rpc.context import CallContext, current_call, trace_context
from rankmesh.rpc.hooks import CallInfo, Hook
from rankmesh.rpc.refs import Ref, RefHandle
from rankmesh.rpc.streams import Channel, Stream

__all__ = [
    "Broadcast",
    "CallContext",
    "CallInfo",
    "Channel",
    "Hook",
    "Ref",
    "RefHandle",
    "RpcAgent",
    "Stream",
    "current_call",
    "trace_context",
]
