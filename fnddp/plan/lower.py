"""`lower`: from a pipeline and parameters to a plan, pass by pass."""

from collections.abc import Container, Mapping, Sequence

from fnddp import collectives, tree
from fnddp.plan.ir import LeafSpec, output_nodes, uncombined_bytes
from fnddp.plan.passes.combine import MB, assign_buckets, combine
from fnddp.plan.passes.drop import drop
from fnddp.plan.passes.emit import emit, name_of
from fnddp.plan.passes.fuse import fuse
from fnddp.plan.passes.order import order
from fnddp.plan.passes.place import Donation, Memory, Result
from fnddp.plan.passes.simplify import simplify
from fnddp.plan.passes.trace import trace
from fnddp.plan.plan import Plan
from fnddp.sync import State, Sync
from fnddp.tree import Tree

KEEP = Donation()


def lower(
    sync: Sync,
    params: Tree,
    *,
    state: State = None,
    world_size: int | None = None,
    arrival: Sequence[str] | None = None,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    donation: Donation = KEEP,
) -> Plan:
    """Lowers a pipeline to a static schedule: what one rank computes and sends in one step, in which order.

    Nothing is run and nothing is sent: the plan is data, to be printed, costed and drawn. The adapters lower by
    themselves; use this to look at a pipeline, or to plan for a cluster on a laptop.

    Args:
        sync: The pipeline.
        params: Any pytree of parameters or gradients; meta tensors will do.
        state: The pipeline's state, whose counters choose the phase (a warm-up, or what comes after it); None for the
            first step.
        world_size: Plan for groups of this size, without a process group; None for the groups that there are.
        arrival: Leaf paths in the order in which their gradients are expected; None for the reverse of `params`.
        bucket_cap_mb: Gradients are bucketed, in the order of arrival, and a bucket is closed once it holds this
            many MiB. A bucket's payloads travel together.
        first_bucket_mb: The same for the first bucket.
        donation: What the executor may write over; nothing, unless an adapter owns gradients or state.

    Raises:
        LoweringError: The pipeline reads values or runs foreign code, so it has no static schedule.
        ValueError: `arrival` does not name the leaves of `params`, or a size is not positive.

    >>> import torch
    >>> from fnddp import allreduce, error_feedback, fp16, powersgd
    >>> params = {"weight": torch.empty(256, 256, device="meta"), "bias": torch.empty(256, device="meta")}
    >>> plan = lower(error_feedback(powersgd(fp16(allreduce), rank=4)), params, world_size=1024)
    >>> plan.wire_bytes, plan.rounds, len(plan.collectives)
    (4608, 2, 2)
    """
    if bucket_cap_mb <= 0 or first_bucket_mb <= 0:
        raise ValueError(
            f"lower: bucket_cap_mb and first_bucket_mb must be positive, got {bucket_cap_mb} and {first_bucket_mb}"
        )
    leaves, _ = tree.flatten(params)
    with collectives.planned_world(world_size):
        state = sync.init(leaves) if state is None else state
    return lower_leaves(
        sync,
        {path: LeafSpec.of(leaf) for path, leaf in leaves.items()},
        state,
        world_size=world_size,
        arrival=arrival,
        bucket_caps=(first_bucket_mb * MB, bucket_cap_mb * MB),
        donation=donation,
    )


def lower_leaves(
    sync: Sync,
    leaves: Mapping[str, LeafSpec],
    state: State,
    *,
    world_size: int | None = None,
    arrival: Sequence[str] | None = None,
    bucket_caps: Sequence[float],
    donation: Donation,
    dropped: Container[str] = frozenset(),
) -> Plan:
    """`lower`, for leaves by path, and buckets of any number of sizes, in bytes.

    Args:
        dropped: Leaves without gradients on any rank. What is only theirs is neither computed nor sent.
    """
    expected = list(leaves)[::-1] if arrival is None else list(arrival)
    if sorted(expected) != sorted(leaves):
        raise ValueError(f"lower: arrival must name each of the leaves {list(leaves)} once, got {expected}")
    buckets = assign_buckets({path: leaves[path].nbytes for path in expected}, bucket_caps)

    with collectives.planned_world(world_size):
        traced = trace(sync, leaves, state)
        drop(traced.module.graph, traced.leaves, dropped)
        fuse(simplify(traced.module.graph))
        module = combine(traced.module, traced.leaves, buckets)
    graph = module.graph
    segments = order(graph, traced.leaves, buckets)
    memory = Memory(graph, segments, traced.leaves, donation)
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    leaf_names = dict(zip(leaves, inputs, strict=False))
    steps = emit(module, segments, memory, leaf_names)
    results = [name_of(node) for node in output_nodes(graph)]
    return Plan(
        sync=sync,
        leaves=dict(leaves),
        buckets=buckets,
        collectives=tuple(step.launches for step in steps if step.launches is not None),
        steps=tuple(steps),
        means=dict(zip(leaves, results, strict=False)),
        state=tuple(results[len(leaves) :]),
        leaf_names=leaf_names,
        state_names=tuple(inputs[len(leaves) :]),
        overwrites=frozenset(path for path, name in leaf_names.items() if name in memory.overwritten),
        overwrites_state=frozenset(name for name in inputs[len(leaves) :] if name in memory.overwritten),
        results={Result(i).name: path for i, path in enumerate(leaves) if i in memory.results},
        memories={path: memory.memories[i].name for i, path in enumerate(leaves) if i in memory.memories},
        constants={node.name: getattr(module, str(node.target)) for node in graph.find_nodes(op="get_attr")},
        counters=traced.counters,
        holds=traced.holds,
        uncombined_bytes=uncombined_bytes(graph),
        peak_bytes=memory.peak_bytes(),
    )
