"""Gradient synchronization as composable pure transforms on gradient pytrees."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fnddp.adapters.ddp import Handle, register
from fnddp.adapters.functional import value_and_grad
from fnddp.adapters.hook import from_hook
from fnddp.adapters.jit import jit
from fnddp.adapters.module.wrapper import DistributedDataParallel
from fnddp.adapters.stats import log_sync_stats
from fnddp.codecs.floats import fp8, natural
from fnddp.codecs.quantize import qsgd, quantize, terngrad
from fnddp.codecs.sign import majority_vote, sign
from fnddp.codecs.topk import dct_topk, topk
from fnddp.core.agreement import RankMismatchError, verify
from fnddp.core.codec import Codec
from fnddp.core.options import did_you_mean
from fnddp.core.parse import parse
from fnddp.core.state import load_state_dict, state_dict
from fnddp.core.sync import Exchange, Local, Replicated, State, Sync, transform
from fnddp.cost.link import Link
from fnddp.cost.measure import measure_link
from fnddp.cost.step import Compute
from fnddp.ir.program import LoweringError
from fnddp.memory import ef21, error_feedback, momentum_correction
from fnddp.plan.lower import lower
from fnddp.plan.plan import Plan
from fnddp.reducers.all_reduce import all_reduce, allreduce, none
from fnddp.reducers.carriers import all_gather, allgather, two_shot
from fnddp.reducers.hierarchical import hierarchical
from fnddp.run.measure import measure_backward, measure_segments
from fnddp.run.vote import StepFailedError
from fnddp.schedules.choose import delayed, every, partition, switch, warmup
from fnddp.schedules.watch import measure, skip_nonfinite
from fnddp.simulate.simulate import simulate
from fnddp.simulate.training import simulate_training
from fnddp.transforms.bucketize import batched_powersgd, bucketize, squared
from fnddp.transforms.cast import bf16, cast, fp16
from fnddp.transforms.clip_by_global_norm import clip_by_global_norm
from fnddp.transforms.powersgd import powersgd
from fnddp.transforms.random_k import random_block, random_k
from fnddp.version import __version__
from fnddp.wire.counter import WireCounter
from fnddp.wire.protocol import CollectiveError

if TYPE_CHECKING:
    from fnddp import outer as outer

__all__ = [
    "Codec",
    "CollectiveError",
    "Compute",
    "DistributedDataParallel",
    "Exchange",
    "Handle",
    "Link",
    "Local",
    "LoweringError",
    "Plan",
    "RankMismatchError",
    "Replicated",
    "State",
    "StepFailedError",
    "Sync",
    "WireCounter",
    "__version__",
    "all_gather",
    "all_reduce",
    "allgather",
    "allreduce",
    "batched_powersgd",
    "bf16",
    "bucketize",
    "cast",
    "clip_by_global_norm",
    "dct_topk",
    "delayed",
    "ef21",
    "error_feedback",
    "every",
    "fp16",
    "fp8",
    "from_hook",
    "hierarchical",
    "jit",
    "load_state_dict",
    "log_sync_stats",
    "lower",
    "majority_vote",
    "measure",
    "measure_backward",
    "measure_link",
    "measure_segments",
    "momentum_correction",
    "natural",
    "none",
    "outer",
    "parse",
    "partition",
    "powersgd",
    "qsgd",
    "quantize",
    "random_block",
    "random_k",
    "register",
    "sign",
    "simulate",
    "simulate_training",
    "skip_nonfinite",
    "squared",
    "state_dict",
    "switch",
    "terngrad",
    "topk",
    "transform",
    "two_shot",
    "value_and_grad",
    "verify",
    "warmup",
]


def __dir__() -> list[str]:
    return [*__all__]


def __getattr__(name: str) -> Any:
    if name == "outer":  # imported when first asked for: most scripts synchronize gradients only
        return import_module("fnddp.outer")
    raise AttributeError(f"module 'fnddp' has no attribute {name!r}{did_you_mean(name, __all__)}")
