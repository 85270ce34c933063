"""`lower`: make a plan from a pipeline and parameters, pass by pass."""

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fnddp.core import tree
from fnddp.core.buckets import MB, assign_buckets
from fnddp.core.expression import Expression
from fnddp.core.options import checked_int
from fnddp.core.parse import pipeline_of
from fnddp.core.sync import State, Sync
from fnddp.core.tree import Tree
from fnddp.ir.plan_data import require_backend
from fnddp.ir.program import Collective, Divisor, Grad, Held, LeafSpec, StatePart
from fnddp.kernels.leaves import OUT
from fnddp.plan.draft import Donation, Draft, Request, copied
from fnddp.plan.graph import launch, launch_of, numbers, output_nodes, take, value
from fnddp.plan.passes.combine import combine
from fnddp.plan.passes.emit import emit, name_of
from fnddp.plan.passes.foreach import foreach
from fnddp.plan.passes.order import order
from fnddp.plan.passes.place import place
from fnddp.plan.passes.remember import remember
from fnddp.plan.passes.simplify import drop, fuse, simplify
from fnddp.plan.passes.trace import sizes_of, trace
from fnddp.plan.plan import Plan
from fnddp.wire.groups import World, WorldSize, within

KEEP = Donation()
_PASSES = (drop, simplify, remember, fuse, combine, order, place, foreach)


def lower(
    sync: Sync | str,
    params: Tree,
    *,
    state: State = None,
    world_size: WorldSize | None = None,
    arrival: Sequence[str] | None = None,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    donation: Donation = KEEP,
    backend: str | None = None,
) -> Plan:
    """Lower a pipeline to a plan: a static schedule of the computation and messages of one rank in one step.

    Nothing is computed and nothing is sent. The plan is data that you can print and estimate the cost of.
    `DistributedDataParallel` and other adapters lower by themselves; use this to inspect a pipeline, or to plan for a
    cluster on a laptop.

    Args:
        sync: The pipeline, or its text.
        params: Any pytree of parameters or gradients (also on the meta device), or a module for its trained parameters.
        state: The pipeline's state. Its counters choose the phase (warm-up, or after it); None for the first step.
        world_size: Number of ranks to plan for, without a process group. For a pipeline over several groups a number by
            group name (None is the default group): {"node": 8, "across": 128}. None for the existing groups.
        arrival: Leaf paths in the order in which their gradients are expected; None for the reverse of `params`.
        bucket_cap_mb: Size of buckets: in the order of arrival, a bucket is closed once it holds this many MiB. The
            payloads of a bucket are sent together.
        first_bucket_mb: The same for the first bucket.
        donation: Memory that a step may write over: none, unless an adapter owns gradients or state.
        backend: Runs the segments: None for Python, or "inductor". See `docs/functional.md`.

    Raises:
        LoweringError: The pipeline reads values or runs foreign code, so it has no static schedule.
        ValueError: `arrival` does not name the leaves of `params`, a size is not positive, `world_size` does not give
            the size of each group of the pipeline, or the backend is unknown.

    >>> import torch
    >>> from fnddp import allreduce, bf16, error_feedback, powersgd
    >>> params = {"weight": torch.empty(256, 256, device="meta"), "bias": torch.empty(256, device="meta")}
    >>> plan = lower(error_feedback(powersgd(bf16(allreduce), rank=4)), params, world_size=1024)
    >>> plan.wire_bytes, plan.rounds, len(plan.collectives)
    (4608, 2, 2)
    >>> from fnddp import fp16, hierarchical
    >>> sync = hierarchical(fp16(allreduce.over("across")), intra="node")
    >>> plan = lower(sync, params, world_size={"node": 8, "across": 128})
    >>> [(each.kind.name, each.world_size) for each in plan.collectives]
    [('reduce_scatter', 8), ('all_reduce', 128), ('all_gather', 8)]
    """
    sync = pipeline_of("lower: sync", sync)
    if bucket_cap_mb <= 0 or first_bucket_mb <= 0:
        raise ValueError(
            f"lower: bucket_cap_mb and first_bucket_mb must be positive, got {bucket_cap_mb} and {first_bucket_mb}"
        )
    if isinstance(params, nn.Module):
        params = {name: p for name, p in params.named_parameters() if p.requires_grad}
    leaves, spec = tree.flatten(params)
    leaves = {path: leaves[path] for path in spec.paths}  # gradients arrive in the reverse order
    require_backend(backend)
    world = planned_world(sync, sync.groups, world_size)
    with torch.inference_mode(False):  # inference mode changes the traced operations
        with within(world):
            state = sync.init(leaves) if state is None else state
        return lower_leaves(
            sync,
            {path: LeafSpec.of(leaf) for path, leaf in leaves.items()},
            state,
            world=world,
            arrival=arrival,
            bucket_caps=(first_bucket_mb * MB, bucket_cap_mb * MB),
            donation=donation,
            backend=backend,
        )


