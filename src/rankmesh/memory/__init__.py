"""One-sided memory: regions that others read and write while their owner computes.

register or allocate → Region ··· open → RemoteRegion → read, write, batches, slices, cells, notifications
protocol    what requests say                            layout      where bytes lie, on both sides
region      the owner's memory, and its checks           operations  requests under way
server      serves them, as part of the engine           flow        windows and coalescing
mapping     same host: plain copies                      watching    regions coming and going
"""

from rankmesh.memory.agent import MemoryAgent
from rankmesh.memory.protocol import RegionInfo
from rankmesh.memory.region import Notification, Region
from rankmesh.memory.remote import RemoteRegion
from rankmesh.memory.watching import RegionEvent, RegionWatch

__all__ = ["MemoryAgent", "Notification", "Region", "RegionEvent", "RegionInfo", "RegionWatch", "RemoteRegion"]
