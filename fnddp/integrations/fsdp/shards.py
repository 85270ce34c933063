"""Codecs for the messages between FSDP2's shards: its reduce-scatter of gradients and its all-gather of weights."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fnddp import torch_private
from fnddp.adapters.checkpoint import Checkpoint, Checkpoints
from fnddp.core.agreement import agree_over, agreed_state, replicated
from fnddp.core.group import Group, group_name
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import State, Sync
from fnddp.integrations.fsdp.plan import AxesPlan, Axis, axes_of
from fnddp.integrations.fsdp.reductions import Comm, Reductions, Scatter
from fnddp.integrations.fsdp.replicas import replicas_of
from fnddp.integrations.fsdp.unit import UNSCALED, Traffic, Unit, require_codecs
from fnddp.reducers.all_reduce import none
from fnddp.reducers.carriers import allgather, two_shot
from fnddp.schedules.choose import partition
from fnddp.torch_private import FSDPGroup, fsdp_groups
from fnddp.transforms.cast import refuse_check
from fnddp.transforms.memory import ef21, error_feedback
from fnddp.transforms.weighted import weighted
from fnddp.wire.kinds import ALL_GATHER, waited


class Shards:
    """The codecs of a model's shards, with the state of the pipeline of gradients: see `compress_shards`.

    Attributes:
        gradients: The pipeline of gradients, or a `partition`; None for FSDP's own reduce-scatter.
        weights: The pipeline of weights; None for FSDP's own all-gather.
        group: Name of the process group of the shards, of most ranks if there are several; None for the default one.
    """

    def __init__(
        self, reductions: Reductions, units: Sequence[Unit], gradients: Sync | None, weights: Sync | None
    ) -> None:
        self.gradients, self.weights, self._reductions, self._units = gradients, weights, reductions, units
        self.group = max(units, key=lambda unit: unit.n).group

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The messages of each group of parameters in the next step, by module name; "" is the model itself.

        Several groups of one module are numbered: "layers.0[0]", "layers.0[1]".
        """
        return {unit.name: unit.traffic() for unit in self._units}

    @property
    def plan(self) -> AxesPlan:
        """The messages of the next step, by mesh and pipeline, with the parameters that require a gradient now."""
        traffic, takes_weight = self.traffic, self.sync.takes_weight
        alike: dict[Any, list[Unit]] = {}
        for unit in self._units:
            alike.setdefault((unit.group, repr(unit.gradients), repr(unit.weights)), []).append(unit)
        firsts = {unit.group: unit for unit in reversed(self._units)}  # a mesh sends weights of ranks once
        axes: list[Sequence[Axis]] = []
        for units in alike.values():
            first, of_units = units[0], [traffic[unit.name] for unit in units]
            gradients = weighted(first.gradients) if takes_weight and first.gradients else first.gradients
            sends_weight = takes_weight and firsts[first.group] is first
            axes.append([*axes_of(of_units, gradients, first.weights, first.n, sends_weight)])
        return AxesPlan(tuple(axis for same in zip(*axes, strict=True) for axis in same))

    @property
    def steps(self) -> int:
        """The number of backwards that have synchronized successfully; 0 without a pipeline of gradients."""
        return self._reductions.engine.steps

    @property
    def failed_steps(self) -> int:
        """The number of backwards that have failed, on all ranks."""
        return self._reductions.engine.failed_steps

    @property
    def sync(self) -> Sync:
        """`gradients`, under the name that other handles use."""
        return none if self.gradients is None else self.gradients

    @property
    def sync_state(self) -> State:
        """The state of `gradients` after the last step, by group of parameters. Set it on all ranks."""
        if self._reductions.engine.refused is None:  # else the state may be loaded again
            self._reductions.require_whole()
        states = self._reductions.states
        return {unit.name: states[unit.name] for unit in self._units if unit.name in states}

    @sync_state.setter
    def sync_state(self, state: State) -> None:
        self.prepare_state(lambda: state)()

    def prepare_state(self, read: Callable[[], State]) -> Callable[[], None]:
        """Return a function that sets the state that `read` returns: see `HasPipeline.prepare_state`."""
        before, units = self.sync_state, self._reductions.units  # an error of one mesh is one of all
        groups = dict.fromkeys(group for unit in units for group in unit.groups)
        within = {
            subject: unit.groups
            for unit in units
            if unit.name in before
            for subject in replicated({unit.name: before[unit.name]})
        }
        others = [each.group for each in replicas_of(self._reductions.model)]
        state = agreed_state(self.sync, before, read, groups, within=within, others=others)

        def set_state() -> None:
            self._reductions.states |= state
            for unit in units:  # weights may have been loaded, too
                unit.forget()

        return set_state

    def refuse(self, error: BaseException | None) -> None:
        """See `HasCheckpoint.refuse`."""
        self._reductions.engine.refused = error

    def reset_sync(self) -> None:
        """Set the state of `gradients` to the initial one. All ranks call it, between steps."""
        held = self.sync_state
        self.sync_state = {unit.name: unit.init() for unit in self._units if unit.name in held}

    def sync_checkpoint(self, saved_world_size: int | tuple[int, ...] | None = None) -> Checkpoint:
        """Return the state for torch.distributed.checkpoint: see `fnddp.DistributedDataParallel.sync_checkpoint`.

        Args:
            saved_world_size: The number of shards that saved it; for several meshes a tuple, as `Checkpoints.saved_by`
                returns it. If there are other ranks besides these shards, the number of shards must be the same.
        """
        meshes: dict[str | None, list[Unit]] = {self.group: []}
        for unit in self._units:
            meshes.setdefault(unit.group, []).append(unit)
        saved = saved_world_size if isinstance(saved_world_size, tuple) else (saved_world_size,) * len(meshes)
        made: list[Checkpoint] = []
        for (group, units), size in zip(meshes.items(), saved, strict=True):
            ranks = dist.get_process_group_ranks(torch_private.live_group(group))
            number = f"{len(ranks)}_" if made else ""
            prefix = "" if len(ranks) == dist.get_world_size() else f"shards_{number}from_rank{min(ranks)}/"
            of_mesh = Shards(self._reductions, units, self.gradients, self.weights)
            made.append(Checkpoint(of_mesh, group, size, prefix))
        return made[0] if len(made) == 1 else Checkpoints(made)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not send gradients in the block, but keep whole gradients, as `set_requires_gradient_sync(False)` does.

        The next backward outside of the block synchronizes their sum.
        """
        return unsynchronized(self._reductions.model)

    def weight(self, count: float) -> AbstractContextManager[None]:
        """Weight this rank's gradients by `count` in the means of backwards that begin in the block, for `weighted`.

        If the loss is a mean over `tokens` tokens, `with shards.weight(tokens): loss.backward()` computes the gradient
        of the mean over the tokens of all ranks. Each backward that synchronizes needs a weight. Parameters with a mesh
        of their own, such as experts, get the mean over the ranks of that mesh: see docs/fsdp.md.

        Args:
            count: The number of samples or tokens; 0 is allowed, but not on all ranks.

        Raises:
            TypeError: The pipeline of gradients is not `weighted`.
            ValueError: In backward: this rank's weight is missing or invalid, or, on all ranks, all are 0. The step
                fails on all ranks. On the CPU also if this rank's meshes differ in mean weight.
        """
        return self._reductions.weight.block(self.gradients or two_shot, count)


@contextmanager
def unsynchronized(model: Any) -> Generator[None]:
    """Send no gradients of an FSDP model in the block; restore the previous setting after it."""
    every = [(module, groups[0]) for module, groups in fsdp_groups(model).values() if groups]
    before = [(module, group.reduces, group.all_reduces) for module, group in every]
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for module, reduces, all_reduces in before:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(all_reduces, recurse=False)


class _Gather(Comm):
    """FSDP's `AllGather`, of one group of parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *_: Any, **__: Any
    ) -> None:
        if group == self._unit.fsdp.shards:
            with torch.no_grad(), torch_private.without_autocast():
                output_tensor.view(group.size(), -1).copy_(self._unit.gather(input_tensor))
        else:  # weights were gathered, and then sharded again over fewer ranks
            start, arguments = ALL_GATHER.call(input_tensor, output_tensor, None, group)
            waited(start(*arguments))


