"""The same training as Ray Train starts it, and starts it again after a worker was killed.

python examples/machines/ray_train.py --folder SHARED
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import train  # beside this file
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model


def worker(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    net = prepare_model(train.make(), parallel_strategy=None)  # on this worker's device, and not in torch's DDP
    digest = train.train(net, get_device(), config["checkpoints"], config["die_at"])
    ray.train.report({"parameters": digest})
    if ray.train.get_context().get_world_rank() == 0:
        (config["checkpoints"] / "parameters").write_text(digest)


def run(folder: Path, name: str, die_at: int | None) -> str:
    checkpoints = folder / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"checkpoints": checkpoints, "die_at": die_at},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    return (checkpoints / "parameters").read_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all machines see it")
    folder = parser.parse_args().folder.absolute()
    ray.init(include_dashboard=False)  # on a cluster it joins that, and this says nothing
    whole, interrupted = run(folder, "whole", None), run(folder, "interrupted", 25)
    same = "yes" if whole == interrupted else "no"
    print(f"the run that was interrupted has the same parameters to the bit: {same}")


if __name__ == "__main__":
    main()
