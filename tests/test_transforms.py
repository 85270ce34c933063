"""What the laws do not say about single transforms: options, edge cases, errors."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fnddp
from fnddp import all_reduce, allreduce, bf16, bucketize, cast, error_feedback, fp16, from_hook, partition, powersgd
from fnddp.core.buckets import MB
from fnddp.core.random import normal
from fnddp.core.sync import groups_of
from fnddp.laws import bits
from fnddp.transforms.orthogonalize import orthogonalize, orthogonalize_all, unit_rows
from tests.pipelines import EXAMPLES, METHODS, grads
from tests.ranks import on_ranks


@on_ranks(4, threads=True)
def test_integers_and_bools(rank):
    leaves = {
        "int64": torch.tensor([rank, -rank, 2**60]),
        "bool": torch.tensor([rank == 0, rank < 2, True]),
        "uint8": torch.tensor([200], dtype=torch.uint8),
    }
    for op, want in {  # ranks hold 0, 1, 2, 3: means 1.5 and -1.5 round up
        "mean": [2, -1, 2**60, False, True, True],
        "sum": [6, -6, 2**62, True, True, True],
        "max": [3, 0, 2**60, True, True, True],
        "min": [0, -3, 2**60, False, False, True],
    }.items():
        reduced, _ = all_reduce(op=op)(leaves, ())
        assert [str(leaf.dtype) for leaf in reduced.values()] == [f"torch.{name}" for name in leaves]
        assert reduced["int64"].tolist() + reduced["bool"].tolist() == want


def test_max_of_complex_is_refused():
    with pytest.raises(ValueError, match=r"leaf 'z' is torch.complex64, which has no max"):
        all_reduce(op="max")({"z": torch.ones(2, dtype=torch.complex64)}, ())


@on_ranks(3, threads=True)
def test_groups_are_kept_by_name(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(TypeError, match="this rank is not in that process group"):
            all_reduce(group)
        return
    sync = error_feedback(fp16(all_reduce(group)))
    again = fnddp.parse(repr(sync))
    assert again == sync == error_feedback(fp16(allreduce)).over(group)
    assert sync.over(None) == error_feedback(fp16(allreduce))
    # In the order of the expression, which is the same on all ranks.
    assert groups_of(partition({"a": all_reduce("z"), "b": all_reduce("y"), "*": allreduce})) == ("z", "y", None)
    named = fnddp.warmup(all_reduce(group), steps=1)
    assert named.over("other", unnamed_only=True) == fnddp.warmup(all_reduce(group), 1, all_reduce("other"))
    mean, _ = again({"w": torch.tensor([float(rank)])}, again.init({"w": torch.ones(1)}))
    assert mean["w"].item() == 0.5


@pytest.mark.thorough
@on_ranks(4)
def test_device_meshes(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for group, other in (((mesh, "replicate"), rank ^ 2), ((mesh, 1), rank ^ 1), (mesh["shard"], rank ^ 1)):
        mean, _ = all_reduce(group)({"w": torch.tensor([float(rank)])}, ())
        assert mean["w"].item() == (rank + other) / 2


BAD_OPTIONS = {
    "all_reduce(op=None)": "all_reduce: op must be a string, got None",
    "dct_topk(allgather, index=None)": "dct_topk: index must be a string, got None",
    "powersgd(allreduce, warm_start='False')": "powersgd: warm_start must be True or False, got 'False'",
    "to_owners(owners=2)": r"to_owners: owners must be a table of Owners.of\(leaves, ranks\), or None, got 2",
    "all_reduce(op='avg')": "op must be one of mean, sum, max, min, got 'avg'",
    "all_reduce(group=3)": "group must be a ProcessGroup",
    "warmup(allreduce, 3, before=None)": "warmup: before must be a pipeline",
    "warmup(allreduce, steps=2.5)": "warmup: steps must be an int, got 2.5",
    "warmup(allreduce, -1)": "steps must be at least 0, got -1",
    "cast(allreduce, 'float16', rounding='up')": "cast: rounding must be one of nearest, stochastic, got 'up'",
    "cast(allreduce, 'float32', rounding='stochastic')": "is for float16 and bfloat16, got torch.float32",
    "cast(allreduce, 'float16', seed=3)": "cast: seed=3 has no effect without rounding='stochastic'",
    "cast(allreduce, 'load')": "dtype must be one of float16, bfloat16, float32, float64, got 'load'",
    "bucketize(allreduce, cap_mb=0)": "cap_mb must be positive",
    "bucketize(allreduce, cap_mb=1e999)": "bucketize: cap_mb must be a finite number, got inf",
    "bucketize(allreduce, cap_mb=True)": "bucketize: cap_mb must be a finite number, got True",
    "bucketize(allreduce, first_cap_mb=0)": "first_cap_mb must be positive",
    f"powersgd(allreduce, seed={2**64})": "seed must fit in 64 bits",
    "powersgd(allreduce, rank=0)": "rank must be at least 1, got 0",
    "powersgd(allreduce, rank=True)": "powersgd: rank must be an int, got True",
    "powersgd(allreduce, orthogonalization='svd')": "got 'svd'",
    "powersgd(allreduce, epsilon=-0.1)": "epsilon must be at least 0",
    "powersgd(allreduce, min_compression_rate=-0.1)": "min_compression_rate must be at least 0",
    "powersgd(allreduce, refresh=1)": r"refresh must be 0 \(never\) or at least 2 exchanges, got 1",
    "powersgd(allreduce, refresh=4, warm_start=False)": "go on from the last factors; leave warm_start=True",
    "powersgd(allreduce, alternate=True, warm_start=False)": "leave warm_start=True",
    "powersgd(fp16(all_reduce(op='max')))": "factors P and Q must add",
    "error_feedback(allreduce, decay='1')": "decay must be a finite number, got '1'",
    "error_feedback(allreduce, decay=1.5)": r"decay must be in \[0, 1\], got 1.5",
    "error_feedback(allreduce, residual='int4')": "error_feedback: residual must be one of float32, int8, got 'int4'",
    "error_feedback(allreduce, decay=-0.5)": r"decay must be in \[0, 1\], got -0.5",
    "error_feedback(all_reduce(op='min'))": "compression errors do not add up",
    "ef21(allgather, eta=0)": r"ef21: eta must be in \(0, 1\], got 0",
    "ef21(allgather, eta=1.5)": "got 1.5",
    "ef21(all_reduce(op='max'))": "compression errors do not add up",
    "momentum_correction(allgather, momentum=1.0)": r"momentum must be in \[0, 1\), got 1.0",
    "momentum_correction(allgather, momentum=-0.1)": "got -0.1",
    "momentum_correction(all_reduce(op='min'))": "compression errors do not add up",
    "shared_momentum(allreduce, beta=1.0)": r"shared_momentum: beta must be in \[0, 1\), got 1.0",
    "shared_momentum(allreduce, beta=-0.1)": "got -0.1",
    "shared_momentum(bf16(all_reduce(op='sum')))": "takes a sum over ranks, .*; use a mean",
    "shared_momentum(partition({'a': none, '*': allreduce}))": "put shared_momentum around the part that all ranks",
    "shared_momentum(error_feedback(every(2, allreduce)))": r"such as every\(n, shared_momentum\(...\)\)",
    "shared_momentum(bucketize(shared_momentum(allreduce)))": "it contains shared_momentum, which also has a momentum",
    "shared_momentum(momentum_correction(allreduce))": "it contains momentum_correction, which also has a mom",
    "error_feedback(bf16(shared_momentum(allreduce)))": r"put error_feedback inside, shared_momentum\(error_feedback\(",
    "error_feedback(bucketize(ef21(topk(allgather, k=1))))": "error_feedback: it contains ef21, which also has a",
    "ef21(switch({0: momentum_correction(allreduce)}))": "ef21: it contains momentum_correction, which also has a",
    "momentum_correction(error_feedback(allreduce))": "momentum_correction: it contains error_feedback, which also has",
    "partition({})": "no rules",
    "partition({'*': 'allreduce'})": "rules must be a dict of pipelines by pattern",
    "partition('ab')": "rules must be a dict of pipelines by pattern, got 'ab'",
    "partition((('*', allreduce), ('*', allreduce)))": "a pattern occurs twice",
    f"partition({{'{'*' * 2000}': allreduce}})": "a pattern has 2000 characters",
    "every(0, allreduce)": "every: n must be at least 1, got 0",
    "powersgd(every(2, allreduce))": r"put the skipping transform outside, such as every\(n, powersgd\(...\)\)",
    "measure(partition({'*': every(2, allreduce)}))": r"such as every\(n, measure\(...\)\)",
    "measure(all_reduce(op='sum'))": "takes no mean over one process group",
    "measure(allreduce, every_steps=0)": "every_steps must be at least 1, got 0",
    "clip_by_global_norm(allreduce, max_norm=0)": "max_norm must be positive, got 0",
    "switch({})": "must begin at step 0",
    "switch({0: allreduce, 2.5: allreduce})": "a step must be an int, got 2.5",
    "switch({0: 'allreduce'})": "must be a dict of pipelines by step",
    # What all ranks decide needs means that all have.
    "clip_by_global_norm(partition({'e*': none, '*': allreduce}), 1.0)": "gives ranks different means of some leaves",
    "measure(partition({'e*': none, '*': allreduce}))": "gives ranks different means of some leaves",
    "partition({'e*': fp16(none, check=True), '*': allreduce})": "gives ranks different means of some leaves",
    "clip_by_global_norm(partition({'e*': all_reduce(group='1'), '*': allreduce}), 1.0)": "gives ranks different means",
    "hierarchical(clip_by_global_norm(all_reduce('1'), 1.0), intra='0')": "needs whole leaves, .* put it "
    r"outside, clip_by_global_norm\(hierarchical\(...\)\), or keep leaves whole with shard=False",
    "random_k(allreduce)": "random_k: give ratio or k",
    "random_k(allreduce, k=0)": "k must be at least 1",
    "random_block(allreduce, ratio=1.5)": r"ratio must be in \(0, 1\]",
    "random_block(allreduce, ratio=0.5, block=3)": "give ratio or block",
    "rotate(allreduce, block=24)": "rotate: block must be a power of two from 2 to 1024, got 24",
    "rotate(allreduce, block=1)": "block must be a power of two from 2 to 1024, got 1",
    "rotate(allreduce, block=2048)": "block must be a power of two from 2 to 1024, got 2048",
    "rotate(all_reduce(op='max'))": "rotate: .* takes a max or min, of elements that are mixed",
    "quantize(rotate(two_shot), bits=4)": r"quantize: rotate\(two_shot\) cannot carry encoded payloads",
    "fp8(allgather, format='e3m4')": "format must be one of e4m3, e5m2, e2m1",
    "fp8(allgather, format='e2m1', block=5)": "block must be even for e2m1, .* got 5",
    "fp8(allgather, scale='e4m3')": "scale must be one of float32, e8m0",
    "fp8(bf16(allgather), scale='e8m0')": "its payload has no floating-point numbers",
    "fp8(allgather, block=0)": "block must be at least 1",
    "quantize(allgather, bits=2, block=6)": "multiple of 4",
    "quantize(allgather, bits=3)": "bits must be one of 8, 4, 2, got 3",
    "lloyd_max(allgather, bits=5)": "bits must be one of 1, 2, 3, 4, got 5",
    "lloyd_max(allgather, block=12)": "block must be a positive multiple of 8, got 12",
    "sign(allgather, chunk=12)": "chunk must be a positive multiple of 8, got 12",
    "qsgd(allgather, levels=128)": r"levels must be in 1\.\.127",
    "terngrad(allgather, clip=0)": "clip must be positive",
    "topk(allgather, k=1, chunk=0)": "chunk must be at least 1",
    "dct_topk(allgather, index='uint8')": "index must be one of small, int16",
    "dct_topk(allgather, chunk=200, index='int16')": "use small",
    "natural(topk(allgather, k=1))": r"its payload has no floating-point numbers for topk\(allgather, k=1\) to encode",
    "majority_vote(topk(allgather, k=1))": "its payload has no floating-point numbers",
    "sign(topk(allgather, k=1), scale='none')": "its payload has no floating-point numbers",
    "quantize(bucketize(allgather))": r"quantize: bucketize\(allgather\) cannot carry.*bucketize\(quantize",
    "quantize(allgather, seed=7)": "quantize: seed=7 has no effect without rounding='stochastic'",
    "topk(allgather)": "topk: give ratio or k",
    "topk(dct_topk(allgather), k=1)": r"topk: dct_topk needs unencoded gradients.* dct_topk\(topk\(allgather\)\)",
    "topk(majority_vote(two_shot), k=1)": r"topk: majority_vote\(two_shot\) cannot carry encoded payloads",
}


@pytest.mark.parametrize("text", BAD_OPTIONS, ids=lambda text: text[:60])
def test_bad_options_are_named_at_construction(text):
    with pytest.raises((TypeError, ValueError), match=BAD_OPTIONS[text]):
        fnddp.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp16(all_reduce), "inner must be a pipeline such as allreduce, got .*call it: all_reduce"),
        (lambda: error_feedback(fp16), r"error_feedback: inner must be a pipeline.*; call it: fp16\(\.\.\.\)"),
        (lambda: fp16(allreduce, 3), r"fp16\(\) takes 1 positional argument but 2 were given"),
        (lambda: cast(allreduce, torch.int8), "dtype must be one of .*, got torch.int8"),
        (lambda: from_hook(3), "expected hook"),
        (lambda: fnddp.lower(allreduce, {}, world_size=2.5), r"lower: world_size must be an int, got 2\.5"),
        (lambda: fnddp.lower(3, {}), "^lower: sync must be a pipeline such as allreduce, got 3$"),
        (lambda: fnddp.jit(fp16), r"^jit: sync must be a pipeline .*; call it: fp16\(\.\.\.\)$"),
        (lambda: fnddp.value_and_grad(torch.sum, "fp32(allreduce)"), "^parse: unknown name 'fp32'"),
        (lambda: fnddp.transform(dict), "^transform: expected a subclass of fnddp.Sync, .* got <class 'dict'>"),
        (
            lambda: from_hook(default_hooks.allreduce_hook)({"w": torch.ones(1)}, ()),
            r"needs a process group: call torch.distributed.init_process_group\(\) ",
        ),
    ],
)
def test_what_is_no_pipeline_and_no_option_is_refused(make, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        make()


def test_a_text_is_taken_wherever_a_pipeline_is():
    text, params = "fp16(allreduce)", {"w": torch.ones(2)}
    sync, batches = fnddp.parse(text), [(torch.ones(2, 1),)]
    fnddp.verify(text, params)
    means = fnddp.jit(text)(params, ())[0], fnddp.value_and_grad(lambda p: p["w"].sum(), text)(params, ())[1]
    assert bits(means) == bits((params, params))
    assert fnddp.lower(text, params, world_size=2).sync == fnddp.simulate(text, 2).sync == sync
    assert fnddp.outer.diloco(text, every=2) == fnddp.outer.diloco(sync, every=2)
    assert fnddp.outer.post_local_sgd(9, 2, before=text) == fnddp.outer.post_local_sgd(9, 2, before=sync)
    fnddp.simulate_training(
        lambda p, x: (p["w"] * x).sum(), params, batches, text, world_size=2, optimizer=lambda p: torch.optim.SGD(p)
    )
    fnddp.laws.check(text, ranks=(1,), grads=lambda rank, step: params)


@pytest.mark.parametrize("inner", [from_hook(default_hooks.allreduce_hook), fp16(allreduce, check=True)], ids=str)
def test_what_cannot_be_lowered_says_so_however_deep_it_is(inner):
    for sync in bucketize(inner), partition({"a": allreduce, "*": inner}), fnddp.switch({0: inner}):
        assert not sync.traceable
        with pytest.raises(fnddp.LoweringError, match="`traceable` is False"):
            fnddp.lower(sync, {"a": torch.ones(3), "w": torch.ones(4, 4)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype) -> None:
    """To one of the two neighbours, up as often as the distances say: of 4,000 draws, 6 standard deviations allowed."""
    draws, tiny = 4000, torch.finfo(dtype).smallest_normal
    x = torch.tensor([1.0, 1 / 3, -1.7, 3.0001, 700.3, -tiny * 1.001, tiny / 3, tiny * 0.77, 65504.0])
    sync = cast(allreduce, dtype, rounding="stochastic")
    leaf = {"w": x.expand(draws, -1), "z": torch.complex(x, -x)}
    read, state = sync(leaf, sync.init(leaf))
    nearest = x.to(dtype)
    step = torch.where((x - nearest.float()) * x.sign() > 0, 1, -1).to(torch.int16)  # of sign and magnitude
    other = (nearest.view(torch.int16) + step).view(dtype).float()
    up = (read["w"] == other).double().mean(0)
    assert ((read["w"] == nearest) | (read["w"] == other)).all()
    expected = ((x - nearest.float()) / (other - nearest.float())).double()
    assert ((up - expected).abs() <= 6 * (expected * (1 - expected) / draws).sqrt()).all()
    again, _ = sync(leaf, state)
    assert not torch.equal(again["w"], read["w"])  # each step draws anew
    assert torch.equal(sync(leaf, sync.init(leaf))[0]["w"], read["w"])


def test_what_is_not_finite_stays_so_in_stochastic_rounding() -> None:
    whole = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    for dtype in "float16", "bfloat16":
        sync = cast(allreduce, dtype, rounding="stochastic")
        mean, _ = sync({"w": whole}, sync.init({"w": whole}))
        assert mean["w"].isnan().tolist() == [True, True, False, False, False]
        assert mean["w"][2:].tolist() == [float("inf"), -float("inf"), float("inf")]


AS_GIVEN = {  # and what follows from defaults, which users run
    "bucketize(allreduce)": "bucketize(allreduce, cap_mb=25, first_cap_mb=1)",
    "error_feedback(allreduce)": "error_feedback(allreduce, decay=1, residual='float32')",
    "ef21(allreduce)": "ef21(allreduce, eta=1)",
    "momentum_correction(allreduce)": "momentum_correction(allreduce, momentum=0.9, masking=True)",
    "shared_momentum(allreduce)": "shared_momentum(allreduce, beta=0.9)",
    "powersgd(allreduce)": "powersgd(allreduce, 1, True, 2, 'cholesky', 1e-6, seed=0, alternate=False, refresh=0)",
    "random_k(allreduce, 0.5)": "random_k(allreduce, ratio=0.5, k=None, unbiased=False, seed=0)",
    "random_block(allreduce, 0.5)": "random_block(allreduce, ratio=0.5, block=None, unbiased=False, seed=0)",
    "rotate(allreduce)": "rotate(allreduce, block=32, seed=0)",
    "fp16(allreduce)": "cast(allreduce, 'float16', check=False, rounding='nearest', seed=0)",
}
AT_THE_END_OF_THEIR_RANGE = [
    *("error_feedback(allreduce, decay=0)", "momentum_correction(allreduce, momentum=0)"),
    "shared_momentum(allreduce, beta=0)",
    *("clip_by_global_norm(allreduce, max_norm=0.5)", "bucketize(allreduce, cap_mb=0.5, first_cap_mb=0.5)"),
    *("powersgd(allreduce, refresh=2)", "powersgd(allreduce, min_compression_rate=0, epsilon=0)"),
    "hierarchical(clip_by_global_norm(all_reduce(group='1'), 1.0), intra='0', shard=False)",
    *("rotate(allreduce, block=2)", "rotate(allreduce, block=1024)"),
    *("warmup(allreduce, steps=0)", "every(1, allreduce)", "qsgd(allgather, levels=127, block=1)"),
]


def test_defaults_and_options_at_the_end_of_their_range_are_taken():
    for text, whole in AS_GIVEN.items():
        assert fnddp.parse(text) == fnddp.parse(whole)
    for text in AT_THE_END_OF_THEIR_RANGE:
        assert fnddp.parse(repr(fnddp.parse(text))) == fnddp.parse(text)


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_what_is_done_to_an_output_reaches_neither_the_state_nor_an_input(text):
    sync = fnddp.parse(text)
    leaves = grads("model", 0, 0)
    state = sync.init(leaves)
    for _ in range(2):
        begun = state
        mean, sent, state = fnddp.laws.exchanged(sync, leaves, begun)
        before = bits((begun, state))
        given = {leaf.data_ptr() for leaf in leaves.values()}
        # What is sent may be an input, as it is; so may the mean of what is not reduced.
        own = [leaf for leaf in sent.values() if leaf is not None and leaf.data_ptr() not in given]
        own += [] if text in ("none", "unreduced()") else [leaf for leaf in mean.values() if leaf is not None]
        for leaf in own:
            leaf.fill_(7)
        assert bits((begun, state)) == before
        assert bits(leaves) == bits(grads("model", 0, 0))


def test_bad_leaves_are_named():
    sync = bucketize(fp16(allreduce))  # the call flattens the tree, for all pipelines
    for tree, error, message in [
        ({"a": [torch.ones(2), 3.0]}, TypeError, "leaf 'a.1' is a float, not a tensor; wrap it with torch.as_tensor"),
        (torch.nn.Linear(1, 1).parameters(), TypeError, "leaf '' is a generator, not a tensor; give dict.module"),
        ({"a": {1.5}}, TypeError, "leaf 'a' is a set, not a tensor; give dicts, lists and tuples of tensors, or reg"),
        ({"a": torch.ones(2).to_sparse()}, ValueError, r"leaf 'a' has layout torch.sparse_coo; synchronize leaf.to_de"),
        ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, ValueError, "two leaves have the path 'a.b'"),
    ]:
        with pytest.raises(error, match=message):
            sync(tree, ())


@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_exchange_takes_leaves_by_path(text):
    nested = {"layer": {"weight": torch.ones(12, 20), "bias": torch.ones(12)}}
    sync = fnddp.parse(text)
    state = sync.init(nested)
    with pytest.raises(TypeError, match=r"exchange takes a dict of tensors by leaf path, and 'layer' is a dict; call"):
        sync.exchange(nested, state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by leaf path, got a Tensor; call the pipeline"):
        sync.exchange(torch.ones(12, 20), state)  # type: ignore[arg-type]


KEEPS = [
    *("error_feedback(fp16(allreduce))", "powersgd(allreduce)", "ef21(allreduce)", "ef21(allreduce, eta=0.5)"),
    *("momentum_correction(allreduce)", "shared_momentum(allreduce)"),
]


@pytest.mark.parametrize("text", KEEPS)
def test_a_state_of_another_tree_is_named(text):
    sync = fnddp.parse(text)
    state = sync.init({"other": torch.ones(20, 20)})
    with pytest.raises(ValueError, match=r"no entry for leaf 'w', which .* of shape .20, .*call init on this one"):
        sync({"w": torch.ones(20, 20)}, state)
    with pytest.raises(ValueError, match=r"an entry of shape .* for leaf 'other', which needs one of shape"):
        sync({"other": torch.ones(21, 21)}, state)
    with pytest.raises(ValueError, match=r"an entry for 'other', which is not a leaf that needs one"):
        sync({}, state)


@pytest.mark.parametrize("text", [*KEEPS, "warmup(allreduce, 1)", "partition({'*': allreduce})"])
def test_a_state_of_another_pipeline_is_named(text):
    sync, grads = fnddp.parse(text), {"w": torch.ones(64, 32)}
    for other in ((), None, *([] if "feedback" in text else [error_feedback(allreduce).init(grads)])):
        with pytest.raises(ValueError, match="it was made for another pipeline; call init on this one"):
            sync(grads, other)
    more = {"ef21(allreduce)": ", eta=0.5)", "powersgd(allreduce)": ", alternate=True)"}.get(text)
    if more is not None:
        with pytest.raises(ValueError, match="no entry for leaf 'w', which needs one of shape"):
            fnddp.parse(text[:-1] + more)(grads, sync.init(grads))


def test_a_residual_of_another_dtype_is_named():
    wide, small = error_feedback(bf16(allreduce)), error_feedback(bf16(allreduce), residual="int8")
    grads = {"w": torch.ones(64, 32)}
    with pytest.raises(ValueError, match=r"no entry for leaf 'w', which needs one of shape \(16,\)"):
        small(grads, wide.init(grads))
    with pytest.raises(ValueError, match="an entry for 'w', which is not a leaf that needs one"):
        wide(grads, small.init(grads))
    with pytest.raises(ValueError, match=r"missing \['local/scale.w'\]"):
        fnddp.load_state_dict(small.init(grads), fnddp.state_dict(wide.init(grads)))


@on_ranks(3, threads=True)
def test_overflow_is_reported_by_name_on_all_ranks(rank):
    gradients = {"fine": torch.full((3,), 60_000.0), "big": torch.tensor([1.0, 1e5 if rank == 2 else 1.0])}
    bf16(allreduce, check=True)(gradients, ())  # which has the range of float32
    mean, _ = fp16(allreduce)(gradients, ())
    assert mean["fine"].tolist() == [60_000.0] * 3  # a mean never overflows in the sum
    assert mean["big"].tolist() == [1.0, float("inf")]  # what happens without check
    with pytest.raises(FloatingPointError) as caught:
        fp16(allreduce, check=True)(gradients, ())
    assert "'fine'" not in str(caught.value)
    big = f"leaf 'big' (on this rank {int(rank == 2)} of 2 values beyond the largest float16, 65504.0)"
    assert big in str(caught.value)


@pytest.mark.parametrize("more", ["", ", check=True"])
@pytest.mark.parametrize(("short", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_casts_compare_by_what_they_do(short, name, more):
    one, other = fnddp.parse(f"{short}(allreduce{more})"), cast(allreduce, getattr(torch, name), bool(more))
    assert one == other == cast(allreduce, name, bool(more))
    assert hash(one) == hash(other)
    assert repr(one) == repr(other) == f"{short}(allreduce{more})"


@pytest.mark.parametrize(("cap", "first_cap"), [(4000, 400), (10_000, 10_000), (1, 1), (10**9, 10**9)])
def test_buckets_are_torchs(cap, first_cap):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 900, (40,), generator=generator).tolist()
    dtypes = [(torch.float32, torch.float64)[i] for i in torch.randint(0, 2, (40,), generator=generator).tolist()]
    leaves = {
        f"p{i}": torch.empty(size, dtype=dtype) for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    }
    backward = list(reversed(leaves.items()))
    theirs, _ = dist._compute_bucket_assignment_by_size([leaf for _, leaf in backward], [first_cap, cap])
    ours = bucketize(allreduce, cap_mb=cap / MB, first_cap_mb=first_cap / MB).buckets(leaves)
    assert sorted(ours.values()) == sorted([backward[i][0] for i in bucket] for bucket in theirs)


ZEROS = {
    "zero": torch.zeros(16, 24),
    "zero columns": torch.cat([torch.zeros(16, 20), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))], 1),
    "rank one": torch.outer(torch.arange(16.0), torch.arange(24.0)),
    "tiny": torch.full((16, 24), 1e-38),
    "huge": torch.full((16, 24), 1e30),
    "half": torch.ones(16, 24, dtype=torch.float16),
    "bfloat": torch.ones(16, 24, dtype=torch.bfloat16),
    "double": torch.full((16, 24), 1e200, dtype=torch.float64),  # whose squares overflow
    "tiny double": torch.full((16, 24), 1e-200, dtype=torch.float64),
}


@pytest.mark.parametrize("rank", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("name", ZEROS)
def test_powersgd_of_difficult_matrices(name, rank):
    gradients, number = {"w": ZEROS[name]}, rank + list(ZEROS).index(name)
    for make, options in ((powersgd, {"min_compression_rate": 0}), (fnddp.batched_powersgd, {})):
        sync = make(allreduce, rank=rank, orthogonalization=METHODS[number % 3], **options)
        (*_, mean), state = fnddp.laws.run(sync, lambda *_: gradients, 0)
        assert all(part.value.isfinite().all() for part in fnddp.core.state.parts(state) if torch.is_tensor(part.value))
        assert mean["w"].isfinite().all()
        if name not in ("zero columns",) and make is powersgd:  # of rank 0 or 1: exact
            scale = ZEROS[name].abs().max()
            torch.testing.assert_close(mean["w"] / (scale or 1), ZEROS[name] / (scale or 1), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        *({"orthogonalization": method} for method in METHODS),
        *({"alternate": True}, {"refresh": 3}, {"alternate": True, "refresh": 3}),
    ],
)
def test_powersgd_recovers_after_zero_and_after_infinite_gradients(options):
    sync = powersgd(allreduce, rank=2, min_compression_rate=0, **options)
    good = {"w": torch.outer(torch.arange(1.0, 33.0), torch.arange(1.0, 25.0))}
    _, state = fnddp.laws.run(sync, lambda *_: good, 0)
    for bad in (torch.zeros(32, 24), torch.full((32, 24), torch.inf), torch.zeros(32, 24)):
        _, state = sync({"w": bad}, state)
    (*_, mean), _ = fnddp.laws.run(sync, lambda *_: good, 0, state=state)
    torch.testing.assert_close(mean["w"], good["w"], rtol=1e-4, atol=1e-3)


def test_powersgd_compresses_matrices_above_its_rate():
    gradients = {
        "matrix": torch.ones(12, 20),  # 32 * 2 * 2 < 240
        "small": torch.ones(5, 6),  # 11 * 2 * 2 > 30
        "vector": torch.ones(50),
        "scalar": torch.ones(()),
        "integer": torch.ones(40, 40, dtype=torch.int64),
        "empty": torch.ones(0, 40),
    }
    assert not powersgd(allreduce).init({"as much": torch.ones(4, 4)}).q  # 8 * 2 = 16
    for rank, rate, compressed in ((2, 2, ["matrix"]), (2, 1, ["matrix", "small"]), (100, 0, ["matrix", "small"])):
        assert list(powersgd(allreduce, rank, min_compression_rate=rate).init(gradients).q) == compressed


def test_seeds_and_queries():
    gradients = {"a": torch.ones(40, 30), "b": torch.ones(40, 30)}
    q = powersgd(allreduce, rank=2, seed=1).init(gradients).q
    assert not torch.equal(q["a"], q["b"])  # another query for another leaf
    torch.testing.assert_close(torch.linalg.vector_norm(q["a"], dim=0), torch.ones(2))
    assert not torch.equal(q["a"], powersgd(allreduce, rank=2, seed=2).init(gradients).q["a"])
    cold = powersgd(allreduce, rank=1, warm_start=False)
    random = {"a": torch.randn(40, 30, generator=torch.Generator().manual_seed(0))}
    first, state = cold(random, cold.init(random))
    second, state = cold(random, state)
    assert state.step == 2
    assert not torch.equal(first["a"], second["a"])  # a fresh query each step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("method", METHODS)
def test_bases_are_orthonormal_of_the_same_span_and_zero_where_a_column_adds_nothing(method, dtype):
    """Cholesky's of matrices of any shapes at once; QR has a vector for each column."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, 3, dtype=dtype, generator=generator) for rows in (128, 3, 33, 1000, 31)]
    matrices += [matrices[0] * 1e-30, matrices[1] * 1e30]
    kept = [3] * 7
    if method != "qr":
        nearly = torch.randn(50, 3, dtype=dtype, generator=generator)
        nearly[:, 1] = nearly[:, 0] + 1e-4 * nearly[:, 1]
        dependent = torch.cat([nearly[:, :1], 2 * nearly[:, :1], nearly[:, 2:]], 1)
        matrices, kept = [*matrices, torch.zeros(40, 3, dtype=dtype), nearly, dependent], [*kept, 0, 3, 2]
    at_once = orthogonalize_all([[each] for each in matrices], 1e-6, dtype)
    bases = at_once if method == "cholesky" else [orthogonalize(each, method, epsilon=1e-6) for each in matrices]
    for matrix, basis, rank in zip(matrices, bases, kept, strict=True):
        gram = basis.mH @ basis
        unit = gram.diagonal().real.round().to(dtype)
        assert unit.real.sum() == rank
        torch.testing.assert_close(gram, torch.diag(unit), rtol=0, atol=1e-5)
        scale = max(matrix.abs().max().item(), 1e-37)
        torch.testing.assert_close(basis @ (basis.mH @ (matrix / scale)), matrix / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])  # whose squares vanish and overflow