Pipeline: TypeAlias = str | Sync | Mapping[str, str | Sync] | None


def compress_shards(model: nn.Module, gradients: Pipeline = None, weights: Pipeline = None) -> Shards:
    """Send the messages between the shards of an FSDP2 model through codecs. All of its ranks must call this.

    Shard the model with `fully_shard`, then call this, before the first forward. It replaces FSDP's reduce-scatter of
    the gradients of a group of parameters by the first half of `two_shot`: each rank receives its row from all others,
    encoded by `gradients`, and adds in float32, in rank order. Where FSDP gathers weights, each rank sends its shard
    encoded by `weights`. Shards, optimizer and model checkpoints stay as FSDP makes them.

    The wrong choice on links that are faster than a codec, such as NVLink; and for PowerSGD, because it needs whole
    matrices: compress between replicas then, with `compress_replicas`.

    Args:
        model: A model after `fully_shard(model)`, not only of its parts.
        gradients: `two_shot` with codecs around it, or its text: `"bf16(two_shot)"`, `"quantize(two_shot, bits=4)"`
            (ZeRO++'s qgZ). `error_feedback` around them keeps a float32 residual of the whole gradients on each rank,
            and two during a backward. `weighted` as the outermost is for means over tokens: see `Shards.weight`. None
            for FSDP's own reduce-scatter.
        weights: `allgather` with codecs around it, or its text: `"quantize(allgather)"` (ZeRO++'s qwZ). With `ef21`
            around them, each rank keeps the whole weights as all ranks last decoded them, and sends the difference of
            its shard to them, in a forward after a change (SDP4Bit). Weights that were loaded or jump for another
            reason are sent themselves; ranks first agree on this, with a byte each. None for FSDP's own all-gather.

    Both may be a dict of pipelines by pattern, or a `partition`: `{"*.experts.*": ..., "*": ...}`. The first matching
    pattern decides. All parameters that FSDP sends together must have the same pipeline; parameters with a mesh of
    their own by `shard_placement_fn` are sent on their own. `weighted(partition({...}))` weights the means of all.

    Raises:
        TypeError: On all ranks: a pipeline does not fit; the model, or a parameter, is not sharded; FSDP has custom
            collectives already; parameters that FSDP sends together have several pipelines, or dtypes; `gradients` is
            `weighted`, and FSDP averages over replicas itself.
        ValueError: On all ranks: a parameter has no pattern, or a pattern no parameter.
        RankMismatchError: On all ranks, if they disagree about pipelines or parameters.

    Source: `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py` of torch 2.13; ZeRO++ (Wang et al., 2023);
    SDP4Bit (Jia et al., NeurIPS 2024, arXiv 2410.15526).

    >>> from torch.distributed.fsdp import fully_shard
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> model = fully_shard(nn.Linear(8, 8))
    >>> shards = compress_shards(model, gradients="quantize(two_shot, bits=4)", weights="quantize(allgather)")
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> dist.destroy_process_group()
    """
    return set_up_shards(model, gradients, weights)