def lower_leaves(
    sync: Sync,
    leaves: Mapping[str, LeafSpec],
    state: State,
    *,
    world: World,
    arrival: Sequence[str] | None = None,
    bucket_caps: Sequence[float],
    donation: Donation,
    dropped: Collection[str] = frozenset(),
    backend: str | None = None,
    traces: "Traces | None" = None,
) -> Plan:
    """Lower like `lower`, for leaves by path, and with any number of bucket sizes, in bytes.

    `dropped` leaves have no gradients on any rank, and nothing is computed or sent for them alone. `traces` must be of
    the same pipeline, leaves, and kind of state.
    """
    expected = list(leaves)[::-1] if arrival is None else list(arrival)
    if sorted(expected) != sorted(leaves):
        raise ValueError(f"lower: arrival must name each of the leaves {list(leaves)} once, got {expected}")
    buckets = assign_buckets({path: leaves[path].nbytes for path in expected}, bucket_caps)
    request = Request(sync, dict(leaves), state, buckets, donation, frozenset(dropped), world, backend)
    was_enabled = gc.isenabled()
    gc.disable()  # it would scan a graph's hundreds of thousands of objects again and again
    try:
        return plan_of(trace(request)) if traces is None else traces.plan(request)
    finally:
        if was_enabled:
            gc.enable()


class Traces:
    """A cache of the last trace. The trace may also serve plans with other buckets or other dropped leaves."""

    def __init__(self) -> None:
        self._last: Draft | None = None
        self._sizes: dict[str | None, int] = {}

    def of(self, request: Request) -> Draft:
        """Return a trace for `request`, a copy that passes may change."""
        sizes, last = sizes_of(request), self._last
        is_alike = last is not None and (sizes, last.request.backend) == (self._sizes, request.backend)
        if last is not None and last.is_by_bucket:
            is_alike &= (last.request.buckets, last.request.dropped) == (request.buckets, request.dropped)
        if last is None or not is_alike or not last.phase.holds_for(request.state, sizes):
            made = trace(request)
            self._last = last = replace(made, request=replace(request, state=None))  # state would keep tensors alive
            self._sizes = sizes
        return copied(last, request)

    def plan(self, request: Request) -> Plan:
        return plan_of(self.of(request))

    def clear(self) -> None:
        self._last = None


