"""What the two forms in which torch takes a backend have in common, besides the calls: sequence numbers, timeouts, the
monitored barrier, the end."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any, Final

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from rankmesh.endpoint import Status, Work
from rankmesh.errors import DeadlineError, PeerLost, RankmeshError
from rankmesh.torch.registration import NAME
from rankmesh.torch.verbs import Verbs
from rankmesh.torch.worlds import Place

#: Tags of the monitored barrier; torch's own are of 32 bits.
_REACHED: Final = 1 << 40
_PASSED: Final = _REACHED + 1
#: Seconds by which who reached a monitored barrier waits longer than rank 0, which tells whom it lacks.
_VERDICT: Final = 5.0


class Plugin(Verbs):
    """A backend over a place."""

    def __init__(self, place: Place, store: Store, seconds: float) -> None:
        self.place = place
        self.group = place.group
        self.store = store
        self.seconds = seconds

    def getBackendName(self) -> str:  # noqa: N802  # c10d's
        return NAME

    def __repr__(self) -> str:
        return f"<rankmesh.torch.{type(self).__name__}: {self.group!r}>"

    # ------------------------------------------------------------------ sequence numbers: of collectives, by rankmesh

    def _get_sequence_number_for_group(self) -> int:
        return self.group.sequence

    def _set_sequence_number_for_group(self) -> None:
        """They begin at 0 on every rank: there is nothing to agree on."""

    getSequenceNumberForGroup = _get_sequence_number_for_group  # noqa: N815  # c10d's
    setSequenceNumberForGroup = _set_sequence_number_for_group  # noqa: N815  # c10d's

    # ------------------------------------------------------------------ the monitored barrier

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier after which every rank knows who did not come. Rank 0 waits for the others and tells them;
        `wait_all_ranks`: it names all that are missing, not the first."""
        timeout = getattr(timeout, "timeout", timeout)  # BarrierOptions from torch 2.14 on
        seconds = timeout.total_seconds() if timeout and timeout > timedelta(0) else self.seconds
        group = self.group
        if group.rank == 0:
            missing = self._missing(seconds)
            for rank in range(1, group.size):
                if rank not in missing:
                    group.send(np.array([*missing], np.int64), rank, _PASSED, _VERDICT)
        else:
            group.send(b"", 0, _REACHED, seconds)
            told = np.empty(group.size, np.int64)
            status = group.recv(told, 0, _PASSED, seconds + _VERDICT)
            missing = dict.fromkeys(told[: status.nbytes // told.itemsize].tolist())
        if missing:
            raise _did_not_come(missing if wait_all_ranks else dict([next(iter(missing.items()))]), seconds)

    def _missing(self, seconds: float) -> dict[int, RankmeshError | None]:
        """Ranks that did not come, and why."""
        group, deadline = self.group, monotonic() + seconds
        arrivals: dict[int, Work[Status]] = {
            rank: group.irecv(bytearray(), rank, _REACHED, seconds) for rank in range(1, group.size)
        }
        missing: dict[int, RankmeshError | None] = {}
        for rank, arrival in arrivals.items():
            try:
                arrival.wait(max(deadline - monotonic(), 0.0))
            except (DeadlineError, PeerLost) as error:
                missing[rank] = error
        return missing

    # ------------------------------------------------------------------ timeouts, parts, the end

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connections are made with the first message, and no device has any."""

    def shutdown(self) -> None:
        """Let what was sent leave, and say goodbye: what `destroy_process_group` calls."""
        self.place.close()

    def abort(self) -> None:
        """End what is under way at once."""
        self.place.abort()


def _did_not_come(missing: dict[int, Any], seconds: float) -> RankmeshError:
    lost = next((error for error in missing.values() if isinstance(error, PeerLost)), None)
    if lost is not None:
        return lost
    who = f"Rank {next(iter(missing))}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
    return DeadlineError(
        f"{who} did not reach the monitored barrier within {seconds:g} s.",
        op="monitored_barrier",
        peer=who.lower(),
        elapsed=seconds,
        timeout=seconds,
    )
