"""Lightning itself, on two gloo ranks: its Trainer, its Fabric, its CLI."""

import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import fnddp
from fnddp import allreduce, error_feedback, fp16, parse, powersgd
from fnddp.run import choose as choosing
from tests.peers import everyones, launched, parameters_of, residual
from tests.ranks import on_ranks
from tests.test_huggingface import BATCH, Regression, data

# Imported where it is used: it takes seconds, and this file is collected by all workers.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs pip install 'fnddp[lightning]'"),
]

SYNC, OTHER = error_feedback(powersgd(fp16(allreduce), rank=1)), error_feedback(powersgd(allreduce, rank=2))


def loader() -> DataLoader:
    return DataLoader(data(), BATCH)


def module(manual: bool = False) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regression().net
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.net(batch[0])

        def train_dataloader(self) -> DataLoader:
            return loader()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Module()


def fitted(root: Path, sync: Any, epochs: int, resume: Path | None = None, model: Any = None, **options: Any) -> Any:
    """A module, and the trainer that has trained it; by Lightning's own strategy where `sync` is None."""
    from lightning.pytorch import Trainer

    from fnddp.integrations.lightning import FnddpStrategy

    arguments = options.pop("arguments", {})
    strategy = "ddp" if sync is None else FnddpStrategy(sync, **arguments)
    trainer = Trainer(**{**quiet(root), "strategy": strategy, "max_epochs": epochs, **options})
    model = module() if model is None else model
    trainer.fit(model, loader(), ckpt_path=resume, weights_only=None if resume is None else True)
    return model, trainer


def quiet(root: Path) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "default_root_dir": str(root),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }


@on_ranks(2)
def test_four_epochs_are_two_and_two_more(rank: int, tmp_path: Path) -> None:
    saved = tmp_path / "half.ckpt"
    with launched(rank):
        whole, trained = fitted(tmp_path, SYNC, 4)
        fitted(tmp_path, SYNC, 2)[1].save_checkpoint(saved)
        resumed, rest = fitted(tmp_path, repr(SYNC), 4, saved)
        assert torch.equal(parameters_of(resumed), parameters_of(whole))
        assert torch.equal(residual(rest.strategy.sync_state), residual(trained.strategy.sync_state))
        mine, other = everyones(residual(rest.strategy.sync_state))
        assert not torch.equal(mine, other)


@on_ranks(3)
def test_the_order_of_gradients_is_in_a_checkpoint(rank: int, tmp_path: Path) -> None:
    """A ring of three ranks adds up in an order that depends on where in a bucket a gradient lies."""
    saved = [tmp_path / f"{name}.ckpt" for name in ("within", "behind", "again")]
    with launched(rank):
        from lightning.pytorch import Callback

        look: Any = Callback()
        look.on_train_end = lambda trainer, _: trainer.save_checkpoint(saved[0])
        model, trainer = fitted(tmp_path, "allreduce", 1, callbacks=[look])
        trainer.save_checkpoint(saved[1])
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader())
        trainer.save_checkpoint(saved[2])
        within, behind, again = [torch.load(path, weights_only=True)["fnddp"]["order"] for path in saved]
        assert {*within} == {name for name, _ in model.named_parameters()}
        assert within == behind == again


