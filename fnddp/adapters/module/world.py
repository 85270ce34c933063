"""The process group that a module was wrapped for, which may be gone when its gradients arrive."""

import weakref

import torch.distributed as dist

from fnddp import torch_private


class World:
    """The process group of this moment.

    Args:
        group: Its name; None for the default one, or for none at all.
        then: The event in it, for the error.
        fix: The advice in another one.
    """

    def __init__(self, group: str | None, then: str, fix: str) -> None:
        live = _live(group)
        self._group, self._then, self._fix = group, then, fix
        self._live = None if live is None else weakref.ref(live)
        self._was = _described(live)

    def require_same(self) -> None:
        """Raise a RuntimeError if there is another process group now, or none, or none was there before."""
        live = _live(self._group)
        if live is None if self._live is None else live is not None and live is self._live():
            return
        raise RuntimeError(
            f"{self._then} {self._was}, and now it runs {_described(live)}: gradients would not be the mean over its "
            f"ranks; {self._fix}"
        )


def _live(group: str | None) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    try:
        return torch_private.live_group(group)
    except RuntimeError:  # a named group that was destroyed
        return None


def _described(live: dist.ProcessGroup | None) -> str:
    if live is None:
        return "without a process group"
    return f"in the process group {live.group_name!r} of {live.size()} ranks"
