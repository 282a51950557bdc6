"""PyTorch: `torch.distributed.init_process_group("rankmesh")`. The only package here that imports torch.

With rankmesh installed nothing has to be imported: torch finds the backend by an entry point (`torch.backends` when
torch is imported, `torch.distributed.backends` from 2.14 on when the backend is asked for). `import rankmesh.torch`
does the same.
"""

import torch  # noqa: F401  # first: at its end it calls `register`, unless it was imported before

from rankmesh.torch.registration import NAME, register

__all__ = ["NAME", "register"]

register()
