"""What no other test noticed when it was changed: see `tests/mutation/run.py`."""

from functools import partial

import pytest
import torch
from torch import Tensor

import fnddp
from fnddp import Exchange, Sync, laws
from fnddp.core import collectives
from fnddp.ir.program import LeafSpec
from fnddp.plan.draft import Donation
from fnddp.plan.lower import lower
from fnddp.run.engine import Engine
from fnddp.simulate.ranks import run_threads


@pytest.fixture
def averaged(own_transforms: None) -> type[Sync]:
    @fnddp.transform
    class averaged(Sync):
        """Means from rows of several dtypes, of sizes that no alignment divides."""

        how: str

        def init(self, grads):
            return ()

        def exchange(self, grads, state):
            mean = {path: self.mean(grads[path]) for path in sorted(grads)}
            return Exchange(mean, grads, state)

        def mean(self, leaf: Tensor) -> Tensor:
            n = collectives.world_size(None)
            if self.how == "all_gather":
                return collectives.all_gather(leaf).sum(0) / n
            rows = leaf.unsqueeze(0).expand(n, *leaf.shape).contiguous()
            part = collectives.reduce_scatter(rows) if self.how == "two_shot" else collectives.all_to_all(rows).sum(0)
            return collectives.all_gather(part)[-1] / n

    return averaged


def odd(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtypes = {"a": torch.float16, "b": torch.float64, "c": torch.float32, "d": torch.bfloat16}
    return {
        path: torch.randn(3 + 2 * i, generator=generator).to(dtype) for i, (path, dtype) in enumerate(dtypes.items())
    }


@pytest.mark.parametrize("how", ["all_gather", "two_shot", "all_to_all"])
def test_kinds_that_move_bytes_share_a_message_whatever_the_dtypes(averaged, how):
    for donation in laws.DONATIONS[::2]:
        run_threads(2, partial(laws.law_6_lowered_is_eager, donation=donation), averaged(how), odd)


def test_rows_of_bytes_begin_where_each_dtype_may_begin(averaged):
    (collective,) = lower(averaged("all_gather"), odd(0, 0), world_size=4).collectives
    assert [payload.dtype.itemsize for payload in collective.payloads] == [8, 4, 2, 2]
    assert [payload.offset for payload in collective.payloads] == [0, 40, 68, 74]  # 5 * 8, 7 * 4, 3 * 2 bytes
    assert collective.width == 96  # 74 + 9 * 2, up to a multiple of 8


@pytest.fixture
def remembering(own_transforms: None) -> type[Sync]:
    @fnddp.transform
    class remembering(Sync):
        """Exchanges what it remembers too, which depends on no leaf."""

        inner: Sync

        def init(self, grads):
            return {path: torch.ones(3) for path in grads}

        def exchange(self, grads, state):
            told = {path: collectives.all_gather(part).sum(0) for path, part in state.items()}
            return Exchange(self.inner.exchange(grads, ()).mean, grads, told)

    return remembering


def test_what_only_a_state_needs_travels_with_the_first_bucket(remembering):
    leaves = {"w": torch.ones(3)}
    gathered, reduced = lower(remembering(fnddp.allreduce), leaves, world_size=2).collectives
    assert (gathered.kind.name, reduced.kind.name) == ("all_gather", "all_reduce")
    assert (gathered.bucket, gathered.slot, gathered.depth) == (0, 0, 0)
    assert gathered.payloads[0].label == "(state)"


def test_later_steps_take_the_order_in_which_gradients_arrived_in_the_first():
    leaves = {path: torch.ones(4) for path in "abc"}

    def body(rank: int) -> list[list[str]]:
        specs = {path: LeafSpec.of(leaf) for path, leaf in leaves.items()}
        engine = Engine(fnddp.allreduce, specs, donation=Donation(), bucket_caps=(1,), learns_order=True)
        labels: list[list[str]] = []
        for _ in range(2):
            engine.begin(())
            for path in "bac" if rank == 0 else "cba":
                engine.step.feed(path, leaves[path])
            engine.step.finish()
            labels.append([collective.payloads[0].label for collective in engine.plan.collectives])
        return labels

    assert run_threads(2, body) == [[["c", "b", "a"], ["b", "a", "c"]]] * 2