def test_rows_of_matrices_side_by_side_become_unit_vectors(size):
    rows = size * torch.tensor([[3.0, 4, 5, 12], [0, 0, torch.inf, 12]], dtype=torch.float64)
    unit = unit_rows(rows, [2, 2], torch.full_like(rows, 0.5))
    want = [[0.6, 0.8, 5 / 13, 12 / 13], [0.5] * 4]  # the fallback for zero and infinite ones
    torch.testing.assert_close(unit, torch.tensor(want, dtype=torch.float64))


def test_random_numbers_are_standard_normal_and_independent():
    like = torch.empty(0)
    x = normal((100_000,), name="w", seed=0, step=0, like=like).double()
    for moment, want in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert (x**moment).mean().item() == pytest.approx(want, abs=0.05)
    for other in ({"name": "v"}, {"seed": 1}, {"step": 1}):
        y = normal((100_000,), **{"name": "w", "seed": 0, "step": 0, "like": like, **other}).double()
        assert (x * y).mean().abs() < 0.02


def test_squares_hold_every_size():
    for size in (0, 1, 2, 3, 4, 5, 9, 10, 99, 100, 101):
        gradients = {"flat": torch.arange(float(size))}
        side = fnddp.squared(error_feedback(fp16(allreduce))).init(gradients).residual["flat"].shape[0]
        assert side**2 >= size > (side - 1) ** 2 or size == side == 0
        torch.testing.assert_close(fnddp.squared(allreduce)(gradients, ())[0], gradients)


