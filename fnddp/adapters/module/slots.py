"""The places where a module stores its parameters, and the tensors that are there now."""

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
    """The parameters that a module had when it was wrapped.

    Attributes:
        parameters: Parameters that are synchronized, by name.
        frozen: Parameters that did not require a gradient.
        others: Names of parameters that this module does not synchronize.
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
        """Return the parameters of `module`, except names in `ignored`, and `theirs`, those of wrapped submodules.

        Args:
            before: Names of parameters synchronized so far. They stay synchronized, even if they are frozen for now.

        Raises:
            RuntimeError: No parameter requires a gradient.
        """
        named = {name: p for name, p in module.named_parameters() if name not in ignored}
        trained = {name for name, p in named.items() if p.requires_grad or name in before}
        if not trained:
            raise RuntimeError(f"{OWNER}: no parameter of the module requires a gradient; use the module unwrapped")
        return cls(
            parameters={name: p for name, p in named.items() if name in trained and p not in theirs},
            frozen={name: p for name, p in named.items() if name not in trained and p not in theirs},
            others=frozenset([*ignored, *(name for name, p in named.items() if p in theirs)]),
        )

    def all(self) -> list[nn.Parameter]:
        return [*self.parameters.values(), *self.frozen.values()]

    @property
    def thawed(self) -> list[str]:
        """Names of formerly frozen parameters that now require a gradient."""
        return [name for name, p in self.frozen.items() if p.requires_grad]

    def gradients(self) -> dict[str, Tensor]:
        """Return tensors like the gradients: the parameters, converted if they have another `grad_dtype`."""
        dtypes = {name: grad_dtype(p) for name, p in self.parameters.items()}
        return {n: p if p.dtype == dtypes[n] else p.detach().to(dtypes[n]) for n, p in self.parameters.items()}

    def leaves(self) -> dict[str, LeafSpec]:
        return {name: LeafSpec.of(grad) for name, grad in self.gradients().items()}


class Slots:
    """The places of the parameters that `module` was wrapped with. They may hold other tensors by now.

    `torch.func.functional_call` swaps the tensors for one call, and a user may assign new ones permanently.

    Args:
        owner: Name of the wrapping function or class, for errors.
        fix: Advice in errors about parameters that are not synchronized.

    Attributes:
        buffers: The dicts that hold the buffers of the module and its submodules.
    """

    def __init__(self, module: nn.Module, trained: WrappedParameters, owner: str, fix: str) -> None:
        self._trained, self._owner, self._fix = trained, owner, fix
        # Weak references make torch.utils.swap_tensors refuse, as with torch's class: a swap would lose our hooks.
        self._pins = [weakref.ref(parameter) for parameter in trained.parameters.values()]
        self._look_up(module)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the module currently uses as parameters, by name."""
        return _held(self._places)

    def require_known(self, module: nn.Module, *, has_gradients: bool = True) -> None:
        """Raise a RuntimeError for new parameters and, if `has_gradients`, for formerly frozen ones."""
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
        """Raise a RuntimeError if the module uses tensors that require a gradient but are not in `known`."""
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
    # A TorchScript module has no dicts, but objects without `get`.
    return {name: t for name, held, key in places if key in held and (t := held[key]) is not None}


def _places(parts: Mapping[str, nn.Module], names: Iterable[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Return for each parameter its name, the dict that holds it, and its key there."""
    split = [(name, *name.rpartition(".")[::2]) for name in names]
    return [(name, parameters_in(parts[path]), key) for name, path, key in split if path in parts]


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embeddings with sparse gradients."""
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    return {parameter for part in embeddings for parameter in part.parameters(recurse=False)}
