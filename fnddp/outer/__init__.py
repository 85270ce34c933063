"""Outer steps: local SGD, DiLoCo and related methods, for ranks that train apart and exchange once in several steps."""

from fnddp.outer.attach import Attached, attach
from fnddp.outer.compositions import muloco, sparse_loco
from fnddp.outer.contract import Outer, outer, parse
from fnddp.outer.des_loc import des_loc
from fnddp.outer.diloco import diloco
from fnddp.outer.hierarchical_local_sgd import hierarchical_local_sgd
from fnddp.outer.local_sgd import local_sgd, post_local_sgd
from fnddp.outer.plan import OuterPlan, lower
from fnddp.outer.simulate import OuterSimulation, simulate, simulate_training
from fnddp.outer.streaming_diloco import streaming_diloco

__all__ = [
    "Attached",
    "Outer",
    "OuterPlan",
    "OuterSimulation",
    "attach",
    "des_loc",
    "diloco",
    "hierarchical_local_sgd",
    "local_sgd",
    "lower",
    "muloco",
    "outer",
    "parse",
    "post_local_sgd",
    "simulate",
    "simulate_training",
    "sparse_loco",
    "streaming_diloco",
]