def test_the_first_matching_rule_wins():
    sync = partition({"layer1.*": fp16(allreduce), "*.bias": allreduce, "*": bf16(allreduce)})
    dtypes = {"layer1.bias": torch.float16, "layer2.bias": torch.float32, "layer2.weight": torch.bfloat16}
    leaves = {path: torch.tensor([1 + 2**-9 + 2**-20]) for path in dtypes}
    mean, _ = sync(leaves, sync.init(leaves))
    assert mean == {path: leaf.to(dtypes[path]).float() for path, leaf in leaves.items()}
    with pytest.raises(ValueError, match=r"leaf 'Layer1.x' matches none of the patterns \['layer1\.\*'\]; add one, or"):
        partition({"layer1.*": allreduce}).init({"Layer1.x": torch.ones(1)})


def test_decay_forgets():
    sync, gradients = error_feedback(fp16(allreduce), decay=0.5), {"w": torch.tensor([1 / 3])}
    _, before = sync(gradients, sync.init(gradients))
    mean, state = sync(gradients, before)
    want = gradients["w"] + 0.5 * before.residual["w"] - mean["w"]
    assert state.residual["w"].item() == pytest.approx(want.item(), abs=1e-9)


@on_ranks(1, 2, 3, 4)
def test_default_hooks_bit_for_bit(rank):
    # one leaf, so that hook and pipeline hand the same buffer to the same collective: equal to the bit
    for hook, sync in (
        (default_hooks.allreduce_hook, allreduce),
        (default_hooks.fp16_compress_hook, fp16(allreduce)),
        (default_hooks.bf16_compress_hook, bf16(allreduce)),
    ):
        for step in range(3):
            flat = {"flat": torch.randn(1003, generator=torch.Generator().manual_seed(10 * rank + step))}
            assert bits(from_hook(hook)(flat, ())[0]) == bits(sync(flat, ())[0])


