"""Lightning's Trainer, whose gradients a pipeline synchronizes. It starts the second rank itself.

python examples/integrations/lightning_digits.py

Half of a run is saved and resumed; the resumed run ends where the whole one did.
"""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fnddp.cli import digits  # real handwritten digits; needs pip install 'fnddp[demo]'
from fnddp.integrations.lightning import FnddpStrategy

SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(epochs: int, train_set: TensorDataset, resume: Path | None = None) -> tuple[Trainer, Digits]:
    model = Digits()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FnddpStrategy(sync=SYNC),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train_set, batch_size=32), ckpt_path=resume, weights_only=True)
    return trainer, model


def main() -> None:
    torch.set_num_threads(1)
    train_set, test_set = digits.load()
    _, whole = trained(8, TensorDataset(*train_set))

    half, _ = trained(4, TensorDataset(*train_set))
    folder = half.strategy.broadcast(tempfile.mkdtemp())
    half.save_checkpoint(Path(folder) / "half.ckpt")
    trainer, resumed = trained(8, TensorDataset(*train_set), resume=Path(folder) / "half.ckpt")

    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    if trainer.is_global_zero:
        print(f"world size {trainer.world_size}: {digits.accuracy(resumed, {}, test_set):.2%} of the test set")
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
