"""A small GPT-2 on real text, with the Trainer of transformers and a pipeline.

torchrun --nproc-per-node 2 examples/integrations/huggingface_gpt2.py

The text is CPython's own documentation, by character. The run is resumed from its middle, and ends at the same place.
"""

import pydoc_data.topics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from fnddp.integrations.huggingface import FnddpTrainerMixin

SYNC = "error_feedback(powersgd(bf16(allreduce), rank=2))"
LENGTH, STEPS = 64, 30


class OurTrainer(FnddpTrainerMixin, Trainer):
    """The Trainer, with `sync`."""


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of `LENGTH` characters."""

    def __init__(self) -> None:
        text = "".join(pydoc_data.topics.topics.values())
        self.symbols = sorted(set(text))
        index = {symbol: i for i, symbol in enumerate(self.symbols)}
        ids = torch.tensor([index[symbol] for symbol in text])
        self.ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trained(text: Text, folder: Path, resume: Path | None = None) -> OurTrainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(text.symbols), n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=STEPS // 6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = OurTrainer(GPT2LMHeadModel(config), arguments, train_dataset=text, sync=SYNC)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def main() -> None:
    torch.set_num_threads(1)
    text = Text()
    names = [tempfile.mkdtemp()]
    dist.init_process_group("gloo")
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    whole = trained(text, folder / "whole")
    resumed = trained(text, folder / "resumed", resume=folder / "whole" / f"checkpoint-{STEPS // 2}")

    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
        print(f"world size {dist.get_world_size()}: loss {losses[0]:.2f}, then {losses[-1]:.2f}")
        print(f"the resumed run has the same parameters to the bit: {'yes' if same else 'no'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
