"""PyTorch: `torch.distributed.init_process_group("rankmesh")`. The only package here that imports torch.

With rankmesh installed nothing has to be imported: torch finds the backend by an entry point (`torch.backends` when
torch is imported, `torch.distributed.backends` from 2.14 on when the backend is asked for). `import rankmesh.torch`
does the same.

`compress`, `Compression` and `compressed` make DDP's gradients smaller (hooks.py).
"""

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  # first: at its end it calls `register`, unless it was imported before

from rankmesh.torch.registration import NAME, register

if TYPE_CHECKING:
    from rankmesh.torch.hooks import Compression, compress, compressed

__all__ = ["NAME", "Compression", "compress", "compressed", "register"]

register()


def __getattr__(name: str) -> Any:
    """The hooks are loaded when they are asked for: whoever imports torch comes by here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rankmesh.torch import hooks

    return getattr(hooks, name)