def set_up_shards(model: nn.Module, gradients: Pipeline, weights: Pipeline, others: Sequence[Group] = ()) -> Shards:
    """Run `compress_shards`; raise an error of one rank also in the groups `others`."""
    made: list[tuple[Shards, Reductions]] = []
    within: dict[str, list[str | None]] = {}

    def set_up() -> dict[str, str]:
        read = [fitting(what, sync) for what, sync in (("gradients", gradients), ("weights", weights))]
        if read == [None, None]:
            raise TypeError("compress_shards: give a pipeline for gradients, for weights, or both")
        found = _sharded(model, weights is not None)
        takes_weight = read[0] is not None and read[0].takes_weight
        if takes_weight and any(fsdp.replicas is not None for _, fsdp in found.values()):
            raise TypeError(
                f"compress_shards: gradients={read[0]!r}: FSDP itself averages over replicas here, and cannot weight "
                "that mean; call fully_shard with mesh=mesh['shard'], and compress_replicas"
            )
        of_unit = [_by_unit(what, sync, found) for what, sync in zip(("gradients", "weights"), read, strict=True)]
        units = [Unit(name, names, fsdp, *(of[name] for of in of_unit)) for name, (names, fsdp) in found.items()]
        states: dict[str, State] = {} if read[0] is None else {unit.name: unit.init() for unit in units}
        reductions = Reductions(model, units, states, takes_weight)
        made.append((Shards(reductions, units, *read), reductions))
        lines: dict[str, str] = {}
        for unit in units:  # ranks of other experts have other parameters
            lines |= unit.describe()
            within.update(dict.fromkeys(unit.describe(), unit.groups))
        return {"gradients": repr(read[0]), "weights": repr(read[1]), **lines}

    modules = fsdp_groups(model)
    for module, _ in modules.values():  # the last forward may have left weights whole
        module.reshard()
    every = [group for _, groups in modules.values() for group in groups]
    groups = [of for group in every for of in (group.shards, group.replicas) if of is not None]
    agree_over(set_up, dict.fromkeys(map(group_name, groups)) or [None], others, within, call="compress_shards")
    shards, reductions = made[-1]
    for unit in reductions.units:
        if unit.n > 1 and shards.gradients is not None:  # to one owner FSDP sends nothing, and scales by itself
            unit.fsdp.reduce_with(Scatter(reductions, unit), UNSCALED)
            unit.fsdp.before_reduction(unit.note)
        if unit.n > 1 and shards.weights is not None:
            unit.fsdp.gather_with(_Gather(unit))
            unit.fsdp.module.register_load_state_dict_post_hook(unit.forget)
    if shards.gradients is not None:
        reductions.engine.connect()
        model.register_forward_pre_hook(reductions.refuse_capture)
    model.register_forward_pre_hook(reductions.before_forward, prepend=True)  # before FSDP's hook: it sends
    return shards


