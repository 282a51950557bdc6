"""Collectives: plans (pure), an executor that runs them over messages, and the verbs of groups."""

from __future__ import annotations

from rankmesh.collectives.agent import CollectiveAgent
from rankmesh.collectives.context import GroupContext
from rankmesh.collectives.grid import Grid
from rankmesh.collectives.tuning import Chooser
from rankmesh.collectives.uneven import UnevenCollectives

__all__ = ["Chooser", "CollectiveAgent", "Grid", "GroupContext", "UnevenCollectives"]