def plan_of(draft: Draft) -> Plan:
    """Run the passes on a trace and return the plan. The passes change the trace."""
    for step in _PASSES:
        draft = step(draft)
    segments = emit(draft)
    request, placement = draft.request, draft.placement
    outputs = output_nodes(draft.graph)
    results: list[Any] = [name_of(node, draft.names) for node in outputs]
    overwritten = {draft.names[node] for node in placement.overwritten}
    by_name = {name: node for node, name in draft.names.items()}
    counted = [*map(StatePart, draft.phase.counters), *map(Divisor, draft.phase.groups)]
    following = [outputs[len(request.leaves) + i] for i in draft.phase.counters]
    parts, _ = tree.flatten_any(request.state)
    return Plan(
        sync=request.sync,
        leaves=request.leaves,
        buckets=request.buckets,
        segments=segments,
        means={path: name for path, name in zip(request.leaves, results, strict=False) if name is not None},
        state=tuple(results[len(request.leaves) :]),
        phase=draft.phase,
        following=numbers(following, [by_name[name] for name in counted]),
        numbers=(*(parts[i] for i in draft.phase.counters), *sizes_of(request).values()),
        overwrites=frozenset(name.path for name in overwritten if isinstance(name, Grad)),
        overwrites_state=tuple(sorted(name.index for name in overwritten if isinstance(name, StatePart))),
        memories={path: name_of(memory, draft.names) for path, memory in placement.memories.items()},
        constants={name: draft.held[name.name] for name in draft.names.values() if isinstance(name, Held)},
        scratch=placement.scratch,
        peak_bytes=_peak_bytes(draft),
        backend=request.backend,
    )


def _peak_bytes(draft: Draft) -> int:
    """Return the peak memory of a step, in addition to gradients and state."""
    placement = draft.placement
    nodes = [node for segment in draft.segments for node in (*segment.nodes, segment.launches) if node is not None]
    persistent = sum(_buffer_bytes(launch_of(node)[1]) for node in nodes if node.target is launch)
    persistent += sum(draft.request.leaves[path].nbytes for path in placement.results)
    persistent += sum(spec.nbytes for spec in placement.scratch.values())
    last_read: dict[Any, float] = {}
    for when, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_read[placement.memory(source)] = when
    last_read |= {
        placement.memory(node): float("inf") for node in output_nodes(draft.graph) if isinstance(node, fx.Node)
    }
    now = peak = 0
    freed: dict[float, int] = {}
    for when, node in enumerate(nodes):
        is_placed = node in placement.stored_in or node in placement.targets
        if not is_placed and node.target not in (launch, take, *OUT):
            now += _nbytes(value(node))
            peak = max(peak, now)
            last = last_read.get(node, when)
            freed[last] = freed.get(last, 0) + _nbytes(value(node))
        now -= freed.pop(when, 0)
    return persistent + peak


def _buffer_bytes(collective: Collective) -> int:
    received = [] if collective.kind.is_in_place else [collective.receive_shape]
    return sum(torch.Size(shape).numel() * collective.dtype.itemsize for shape in [collective.send_shape, *received])


def _nbytes(made: Any) -> int:
    parts = made if isinstance(made, tuple | list) else [made]
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))


def planned_world(pipeline: Expression, groups: Collection[str | None] | None, world_size: WorldSize | None) -> World:
    """Return the world to plan `pipeline` for (it may also be an outer step): see `lower`.

    `groups` are the groups that the pipeline reduces over; None if unknown.
    """
    if world_size is None:
        return World()
    known = sorted(groups or (), key=str)
    names = ["the default group (None)" if group is None else f"group {group!r}" for group in known] or ["no group"]
    over = " and ".join(names)
    if not isinstance(world_size, Mapping):
        n = _checked("world_size", world_size)
        if n > 1 and len(known) > 1:
            raise ValueError(
                f"lower: {pipeline!r} reduces over {over}, but world_size={n} does not give the ranks of each group; "
                f"give each number by name: world_size={{{', '.join(f'{group!r}: ...' for group in known)}}}"
            )
        return World(size=n)
    sizes = {group: _checked(f"world_size[{group!r}]", n) for group, n in world_size.items()}
    if groups is not None and {*sizes} != {*groups}:
        raise ValueError(
            f"lower: world_size must give exactly the sizes of the groups of {pipeline!r}, which reduces over {over}; "
            f"got {sizes}"
        )
    return World(size=sizes)


def _checked(what: str, n: Any) -> int:
    if (size := checked_int(f"lower: {what}", n)) < 1:
        raise ValueError(f"lower: {what} must be at least 1, or None for the live groups, got {size}")
    return size
