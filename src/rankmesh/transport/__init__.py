"""Ways of moving bytes, behind one interface (base.py). A transport knows no frames, peers, ranks or tokens."""

from rankmesh.transport.address import Address
from rankmesh.transport.base import Link, Listener, Transport
from rankmesh.transport.registry import register_transport, transport_for, unregister_transport

__all__ = [
    "Address",
    "Link",
    "Listener",
    "Transport",
    "register_transport",
    "transport_for",
    "unregister_transport",
]