@on_ranks(2)
def test_from_hook(rank):
    dist.barrier()  # the hooks send nothing: no rank is to be done, and gone, while the other one still connects
    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), [tuple(g.shape) for g in bucket.gradients()]))
        future = torch.futures.Future()
        bucket.buffer().mul_(2)
        future.set_result(bucket.buffer())
        return future

    gradients = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float64), "c": torch.ones(())}
    mean, _ = from_hook(hook)(gradients, ())
    assert seen == [(0, False, [(2, 3), ()]), (1, True, [(4,)])]  # one for each dtype
    assert mean["a"].tolist() == [[2.0] * 3] * 2
    with pytest.raises(ValueError, match="leaf 'n' is torch.int64; hooks average floating-point gradients only"):
        from_hook(hook)({"n": torch.ones(1, dtype=torch.int64)}, ())
    with pytest.raises(TypeError, match=r"this hook calls bucket.parameters\(\)"):
        from_hook(lambda state, bucket: bucket.parameters())(gradients, ())
    with pytest.raises(TypeError, match=r"from_hook\(.*\) returned NoneType instead of a torch.futures.Future"):
        from_hook(lambda state, bucket: None)(gradients, ())
    torch.testing.assert_close(gradients["a"], torch.ones(2, 3))


def test_numbers_of_numpy_are_plain_numbers():
    rank, decay = np.int64(4), np.float32(0.5)
    sync = error_feedback(powersgd(fnddp.warmup(allreduce, np.int32(3)), rank=rank, warm_start=np.True_), decay=decay)
    assert repr(sync) == "error_feedback(powersgd(warmup(allreduce, 3), rank=4), decay=0.5)"


