"""The places where a module keeps its parameters, and the tensors there now."""

import weakref
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fnddp.adapters.backward import require_synchronized
from fnddp.ir.program import LeafSpec
from fnddp.torch_private import buffers_in, grad_dtype, modules_in, parameters_in

OWNER = "DistributedDataParallel"


@dataclass(frozen=True)
class WrappedParameters:
    """The parameters of a module when it was wrapped.

    Attributes:
        parameters: Those that are synchronized, by name.
        frozen: Those that did not require a gradient.
        others: Names of those that this module does not synchronize.
    """

    parameters: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    others: frozenset[str]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ignored: Collection[str],
        theirs: Collection[nn.Parameter],
        before: Collection[str] = (),
    ) -> "WrappedParameters":
        """Return the parameters of `module`, but for names in `ignored`, and `theirs`, which wrapped parts synchronize.

        Args:
            before: Names of those that are synchronized so far: they are, though they may be frozen for a time.

        Raises:
            RuntimeError: No parameter requires a gradient.
        """
        named = {name: p for name, p in module.named_parameters() if name not in ignored}
        trained = {name for name, p in named.items() if p.requires_grad or name in before}
        if not trained:
            raise RuntimeError(f"{OWNER}: no parameter of the module requires a gradient; use it unwrapped")
        return cls(
            parameters={name: p for name, p in named.items() if name in trained and p not in theirs},
            frozen={name: p for name, p in named.items() if name not in trained and p not in theirs},
            others=frozenset([*ignored, *(name for name, p in named.items() if p in theirs)]),
        )

    def all(self) -> list[nn.Parameter]:
        return [*self.parameters.values(), *self.frozen.values()]

    @property
    def thawed(self) -> list[str]:
        """Names of those that are not frozen any more."""
        return [name for name, p in self.frozen.items() if p.requires_grad]

    def gradients(self) -> dict[str, Tensor]:
        """Return tensors like the gradients: the parameters, but for those with another `grad_dtype`."""
        dtypes = {name: grad_dtype(p) for name, p in self.parameters.items()}
        return {n: p if p.dtype == dtypes[n] else p.detach().to(dtypes[n]) for n, p in self.parameters.items()}

    def leaves(self) -> dict[str, LeafSpec]:
        return {name: LeafSpec.of(grad) for name, grad in self.gradients().items()}


class Slots:
    """The places of the parameters that `module` was wrapped with, where other tensors may be by now.

    `torch.func.functional_call` swaps them for one call; a user may assign new ones for good.

    Args:
        owner: Name of what wraps the module, for errors.
        fix: What a user can do about parameters that are not synchronized.

    Attributes:
        buffers: The dicts that hold the buffers of the module and its parts.
    """

    def __init__(self, module: nn.Module, trained: WrappedParameters, owner: str, fix: str) -> None:
        self._trained, self._owner, self._fix = trained, owner, fix
        # Makes torch.utils.swap_tensors refuse them, as with torch's class: swapped parameters would lose our hooks.
        self._pins = [weakref.ref(parameter) for parameter in trained.parameters.values()]
        self._look_up(module)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the module runs with, by name."""
        return _held(self._places)

    def require_known(self, module: nn.Module, *, has_gradients: bool = True) -> None:
        """Raise a RuntimeError if there are new parameters, or one is not frozen any more and `has_gradients`."""
        if has_gradients:
            require_synchronized(self._owner, _held(self._frozen_places).items(), frozenset(), self._fix)
        has_same_parts = module is self._module and all(held == before for held, before in self._parts)
        if has_same_parts and all(len(held) == size for held, size in self._sizes):
            return
        of = self._trained
        named = [(n, p) for n, p in module.named_parameters() if n not in of.parameters and n not in of.others]
        require_synchronized(self._owner, named, {*of.parameters.values(), *of.frozen.values()}, self._fix)
        self._look_up(module)

    def require_all_in(self, known: Set[Tensor]) -> None:
        """Raise a RuntimeError if the module runs with tensors that require a gradient and are not `known`."""
        require_synchronized(self._owner, self.tensors().items(), known, self._fix)

    def _look_up(self, module: nn.Module) -> None:
        parts = dict(module.named_modules(remove_duplicate=False))
        modules, parameters = ([of(each) for each in parts.values()] for of in (modules_in, parameters_in))
        self._module, self.buffers = module, [buffers_in(part) for part in parts.values()]
        self._parts = [(held, dict(held)) for held in modules]
        self._sizes = [(held, len(held)) for held in parameters]
        self._places, self._frozen_places = (
            _places(parts, self._trained.parameters),
            _places(parts, self._trained.frozen),
        )


def _held(places: Iterable[tuple[str, dict[str, Any], str]]) -> dict[str, Tensor]:
    # A module of TorchScript has no dicts, but what has no `get`.
    return {name: t for name, held, key in places if key in held and (t := held[key]) is not None}


def _places(parts: Mapping[str, nn.Module], names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Return for each parameter its name, the dict that holds it, and its key there."""
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [(name, parameters_in(parts[path]), key) for name, path, key in split if path in parts]


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embeddings whose gradients are sparse."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {parameter for part in embeddings for parameter in part.parameters(recurse=False)}