def fitting(what: str, sync: Pipeline) -> Sync | None:
    """Return the pipeline of "gradients" or "weights"; raise a TypeError if shards cannot use it."""
    if sync is None:
        return None
    name = f"compress_shards: {what}"
    if isinstance(sync, Mapping):
        sync = partition({pattern: pipeline_of(name, each) for pattern, each in sync.items()})
    sync = pipeline_of(name, sync)
    refuse_check(name, sync)
    inner = sync.inner if what == "gradients" and isinstance(sync, weighted) else sync
    for each in inner.children() if isinstance(inner, partition) else [inner]:
        if each.takes_weight and each is not sync:
            raise TypeError(f"{name}: {each!r} must be outermost; write weighted(partition({{...}}))")
        require_codecs(what, each, *((ef21, allgather) if what == "weights" else (error_feedback, two_shot)))
    return sync


def _by_unit(
    what: str, sync: Sync | None, found: Mapping[str, tuple[list[str], FSDPGroup]]
) -> Mapping[str, Sync | None]:
    sync = sync.inner if isinstance(sync, weighted) else sync
    if not isinstance(sync, partition):
        return dict.fromkeys(found, sync)
    leaves: dict[str, Tensor] = {}
    for names, fsdp in found.values():
        leaves |= zip(names, fsdp.parameters, strict=True)
    owner = {name: pattern for pattern, part in sync.split(leaves).items() for name in part}
    chosen: dict[str, Sync | None] = {}
    for unit, (names, _) in found.items():
        pattern = owner[names[0]]
        other = next((name for name in names if owner[name] != pattern), None)
        if other is not None:
            raise TypeError(
                f"compress_shards: {what}: FSDP sends {names[0]!r} and {other!r} together, and they match {pattern!r} "
                f"and {owner[other]!r}; call fully_shard on one of their modules first, or give one of them its own "
                "mesh in shard_placement_fn"
            )
        chosen[unit] = dict(sync.rules)[pattern]
    return chosen


def _sharded(model: nn.Module, has_weights: bool) -> dict[str, tuple[list[str], FSDPGroup]]:
    """Return the names of the parameters that FSDP sends together and FSDP's object for them, by module name."""
    if replicas_of(model):
        raise TypeError("compress_shards: call it before compress_replicas, which takes over the steps of shards")
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"compress_shards: fully_shard was not called on the model itself, a {type(model).__name__}, so FSDP does "
            "not manage all of it; call fully_shard last, on the whole model"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[list[str], FSDPGroup]] = {}
    for name, (_, groups) in fsdp_groups(model).items():
        which = f"the module {name!r}" if name else "the model"
        for i, group in enumerate(groups):
            _require_plain(which, group, has_weights)
            unit = name if len(groups) == 1 else f"{name}[{i}]"
            found[unit] = [names.pop(id(parameter)) for parameter in group.parameters], group
    left = [name for name, parameter in model.named_parameters() if id(parameter) in names and parameter.requires_grad]
    if left:
        raise TypeError(
            f"compress_shards: parameter {left[0]!r} is not sharded, so FSDP does not reduce its gradient; call "
            "fully_shard without it in ignored_params, or freeze it"
        )
    return found


def _require_plain(which: str, group: FSDPGroup, has_weights: bool) -> None:
    if group.shards is None:
        raise TypeError(
            f"compress_shards: {which} is replicated and has no shards; call fully_shard with a mesh of one shard, and "
            "compress between its replicas with compress_replicas"
        )
    if group.custom_comms:
        raise TypeError(
            f"compress_shards: {' and '.join(group.custom_comms)} is already set for {which} by another call; make "
            "only one of the two calls"
        )
    if has_weights and (group.is_extended or not group.gathered_dtype.is_floating_point):
        raise TypeError(
            f"compress_shards: {which} has parameters of several dtypes, or of a class that encodes its own weights "
            "(fsdp_pre_all_gather), and FSDP gathers these as bytes; remove weights="
        )