def test_rules_may_be_pairs():
    sync = partition([["*.bias", allreduce], ["*", fp16(allreduce)]])
    assert sync == partition({"*.bias": allreduce, "*": fp16(allreduce)})
    assert hash(sync) == hash(fnddp.parse(repr(sync)))
    assert sync.over("7") == partition({"*.bias": all_reduce("7"), "*": fp16(all_reduce("7"))})


@pytest.mark.usefixtures("own_transforms")
def test_pipelines_in_modules_that_postpone_annotations():
    @fnddp.transform
    class postponed(fnddp.squared):
        inner: "fnddp.Sync"
        times: "int" = 1

    with pytest.raises(TypeError, match="postponed: inner must be a pipeline"):
        postponed("allreduce")
    with pytest.raises(TypeError, match="postponed: times must be an int"):
        postponed(allreduce, 1.5)


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="'fp16' is already registered by fnddp.transforms.cast; choose another name"):

        @fnddp.transform
        class fp16(fnddp.Sync):
            inner: fnddp.Sync


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_clipping_makes_of_infinite_and_nan_means_what_torch_makes_of_them(value: float) -> None:
    leaves = {"w": torch.tensor([3.0, value]), "b": torch.ones(2)}
    mean, _ = fnddp.clip_by_global_norm(allreduce, max_norm=1.0)(leaves, ())
    parameters = [torch.zeros(2, requires_grad=True) for _ in leaves]
    for parameter, grad in zip(parameters, leaves.values(), strict=True):
        parameter.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    want = {name: parameter.grad for name, parameter in zip(leaves, parameters, strict=True)}
    torch.testing.assert_close(mean, want, equal_nan=True)
