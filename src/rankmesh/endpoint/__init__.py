"""Endpoints and peers: where wire meets transport."""

from rankmesh.endpoint.endpoint import Endpoint
from rankmesh.endpoint.matching import ANY_SOURCE, ANY_TAG
from rankmesh.endpoint.peer import Peer
from rankmesh.endpoint.transfers import Status
from rankmesh.endpoint.work import Work

__all__ = ["ANY_SOURCE", "ANY_TAG", "Endpoint", "Peer", "Status", "Work"]
