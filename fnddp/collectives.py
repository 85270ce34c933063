"""Collectives as pure functions of tensors, for authors of transforms; names of groups; and tensors as they travel."""

from fnddp.core.collectives import all_gather as all_gather
from fnddp.core.collectives import all_gather_leaves as all_gather_leaves
from fnddp.core.collectives import all_reduce as all_reduce
from fnddp.core.collectives import all_to_all as all_to_all
from fnddp.core.collectives import all_to_all_leaves as all_to_all_leaves
from fnddp.core.collectives import rank as rank
from fnddp.core.collectives import ranks as ranks
from fnddp.core.collectives import reduce_scatter as reduce_scatter
from fnddp.core.collectives import reduce_scatter_leaves as reduce_scatter_leaves
from fnddp.core.collectives import sum_in_rank_order as sum_in_rank_order
from fnddp.core.collectives import world_size as world_size
from fnddp.core.group import Group as Group
from fnddp.core.group import group_name as group_name
from fnddp.core.layout import from_wire as from_wire
from fnddp.core.layout import in_rows as in_rows
from fnddp.core.layout import to_wire as to_wire