@on_ranks(2)
def test_checkpoints_and_lightnings_own_strategy(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    last, foreign, bare = [tmp_path / f"{name}.ckpt" for name in ("last", "stock", "weights")]
    with launched(rank):
        checkpoints = ModelCheckpoint(tmp_path, filename="last")
        _, ours = fitted(tmp_path, SYNC, 1, callbacks=[checkpoints], enable_checkpointing=True)
        kept = torch.load(last, weights_only=True)["fnddp"]
        assert kept["pipeline"] == repr(SYNC)
        assert kept["world_size"] == 2
        mine = fnddp.state_dict(ours.strategy.sync_state)
        assert torch.equal(kept[f"rank{rank}/local/residual.net.0.weight"], mine["local/residual.net.0.weight"])

        # Lightning's own reads it, and ours reads a checkpoint of its own, or a file of weights.
        _, stock = fitted(tmp_path, None, 2, last)
        assert stock.global_step == 2 * ours.global_step
        stock.save_checkpoint(foreign)
        with pytest.warns(UserWarning, match="starts from its initial state") if rank == 0 else nullcontext():
            fitted(tmp_path, SYNC, 3, foreign)
        ours.save_checkpoint(bare, weights_only=True)
        assert "fnddp" not in torch.load(bare, weights_only=True)
        with pytest.raises(
            ValueError, match=r"state of error_feedback.*does not fit .*rank=2.*unexpected.*net.0.weight"
        ):
            fitted(tmp_path, OTHER, 2, last)


@on_ranks(2)
def test_another_pipeline_begins_anew_where_it_is_asked_for(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    saved, begun = tmp_path / "one.ckpt", list[tuple[Tensor, Tensor]]()
    look: Any = Callback()
    look.on_train_start = lambda trainer, model: begun.append(
        (residual(trainer.strategy.sync_state).clone(), parameters_of(model).clone())
    )
    with launched(rank):
        model, trainer = fitted(tmp_path, SYNC, 1)
        trainer.save_checkpoint(saved)
        fitted(tmp_path, OTHER, 2, saved, callbacks=[look], arguments={"reset_sync": True})
        assert not begun[0][0].any()
        assert torch.equal(begun[0][1], parameters_of(model))


@on_ranks(2)
def test_the_plain_mean_is_lightnings_own(rank: int, tmp_path: Path) -> None:
    clipped: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    with launched(rank):
        for manual, options, arguments in ((False, clipped, {}), (True, {}, {"static_graph": True})):
            ours, stock, squeezed = [
                parameters_of(fitted(tmp_path, sync, 2, model=module(manual), arguments=arguments, **options)[0])
                for sync in ("allreduce", None, SYNC)
            ]
            assert torch.equal(ours, stock)
            assert not torch.equal(squeezed, stock)
            assert torch.equal(*everyones(squeezed))


@on_ranks(2)
def test_the_state_outlives_fit(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    found: list[Tensor] = []
    look: Any = Callback()
    look.on_train_start = lambda trainer, _: found.append(residual(trainer.strategy.sync_state).clone())
    with launched(rank):
        model, ours = fitted(tmp_path, SYNC, 1, callbacks=[look])
        after = residual(ours.strategy.sync_state)
        ours.validate(model, loader(), verbose=False)
        for epochs, trained in ((2, model), (3, module())):  # of another module the state begins anew
            ours.fit_loop.max_epochs = epochs
            ours.fit(trained, loader())
        first, second, third = found
        assert torch.equal(second, after)
        assert after.any()
        assert not first.any()
        assert not third.any()


@on_ranks(2)
def test_a_search_for_the_learning_rate_leaves_no_trace(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LearningRateFinder
    from lightning.pytorch.tuner import Tuner

    from fnddp.integrations.lightning import FnddpStrategy

    with launched(rank):
        expected = parameters_of(fitted(tmp_path, SYNC, 1)[0])
        finder = LearningRateFinder(num_training_steps=4, update_attr=False)
        assert torch.equal(parameters_of(fitted(tmp_path, SYNC, 1, callbacks=[finder])[0]), expected)
        model, trainer = module(), Trainer(**quiet(tmp_path), strategy=FnddpStrategy(SYNC), max_epochs=1)
        Tuner(trainer).lr_find(model, loader(), num_training=4, update_attr=False)
        trainer.fit(model, loader())
        assert torch.equal(parameters_of(model), expected)


@on_ranks(2)
def test_the_command_line_takes_a_pipeline_as_text(rank: int, tmp_path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    config = {
        "seed_everything": 1,
        "trainer": {
            **quiet(tmp_path),
            "max_epochs": 1,
            "strategy": {
                "class_path": "fnddp.integrations.lightning.FnddpStrategy",
                "init_args": {"sync": repr(SYNC), "static_graph": True},
            },
        },
    }
    with launched(rank):
        path = tmp_path / f"config{rank}.yaml"
        path.write_text(json.dumps(config))  # which is yaml
        cli: Any = LightningCLI(type(module()), args=["fit", "--config", str(path)], save_config_callback=None)
    assert cli.trainer.strategy.sync == parse(repr(SYNC))
    assert residual(cli.trainer.strategy.sync_state).any()


@on_ranks(2)
def test_fabric(rank: int, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    from fnddp.integrations.lightning import FnddpFabricStrategy, wrapped_in

    def train(sync: Any, epochs: int, load: str = "", save: str = "", **options: Any) -> Any:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FnddpFabricStrategy(sync, **options))
        fabric.launch()
        net = module().net
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        batches = fabric.setup_dataloaders(loader())
        state = {"model": model, "optimizer": optimizer, "epochs": epochs}
        if load:
            fabric.backward(model(torch.ones(2, 6) + rank).square().mean())  # of which nothing is left
            optimizer.zero_grad()
            assert fabric.load(tmp_path / load, state, weights_only=True) == {}
        for _ in range(epochs):
            for i, (x, y) in enumerate(batches):
                with fabric.no_backward_sync(model, enabled=i % 2 == 0):
                    fabric.backward((model(x) - y).square().mean())
                if i % 2:
                    fabric.clip_gradients(model, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()
        if save:
            fabric.save(tmp_path / save, state)
        return model

    with launched(rank):
        whole = train(SYNC, 2)
        train(SYNC, 1, save="half.ckpt")
        resumed = train(repr(SYNC), 1, load="half.ckpt")
        assert torch.equal(parameters_of(resumed), parameters_of(whole))
        assert torch.equal(residual(wrapped_in(resumed).sync_state), residual(wrapped_in(whole).sync_state))
        assert residual(wrapped_in(whole).sync_state).any()
        assert not torch.equal(parameters_of(train("allreduce", 2)), parameters_of(whole))
        with pytest.raises(ValueError, match="reset_sync=True"):
            train(OTHER, 0, load="half.ckpt")
        anew = train(OTHER, 0, load="half.ckpt", reset_sync=True)
        assert not residual(wrapped_in(anew).sync_state).any()


@on_ranks(2)
def test_a_measured_pipeline_outlives_fits_and_checkpoints(rank: int, tmp_path: Path) -> None:
    with launched(rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "measure_link", lambda *_, **__: fnddp.Link(1e2))
        model, ours = fitted(tmp_path, "auto", 1)
        taken = ours.strategy.sync
        assert taken != fnddp.allreduce
        ours.save_checkpoint(tmp_path / "slow.ckpt")
        patch.setattr(choosing, "measure_link", lambda *_, **__: fnddp.Link(1e12))
        ours.fit_loop.max_epochs = 2
        ours.fit(model, loader())
        assert ours.strategy.sync == taken
        assert fitted(tmp_path, "auto", 1)[1].strategy.sync == fnddp.allreduce
        assert fitted(tmp_path, "auto", 2, tmp_path / "slow.ckpt")[1].strategy.sync == taken


def test_a_hook_is_refused() -> None:
    from fnddp.integrations.lightning import FnddpStrategy

    assert FnddpStrategy(SYNC).sync_state is None
    with pytest.raises(TypeError, match=r"takes no ddp_comm_hook: .*from_hook"):
        FnddpStrategy(SYNC, ddp_comm_hook=print)
