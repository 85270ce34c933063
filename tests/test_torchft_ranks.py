"""torchft: replicas of several ranks, of which each has its own part of the model, as with tensor or pipeline parallel.

If one rank is lost, so is its replica: what started it starts all of its ranks again.
"""

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'fnddp[torchft]'")

from tests.replica import Trap
from tests.replicas import Job

LOSSY = "error_feedback(powersgd(fp16(allreduce), rank=2))"
AT = 3  # the step in which something befalls a replica
pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("r2", "forward"),  # with which the replica's server dies
        ("r2", "collective 1"),
        ("r2", "commit"),
        ("r3", "backward"),
        ("r3", "vote"),
        ("r3", "stepped"),
    ],
)
def test_one_rank_of_a_replica_is_killed(victim, point):
    with Job(2, ranks=2, sync=LOSSY) as job:
        records = job.run({victim: Trap(point, AT)})
    assert job.incarnations == {"r0": 0, "r1": 0, "r2": 1, "r3": 1}
    for rank in range(2):
        assert any(r.participants == 1 and r.committed and r.rank == rank for r in records), "one replica went on alone"
    if point in ("forward", "collective 1", "backward", "vote"):
        # The ranks that had not lost anybody had means: they are gone as well.
        assert {r.replica for r in records if r.step == AT and not r.committed} == {"r0", "r1"}
