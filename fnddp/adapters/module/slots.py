"""Where a module keeps its parameters, and what lies there now."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fnddp.adapters.module.arguments import OWNER
from fnddp.state import describe


class Slots:
    """Finds out when the tensors that a module runs with are not the parameters that were there when it was wrapped.

    `torch.func.functional_call` swaps them for one call; a user may assign new ones for good.

    Args:
        module: The wrapped module.
        parameters: Those that are synchronized, by name.
        frozen: Those that did not require a gradient.
        ignored: Names of others that are not synchronized here.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        frozen: Mapping[str, nn.Parameter],
        ignored: Collection[str],
    ) -> None:
        self._parameters, self._frozen = dict(parameters), dict(frozen)
        self._ignored = ignored
        self._look_up(module)

    def swapped(self) -> dict[str, Tensor]:
        """What lies where another parameter was, by its name."""
        known = self._parameters
        return {n: t for n, held, key in self._owners if (t := held.get(key)) is not known[n] and t is not None}

    def tensors(self) -> dict[str, Tensor]:
        """What the module runs with, by name."""
        return {name: t for name, held, key in self._owners if (t := held.get(key)) is not None}

    def require_known(self, module: nn.Module) -> None:
        """Checks that nothing has a gradient that would not be synchronized.

        Raises:
            RuntimeError: A frozen parameter is not frozen any more, or there are new parameters.
        """
        thawed = [n for n, held, key in self._frozen_owners if (t := held.get(key)) is not None and t.requires_grad]
        if thawed:
            raise RuntimeError(
                f"{OWNER}: {', '.join(thawed)} did not require a gradient when the module was wrapped, and does now, "
                "so its gradient would not be synchronized; wrap the module again"
            )
        has_all = module is self._module and all(held.get(key) is part for held, key, part in self._parts)
        if has_all and all(len(held) == size for held, size in self._sizes):
            return
        known = {id(parameter) for parameter in [*self._parameters.values(), *self._frozen.values()]}
        new = [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
            and id(parameter) not in known
            and name not in {*self._parameters, *self._ignored}
        ]
        if new:
            raise RuntimeError(
                f"{OWNER}: {', '.join(new)} came into the module after it was wrapped, so its gradient would not be "
                "synchronized; wrap the module again"
            )
        self._look_up(module)

    def _look_up(self, module: nn.Module) -> None:
        self._module = module
        parts = dict(module.named_modules(remove_duplicate=False))
        self._parts = [
            (parts[name.rpartition(".")[0]]._modules, name.rpartition(".")[2], part)  # pyright: ignore[reportPrivateUsage]
            for name, part in parts.items()
            if name
        ]
        self._sizes: list[tuple[dict[str, Any], int]] = [
            (held, len(held))
            for part in parts.values()
            for held in (part._modules, part._parameters)  # pyright: ignore[reportPrivateUsage]
        ]
        self._owners, self._frozen_owners = _owners(parts, self._parameters), _owners(parts, self._frozen)

    def require_alike(self, swapped: Mapping[str, Tensor]) -> None:
        """Raises a ValueError unless the tensors are of the shapes and dtypes of the parameters."""
        for name, tensor in swapped.items():
            expected = self._parameters[name]
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                raise ValueError(
                    f"{OWNER}: {name!r} is now {describe(tensor)}, but was {describe(expected)} when the module was "
                    "wrapped; wrap it again"
                )


def _owners(parts: Mapping[str, nn.Module], names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    """For each parameter its name, the dict that holds it, and its key there."""
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [(name, parts[path]._parameters, key) for name, path, key in split if path in parts]  # pyright: ignore[reportPrivateUsage]
