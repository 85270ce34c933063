"""All names of the package `fnddp`, which is this module's as soon as one of them is asked for."""

from fnddp.adapters.ddp import Handle as Handle
from fnddp.adapters.ddp import register as register
from fnddp.adapters.functional import value_and_grad as value_and_grad
from fnddp.adapters.hook import from_hook as from_hook
from fnddp.adapters.jit import jit as jit
from fnddp.adapters.module.wrapper import DistributedDataParallel as DistributedDataParallel
from fnddp.adapters.stats import log_sync_stats as log_sync_stats
from fnddp.codecs.dct_topk import dct_topk as dct_topk
from fnddp.codecs.fp8 import fp8 as fp8
from fnddp.codecs.majority_vote import majority_vote as majority_vote
from fnddp.codecs.natural import natural as natural
from fnddp.codecs.qsgd import qsgd as qsgd
from fnddp.codecs.quantize import quantize as quantize
from fnddp.codecs.sign import sign as sign
from fnddp.codecs.terngrad import terngrad as terngrad
from fnddp.codecs.topk import topk as topk
from fnddp.core.agreement import RankMismatchError as RankMismatchError
from fnddp.core.agreement import verify as verify
from fnddp.core.codec import Codec as Codec
from fnddp.core.parse import parse as parse
from fnddp.core.state import load_state_dict as load_state_dict
from fnddp.core.state import state_dict as state_dict
from fnddp.core.sync import (
    Exchange as Exchange,
)
from fnddp.core.sync import (
    Local as Local,
)
from fnddp.core.sync import (
    Replicated as Replicated,
)
from fnddp.core.sync import (
    State as State,
)
from fnddp.core.sync import (
    Sync as Sync,
)
from fnddp.core.sync import (
    transform as transform,
)
from fnddp.cost.link import Link as Link
from fnddp.cost.measure import measure_link as measure_link
from fnddp.cost.step import Compute as Compute
from fnddp.ir.program import LoweringError as LoweringError
from fnddp.memory.ef21 import ef21 as ef21
from fnddp.memory.error_feedback import error_feedback as error_feedback
from fnddp.memory.momentum_correction import momentum_correction as momentum_correction
from fnddp.plan.lower import lower as lower
from fnddp.plan.plan import Plan as Plan
from fnddp.reducers.all_gather import all_gather as all_gather
from fnddp.reducers.all_gather import allgather as allgather
from fnddp.reducers.all_reduce import all_reduce as all_reduce
from fnddp.reducers.all_reduce import allreduce as allreduce
from fnddp.reducers.hierarchical import hierarchical as hierarchical
from fnddp.reducers.none import none as none
from fnddp.reducers.two_shot import two_shot as two_shot
from fnddp.run.measure import measure_backward as measure_backward
from fnddp.run.measure import measure_segments as measure_segments
from fnddp.run.vote import StepFailedError as StepFailedError
from fnddp.schedules.delayed import delayed as delayed
from fnddp.schedules.every import every as every
from fnddp.schedules.measure import measure as measure
from fnddp.schedules.partition import partition as partition
from fnddp.schedules.skip_nonfinite import skip_nonfinite as skip_nonfinite
from fnddp.schedules.switch import switch as switch
from fnddp.schedules.warmup import warmup as warmup
from fnddp.simulate.simulate import simulate as simulate
from fnddp.simulate.training import simulate_training as simulate_training
from fnddp.transforms.batched_powersgd import batched_powersgd as batched_powersgd
from fnddp.transforms.bucketize import bucketize as bucketize
from fnddp.transforms.cast import bf16 as bf16
from fnddp.transforms.cast import cast as cast
from fnddp.transforms.cast import fp16 as fp16
from fnddp.transforms.clip_by_global_norm import clip_by_global_norm as clip_by_global_norm
from fnddp.transforms.powersgd import powersgd as powersgd
from fnddp.transforms.random_block import random_block as random_block
from fnddp.transforms.random_k import random_k as random_k
from fnddp.transforms.squared import squared as squared
from fnddp.version import __version__ as __version__
from fnddp.wire.counter import WireCounter as WireCounter
from fnddp.wire.protocol import CollectiveError as CollectiveError
