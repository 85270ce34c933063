"""Two levels: the laws on nodes of one and two ranks, exact means, who takes which loss, and what travels."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

import fnddp
from fnddp import DistributedDataParallel, allgather, allreduce, hierarchical, laws, none, quantize, two_shot
from fnddp.plan.period import period
from fnddp.simulation.ranks import run_threads
from tests.pipelines import TREES
from tests.ranks import on_ranks

pytestmark = pytest.mark.thorough

SHAPES = [(2, 2), (1, 2), (2, 1)]  # nodes, ranks in each
BOTH = "hierarchical(quantize(two_shot(group='across'), bits=4), intra=quantize(two_shot(group='inside')))"
LOSSY = [
    "hierarchical(fp16(all_reduce(group='across')), intra='inside')",
    "hierarchical(error_feedback(powersgd(all_reduce(group='across'), min_compression_rate=0)), intra='inside')",
    "cast(hierarchical(powersgd(all_gather('across')), 'inside', shard=False), 'bfloat16', rounding='stochastic')",
    "error_feedback(hierarchical(sign(all_gather('across')), intra='inside'))",
    "hierarchical(cast(all_reduce('across'), 'float16', rounding='stochastic'), intra='inside', shard=False)",
    BOTH,
    "hierarchical(powersgd(all_reduce('across'), min_compression_rate=0), intra=bf16(two_shot(group='inside')))",
    "error_feedback(hierarchical(sign(all_gather('across')), intra=sign(two_shot(group='inside'))))",
    "rotate(hierarchical(error_feedback(quantize(two_shot(group='across'), bits=4), residual='int8'), "
    "intra=quantize(two_shot(group='inside'), rounding='stochastic')), block=8)",
]
EXACT = [
    "hierarchical(all_reduce(group='across'), intra='inside')",
    "hierarchical(all_gather('across'), intra='inside')",
    "hierarchical(all_reduce(group='across'), intra='inside', shard=False)",
    "hierarchical(all_reduce(group='across'), intra=two_shot(group='inside'))",
]


def groups(rank: int, nodes: int, size: int) -> dict[str, dist.ProcessGroup]:
    inside = [dist.new_group([node * size + i for i in range(size)]) for node in range(nodes)]
    across = [dist.new_group([node * size + i for node in range(nodes)]) for i in range(size)]
    return {"inside": inside[rank // size], "across": across[rank % size]}


def made(text: str, rank: int, nodes: int, size: int) -> fnddp.Sync:
    for name, group in groups(rank, nodes, size).items():
        text = text.replace(f"'{name}'", f"'{group.group_name}'")
    return fnddp.parse(text)


def few(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Shards that are matrices, and vectors; a leaf that is summed whole. Lowering takes long, so no more."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    weight, bias = torch.randn(8, 6, generator=generator), torch.randn(5, generator=generator)
    return {"weight": weight, "bias": bias.double(), "count": torch.tensor(rank + step)}


def check_laws(rank: int, text: str, nodes: int, size: int) -> None:
    sync = made(text, rank, nodes, size)
    for law in laws.LAWS:
        is_for_exact = law is laws.law_5_lossless_is_exact
        if law not in laws.LOWERED and laws.applies(law, sync) and (not is_for_exact or text in EXACT):
            law(rank, sync, TREES["mixed"])
    if nodes == size:
        donation = laws.DONATIONS[len(text) % len(laws.DONATIONS)]
        laws.law_6_lowered_is_eager(rank, sync, few, donation=donation)
        if text == LOSSY[1]:
            laws.law_7_resuming_an_engine_is_exact(rank, sync, few)


@pytest.mark.parametrize(
    ("text", "nodes", "size"),
    [(text, *shape) for i, text in enumerate(LOSSY + EXACT) for shape in (SHAPES[0], SHAPES[1 + i % 2])],
)
def test_laws(text, nodes, size):
    run_threads(nodes * size, check_laws, text, nodes, size, seconds=300)


@on_ranks(4)
def test_on_gloo_processes(rank: int) -> None:
    """In groups of two, where a ring adds in one order, lowered is eager to the bit."""
    for text in (LOSSY[1], EXACT[0]):
        check_laws(rank, text, 2, 2)


def sent_by(plan: fnddp.Plan) -> list[tuple[str, int, int, int]]:
    return [(c.kind.name, c.world_size, c.wire_bytes, c.slot) for c in plan.collectives]


@pytest.mark.parametrize(
    "text",
    [
        "hierarchical(error_feedback(powersgd(fp16(all_reduce('across')))), intra='inside')",
        "hierarchical(sign(two_shot(group='across')), intra='inside')",
        BOTH,
    ],
)
@on_ranks(6, threads=True)
def test_a_plan_of_given_sizes_is_that_of_real_ranks(rank, text):
    leaves = {"w": torch.empty(40, 12), "b": torch.empty(5)}
    real = fnddp.lower(made(text, rank, nodes=3, size=2), leaves)
    planned = fnddp.lower(fnddp.parse(text), leaves, world_size={"inside": 2, "across": 3})
    assert (sent_by(planned), planned.peak_bytes) == (sent_by(real), real.peak_bytes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (6, "world_size=6 does not give the ranks of each group; .* world_size={'across': ..., 'inside': ...}"),
        ({"inside": 2}, "reduces over group 'across' and group 'inside'; got {'inside': 2}"),
        ({"inside": 2, "across": 3, None: 6}, "must give exactly the sizes of the groups of"),
        ({"inside": 2, "across": 0}, "world_size\\['across'\\] must be at least 1"),
        (0, "world_size must be at least 1"),
    ],
)
def test_wrong_sizes(sizes, message):
    for plan in (fnddp.lower, period):
        with pytest.raises(ValueError, match=message):
            plan(fnddp.parse(LOSSY[0]), {"w": torch.empty(8, 2)}, world_size=sizes)


@on_ranks(4, threads=True)
def test_the_loss_of_a_shard_is_its_owners(rank: int) -> None:
    """What is not sent is n times the loss on the shard's owner, whose position in the node is its shard's."""
    pair = groups(rank, 2, 2)
    sync = hierarchical(fnddp.fp16(allreduce).over(pair["across"]), intra=pair["inside"])
    leaf = {"w": torch.full((4, 3), (rank + 1) / 3)}
    done = sync.exchange(leaf, sync.init(leaf))
    mine = rank % 2
    lost = leaf["w"] - done.sent["w"]
    assert lost[2 * (1 - mine) : 2 * (1 - mine) + 2].eq(0).all()
    node = sum((2 * (rank // 2) + i + 1) / 3 for i in range(2)) / 2
    want = 2 * (torch.tensor(node) - torch.tensor(node).half())
    torch.testing.assert_close(lost[2 * mine : 2 * mine + 2], want.expand(2, 3), rtol=1e-3, atol=1e-7)


DIVISION = {"inside": ((0, 1), (2, 3)), "across": ((0, 2), (1, 3))}


@pytest.mark.parametrize("text", [BOTH, BOTH.replace("')))", "'), bits=4, rounding='stochastic'))")])
def test_simulated_levels_are_real_ones(text: str) -> None:
    """To the bit: both carriers add in rank order."""
    leaves = [few(rank, 0) for rank in range(4)]

    def mean_of(rank: int) -> dict[str, torch.Tensor]:
        sync = made(text, rank, 2, 2)
        return sync(leaves[rank], sync.init(leaves[rank]))[0]

    simulation = fnddp.simulate(text, 4, groups=DIVISION)
    stacked = {path: torch.stack([each[path] for each in leaves]) for path in leaves[0]}
    together, _ = simulation(stacked, simulation.init(stacked))
    for rank, mean in enumerate(run_threads(4, mean_of)):
        for path, leaf in mean.items():
            assert torch.equal(leaf, together[path][rank] if together[path].shape != leaf.shape else together[path])


def test_training_on_two_simulated_levels_is_near_that_on_one() -> None:
    batches = [(x,) for x in torch.randn(5, 4, 8, 6, generator=torch.Generator().manual_seed(0))]
    options = {"world_size": 4, "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}

    def params_after(text: str, **groups: object) -> torch.Tensor:
        loss = lambda params, x: (x @ params["w"]).square().mean()  # noqa: E731
        done = fnddp.simulate_training(loss, {"w": torch.ones(6, 3)}, batches, text, groups=groups or None, **options)
        return done.params["w"]

    assert 0 < (params_after("allreduce") - params_after(BOTH, **DIVISION)).abs().max() < 0.05
    with pytest.raises(ValueError, match="the mean of leaf 'w' differs between ranks"):
        params_after("all_reduce('inside')", inside=DIVISION["inside"])


@on_ranks(2)
def test_nodes_of_one_rank(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("across", "inside"))  # "across" is the default group
    sync = hierarchical(allreduce.over((mesh, "across")), intra=(mesh, "inside"))
    leaves = {"w": torch.full((3,), float(rank))}
    assert sync(leaves, sync.init(leaves))[0]["w"].tolist() == [0.5] * 3
    with pytest.raises(ValueError, match="another group than"):
        hierarchical(allreduce.over((mesh, "inside")), intra=(mesh, "inside")).init(leaves)
    planned = hierarchical(allreduce.over("across"), intra="inside")
    assert fnddp.lower(planned, leaves, world_size={"inside": 1, "across": 2}).collectives


@on_ranks(4)
def test_a_module_trains_over_two_levels(rank: int) -> None:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    sync = hierarchical(allreduce.over((mesh, "across")), intra=(mesh, "inside"))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    wrapped = [DistributedDataParallel(copy.deepcopy(model), sync=each) for each in (sync, allreduce)]
    fnddp.verify(sync, {"w": torch.empty(6, 2)})  # names of groups differ between ranks, pipelines do not
    for _ in range(3):
        for each in wrapped:
            each.zero_grad()
            each(torch.randn(8, 5, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        mean, want = ([p.grad for p in each.parameters()] for each in wrapped)
        torch.testing.assert_close(mean, want)


def test_pipelines_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="takes a sum, but the node takes a mean"):
        hierarchical(fnddp.all_reduce(op="sum"))
    with pytest.raises(ValueError, match=r"another group than '5', that inside the node, .*name it, hier"):
        hierarchical(allreduce.over("5"), intra="5").init({})
    with pytest.raises(ValueError, match="reduces over two groups, so over\\(group\\) cannot set both"):
        hierarchical(allreduce.over("5"), intra="6").over("7")
    with pytest.raises(TypeError, match="cannot be summed"):
        fnddp.topk(hierarchical(none), k=1)
    fitting = "must be the group inside the node, or codecs around two_shot"
    codec = quantize(two_shot)
    for intra in (quantize(allgather), codec.inner(server_memory=True), allreduce, fnddp.rotate(codec)):
        with pytest.raises(TypeError, match=fitting):
            hierarchical(allreduce.over("5"), intra=intra.over("6"))
    with pytest.raises(TypeError, match=f"{fitting}.*got shard=False"):
        hierarchical(allreduce.over("5"), intra=codec.over("6"), shard=False)
    with pytest.raises(ValueError, match=r"another group than '5', that inside the node"):
        hierarchical(allreduce.over("5"), intra=codec.over("5")).init({})
    with_codec = hierarchical(allreduce.over("5"), intra=codec)
    assert with_codec.over("7", unnamed_only=True) == hierarchical(allreduce.over("5"), intra=codec.over("7"))
    assert with_codec.over("7", unnamed_only=True).over("8", unnamed_only=True).groups == {"5", "7"}
    assert with_codec.over("7", unnamed_only=True).over(None) == hierarchical(allreduce, intra=codec)
    named = hierarchical(allreduce.over("5"), intra="6")
    assert named.over("7", unnamed_only=True) == named
    assert hierarchical(none).over("7", unnamed_only=True) == hierarchical(none, intra="7")


def test_ranks_of_other_nodes_have_other_means_of_what_is_not_sent_across():
    sync = hierarchical(fnddp.partition({"experts*": none, "*": allreduce.over("across")}), intra="inside")
    assert not sync.agrees
    with pytest.raises(TypeError, match="gives ranks different means of some leaves"):
        fnddp.clip_by_global_norm(sync, max_norm=1.0)
    assert hierarchical(none, intra="inside").agrees  # one node
    assert hierarchical(allreduce.over("across"), intra="inside").agrees
