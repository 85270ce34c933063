"""`lower`: from a pipeline and parameters to a plan, pass by pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fnddp import collectives, tree
from fnddp.plan.combine import MB, assign_buckets, combine
from fnddp.plan.emit import emit, name_of
from fnddp.plan.ir import Collective, launch, output_nodes
from fnddp.plan.order import order
from fnddp.plan.plan import LeafSpec, Plan
from fnddp.plan.reuse import Donate, Memory
from fnddp.plan.simplify import simplify
from fnddp.plan.trace import trace
from fnddp.sync import State, Sync
from fnddp.tree import Leaves, Tree


def lower(
    sync: Sync,
    params: Tree,
    *,
    state: State = None,
    world_size: int | None = None,
    arrival: Sequence[str] | None = None,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    donate: Donate = "no",
) -> Plan:
    leaves, _ = tree.flatten(params)
    state = sync.init(params) if state is None else state
    expected = list(reversed(leaves)) if arrival is None else list(arrival)
    specs = {path: spec_of(leaf) for path, leaf in leaves.items()}
    buckets = assign_buckets(
        {path: specs[path].nbytes for path in expected}, cap=bucket_cap_mb * MB, first_cap=first_bucket_mb * MB
    )
    with collectives.planned_world(world_size):
        traced = trace(sync, leaves, state)
        simplify(traced.module.graph)
        module = combine(traced.module, traced.leaves, buckets)
    graph = module.graph
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    leaf_names = dict(zip(leaves, inputs, strict=False))
    segments = order(graph, traced.leaves, buckets, decode_last=donate == "at_end")
    memory = Memory(graph, segments, traced.leaves, donate)
    steps = emit(module, segments, memory, leaf_names)
    results = [name_of(node) for node in output_nodes(graph)]
    launched = [step.launches for step in steps if step.launches is not None]
    return Plan(
        sync=sync,
        leaves=specs,
        buckets=buckets,
        collectives=tuple(launched),
        steps=tuple(steps),
        means=dict(zip(leaves, results, strict=False)),
        state=tuple(results[len(leaves) :]),
        leaf_names=leaf_names,
        state_names=tuple(inputs[len(leaves) :]),
        constants={node.name: getattr(module, str(node.target)) for node in graph.find_nodes(op="get_attr")},
        holds=traced.holds,
        peak_bytes=0,
    )


def spec_of(leaf: Tensor) -> LeafSpec:
    return LeafSpec(leaf.shape, leaf.dtype, leaf.device, leaf.stride())
