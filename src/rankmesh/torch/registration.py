"""How torch learns of the backend. What is behind it is loaded when a process group is made.

torch calls `register` at the end of its own import, if rankmesh is installed: so this module needs nothing that
`rankmesh.torch` defines, which may be half imported by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed as dist

from rankmesh.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

#: What users write in `init_process_group`.
NAME: Final = "rankmesh"
#: Device tensors are staged through host memory, but another backend is better at them: none is claimed.
_DEVICES: Final = ["cpu"]
_OLDEST: Final = (2, 6)
#: From here on a backend can be written in Python, and stands under an ordinary ProcessGroup.
_PYTHON_BACKENDS: Final = (2, 14)


def torch_version() -> tuple[int, int]:
    """Of the torch that is imported: major, minor."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def register() -> None:
    """Make the backend known to torch. Doing so twice does no harm."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=_DEVICES)


def _create(about: _DistributedBackendOptions, options: Any) -> Any:
    """A process group, or a backend for one, on one of its ranks."""
    from rankmesh.torch.worlds import place_for

    if torch_version() < _OLDEST:
        raise ConfigError(f"rankmesh needs torch 2.6 or newer, not {torch.__version__}. Update torch.")
    if options is not None:
        raise ConfigError(
            f"The backend rankmesh takes no pg_options, but {type(options).__name__} was passed. Set what you need by "
            "RANKMESH_… variables."
        )
    place, seconds = place_for(about), about.timeout.total_seconds()
    if torch_version() >= _PYTHON_BACKENDS:
        from rankmesh.torch.backend import Backend

        return Backend(place, about.store, seconds)
    from rankmesh.torch.process_group import ProcessGroup

    return ProcessGroup(place, about.store, seconds)
