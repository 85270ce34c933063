"""torch's DDP tests as a unittest module. `run.py` starts it, with the names of tests; so do the ranks it spawns."""

import os

import shim

shim.run_on_cpu()
shim.replace_ddp(os.environ.get("DDP_CLASS"))

import torch.multiprocessing  # noqa: E402
from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402


class TestDistBackendWithSpawn(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        if os.environ.get("RANKS_ARE") == "forked":
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
        else:
            self._spawn_processes()


if __name__ == "__main__":
    run_tests()
