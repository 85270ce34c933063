"""The passes of lowering, in the order in which they run: each takes a draft of a plan and returns one."""

from fnddp.plan.passes.combine import combine
from fnddp.plan.passes.emit import emit
from fnddp.plan.passes.foreach import foreach
from fnddp.plan.passes.order import order
from fnddp.plan.passes.place import place
from fnddp.plan.passes.simplify import drop, fuse, simplify

PASSES = (drop, simplify, fuse, combine, order, place, foreach, emit)
