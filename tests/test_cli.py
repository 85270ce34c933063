"""The command as a whole: versions, suggestions, completion, models and transforms of one's own, errors in a line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fnddp
from fnddp.cli import main, models, modules
from fnddp.cli.checks import RANKS_PER_CORE, check_processes
from fnddp.cli.failures import BROKEN_PIPE, WrongArgument

MODELS = """
from torch import nn, ones

module = nn.Linear(8, 4)

class Network(nn.Linear):
    def __init__(self, width=4):
        super().__init__(8, width)

def of_width(width, depth=1):
    return nn.Linear(8, width)

def broken():
    raise KeyError("no such layer")

def ends():
    raise SystemExit(3)

def many():
    return nn.Linear(8, 4), ones(2, 8), lambda output: output

def values():
    made = nn.Linear(8, 4)
    made.weight.data *= made.weight.abs().max().item()
    return made

def trainable():
    return nn.Linear(8, 4), ones(2, 8), lambda output: output.square().mean()
"""

TRANSFORM = """
import fnddp
from fnddp.core import tree
from fnddp import Sync

@fnddp.transform
class halving(Sync):
    inner: Sync

    def init(self, grads):
        return self.inner.init(grads)

    def exchange(self, grads, state):
        return self.inner.exchange(tree.map_leaves(lambda leaf: leaf / 2, grads), state)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `models.py` and `mine_own.py` are, and the command is run."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "mine_own.py").write_text(TRANSFORM)
    (tmp_path / "script.py").write_text('raise SystemExit("usage: script")\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in {"mine_own", "fnddp_file_mine_own", "fnddp_file_models"} - known:
        sys.modules.pop(name, None)


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says of wrong arguments: one message, no traceback, and nothing on standard output."""
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fnddp {fnddp.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["pln"], "Did you mean 'plan'?"),
        (["plan", "--modle", "gpt2"], "No such option: --modle (Possible options: --model)"),
        (["bench", "allreduce", "--engine", "regster"], "'regster' is not one of 'ddp', 'register', 'value_and_grad'"),
        (["demo", "--ranks", "0"], "Invalid value for '--ranks'"),
        (["demo", "--ranks", "two"], "Invalid value for '--ranks'"),
        (["bench", "allreduce", "--pairs", "0"], "Invalid value for '--pairs'"),
        (["tune", "--rate", "0"], "Invalid value for '--rate': must be a positive number, got 0"),
        (["demo", "--pipelines", "fp16(alreduce)"], "; did you mean 'allreduce'?"),
        (["plan", "--model", "gtp2"], "; did you mean 'gpt2'?"),
        (["plan", "--model", "models.py:Netwrk"], "; did you mean 'Network'?"),
        (["bench", "allreduce", "--model", "digts"], "; did you mean 'digits'?"),
        (["tune", "--model", "digts"], "; did you mean 'digits'?"),
        (["bench", "allreduce", "--against", "dpp"], "; did you mean 'ddp'?"),
    ],
)
def test_wrong_arguments_are_answered_with_what_was_perhaps_meant(
    arguments: list[str], meant: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = wrong(capsys, *arguments)
    assert meant in said
    assert len(said.splitlines()) <= 3


def test_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="'alreduce'; did you mean 'allreduce'"):
        _ = fnddp.alreduce
    assert dir(fnddp) == sorted(fnddp.__all__)
    assert all(hasattr(fnddp, name) for name in dir(fnddp))


@pytest.mark.parametrize("name", ["module", "Network", "values", "trainable"])
def test_a_model_may_be_a_module_a_class_or_a_function(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "allreduce", "--json", "--model", f"models.py:{name}"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 36


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "models.py:of_width"], "models.py:of_width cannot be called without arguments: it needs width;"),
        (["--model", "models.py:broken"], "models.py:broken failed: KeyError: 'no such layer' (at "),
        (["--model", "models.py:ends"], "models.py:ends failed: SystemExit: 3 (at "),
        (["--model", "script.py:f"], "cannot import script.py: SystemExit: usage: script (at "),
        (["--import", "script"], "--import: cannot import script: SystemExit: usage: script (at "),
        (["--model", "models.py"], "models.py is a file: say what in it makes the model, models.py:fn"),
        (["--model", "nothing"], "known ones are digits, transformer, deep, gpt2, resnet18. Your own is FILE.py:fn"),
        ([""], "parse: there is no text, where there must be a pipeline; write for example fp16(allreduce)"),
        (["--model", "absent.py:f"], "cannot import absent.py: FileNotFoundError: there is no file absent.py"),
        (["--import", "absent_module"], "--import: cannot import absent_module: ModuleNotFoundError"),
        (["--link", "10mbps"], "; bits are mbit or Mbps, since tc reads mbps as bytes"),
        (["fp16(allreduce, 3)"], "fp16() takes 1 positional argument but 2 were given\n  fp16(allreduce, 3)\n  ^"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = wrong(capsys, "plan", *arguments)
    assert said.startswith("fnddp plan: ")
    assert message in said
    assert len(said.splitlines()) <= 3


def test_a_loss_is_a_scalar(folder: Path) -> None:
    task = models.load("models.py:many").task(1)
    with pytest.raises(
        WrongArgument, match=r"^models.py:many: loss_fn must return a scalar tensor, .* of shape \(2, 4\)$"
    ):
        task.loss(nn.Linear(8, 4), task.batch(0, 1, torch.Generator()))


def test_one_rank_is_no_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "allreduce", "--ranks", "1", "--model", "models.py:module"]) == 0
    assert "36 parameters in 2 leaves; 1 rank; " in capsys.readouterr().out


def test_rates_as_on_data_sheets() -> None:
    assert fnddp.Link.parse("10Gbps") == fnddp.Link.parse("10gbit")
    assert fnddp.Link.parse("100 Mbps:20us") == fnddp.Link.parse("100mbit:20us")


def test_more_processes_than_a_machine_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    check_processes(2 * RANKS_PER_CORE)
    with pytest.raises(WrongArgument):
        check_processes(2 * RANKS_PER_CORE + 1)
    for command in ("demo", "bench"):
        pipelines = ["allreduce"] if command == "bench" else []
        said = wrong(capsys, command, *pipelines, "--ranks", "5000")
        assert "--ranks 5000: each is a process, and on 2 cores at most 16 are started" in said


def test_lower_takes_a_module() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert list(fnddp.lower(fnddp.allreduce, module, world_size=2).leaves) == ["weight"]
    with pytest.raises(TypeError, match="is a Linear, not a tensor; give dict"):
        fnddp.error_feedback(fnddp.allreduce).init(module)


@pytest.mark.parametrize("world_size", [0, -5])
def test_a_world_has_at_least_one_rank(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"lower: world_size must be at least 1, .* got {world_size}"):
        fnddp.lower(fnddp.allreduce, {"w": torch.ones(2)}, world_size=world_size)


def test_a_pipeline_in_the_place_of_devices() -> None:
    with pytest.raises(
        TypeError, match=r"give the pipeline by name: DistributedDataParallel\(module, sync=allreduce\)"
    ):
        fnddp.DistributedDataParallel(nn.Linear(3, 2), fnddp.allreduce)


@pytest.mark.usefixtures("own_transforms")
@pytest.mark.parametrize("name", ["mine_own", "mine_own.py"])
def test_own_transforms_are_imported(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["halving(allreduce)", "--import", name, "--model", "models.py:module"]
    assert main.main(["plan", *arguments, "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert planned["pipeline"] == "halving(allreduce)"
    assert modules.load(name) is modules.load(name)


@pytest.mark.usefixtures("own_transforms")
def test_the_demo_trains_own_models_with_own_transforms_on_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--import", "mine_own.py", "--model", "models.py:trainable", "--steps", "11", "--out", "out"]
    assert main.main(["demo", "--pipelines", "halving(allreduce)", *options]) == 0
    said = capsys.readouterr().out
    assert "models.py:trainable on its own batch; ranks: 2" in said
    assert "final loss" in said
    (trained,) = json.loads((folder / "out" / "results.json").read_text())["pipelines"]
    assert trained["test_accuracy"] is None
    assert trained["loss_by_step"][-1] < trained["loss_by_step"][0]
    assert trained["bytes_per_step"] == 4 * 36


WITHOUT_THE_EXTRA = """
import sys
sys.modules.update(matplotlib=None, sklearn=None)
from fnddp.cli import main
sys.exit(main.main())
"""


def test_plan_needs_no_extra_and_ends_quietly_when_its_reader_does(folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, "plan", "allreduce", "--model", "models.py:module", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=folder)
    assert json.loads(done.stdout)["parameters"] == 36
    process = subprocess.Popen(command[:-1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    process.stdout.close()  # as `head` does when it has seen enough
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (BROKEN_PIPE, "")


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """What bash is offered for the last of `words`."""
    monkeypatch.setenv("_FNDDP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit, match="0"):
        main.main([])
    return set(capsys.readouterr().out.split())


def test_commands_options_and_what_options_may_be_are_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = partial(completed, monkeypatch, capsys)
    assert complete("fnddp", "p") == {"plan"}
    assert {"demo", "plan", "bench", "tune", "trace", "doctor", "completion"} <= complete("fnddp", "")
    assert complete("fnddp", "plan", "--mo") == {"--model"}
    assert complete("fnddp", "plan", "--model", "g") == {"gpt2"}
    assert complete("fnddp", "bench", "--engine", "") == {"ddp", "register", "value_and_grad"}
    assert complete("fnddp", "completion", "f") == {"fish"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_FNDDP_COMPLETE=complete_{shell}" in script
    if shell != "fish" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)
