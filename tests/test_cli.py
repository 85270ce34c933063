"""The command as a whole: versions, suggestions, completion, models and transforms of one's own, errors in a line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fnddp
from fnddp.cli import main, models
from fnddp.cli.checks import RANKS_PER_CORE, check_processes
from fnddp.cli.failures import BROKEN_PIPE, WrongArgument
from fnddp.cli.options import MODELS
from tests import workloads

FILE = workloads.__file__
TWO_LEVELS = "hierarchical(fp16(all_reduce('across')), intra='node')"
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
    shutil.copy(FILE, tmp_path / "models.py")
    (tmp_path / "mine_own.py").write_text(TRANSFORM)
    (tmp_path / "script.py").write_text('raise SystemExit("usage: script")\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in {"mine_own", "fnddp_file_mine_own", "fnddp_file_models"} - known:
        sys.modules.pop(name, None)


WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].__version__ = "2.6.0+cu124"
from fnddp.cli import main
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("--version", 0, f"fnddp {fnddp.__version__}"),
        ("doctor", 1, "fnddp doctor: fnddp needs torch 2.11 or later; found 2.6"),
    ],
)
def test_an_old_torch_is_an_error_in_a_line_and_none_is_needed_for_the_version(
    command: str, code: int, said: str
) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, len((done.stdout + done.stderr).splitlines())) == (code, 1)
    assert (done.stdout + done.stderr).startswith(said)


WRONG = {
    "": [(["pln"], "Did you mean 'plan'?")],
    "demo": [
        (["--ranks", "0"], "Invalid value for '--ranks'"),
        (["--ranks", "5000"], "--ranks 5000: each rank is a process, and on "),
        (["--pipelines", "fp16(alreduce)"], "; did you mean 'allreduce'?"),
        (["--out", "mine_own.py/out"], "--out: cannot write mine_own.py/out: Not a directory; name another"),
    ],
    "plan": [
        (["--modle", "gpt2"], "No such option: --modle (Possible options: --model)"),
        (["--model", "gtp2"], "unknown model 'gtp2'; did you mean 'gpt2'?"),
        (["--model", "models.py:Netwrk"], "has no function or module 'Netwrk'; did you mean 'Network'?"),
        (["--model", "models.py:x"], "has no function or module 'x'; it has Network, alone, broken, frozen, "),
        (
            ["--model", "models.py:of_width"],
            "models.py:of_width failed: TypeError: of_width() missing 1 required positional argument: ",
        ),
        (["--model", "models.py:broken"], "models.py:broken failed: KeyError: 'no such layer' (at "),
        (["--model", "models.py:number"], "number must return a torch.nn.Module or (module, inputs, loss_fn), got int"),
        (["--model", "models.py:frozen"], "has no parameters that require gradients: there is nothing to synchronize"),
        (["--model", "models.py"], "models.py is a file: name the function in it that makes the model, models.py:fn"),
        (["--model", "absent.py:f"], "cannot import absent.py: FileNotFoundError: [Errno 2] No such file"),
        (["--import", "script"], "--import: cannot import script: SystemExit: usage: script (at "),
        ([""], "parse: there is no text, where there must be a pipeline; write for example fp16(allreduce)"),
        (["fp16(allreduce, 3)"], "fp16() takes 1 positional argument but 2 were given\n  fp16(allreduce, 3)\n  ^"),
        (["allreduce", "powersgd(allreduce, rank=0)"], "\n  powersgd(allreduce, rank=0)\n  ^\n"),
        (["partition({'encoder.*': allreduce})"], "partition: leaf 'position' matches none"),
        (["fp16(allreduce, check=True)"], "fp16(allreduce, check=True) cannot be lowered"),
        (["--link", "10mbps"], "; bits are mbit or Mbps, since tc reads mbps as bytes"),
        (["--link", "100"], "--link: '100' is no link: write a rate"),
        (["--bucket-cap-mb", "nan"], "Invalid value for '--bucket-cap-mb': must be a positive number, got nan"),
        (["--show", "--json"], "--json prints nothing else: leave --show out"),
        (["--replicas", "2"], "the plan of a model's axes is for --shards and --replicas: give --shards N"),
        (["--shards", "2", "--ranks", "4", "--show"], "leave --ranks, --show out"),
        (["allreduce", "--shards", "2"], "one pipeline is planned, between replicas: give their number, --replicas N"),
        (["--shards", "2", "--gradients", "topk(allgather, k=1)"], "FSDP sends gradients as two_shot does"),
        (["--shards", "2", "--link", "node=1gbit"], "--link node=1gbit: give shards=..., or one link for all"),
        (["--trace", "x"], "--trace draws the plan of one pipeline on one link"),
        (["allreduce", "--svg", "x.svg", "--trace", "absent/x"], "--trace: cannot write absent/x: No such file"),
        (["allreduce", "--trace", "."], "--trace: cannot write .: Is a directory"),
        ([TWO_LEVELS, "--ranks", "0"], "--ranks must be a whole number of at least 1, or one for each group"),
        (
            [TWO_LEVELS, "--ranks", "1024"],
            "reduce over group 'across' and group 'node'; give --ranks across=...,node=...",
        ),
        ([TWO_LEVELS, "--ranks", "node=8,across=2,rack=2"], "rack=2: the pipelines reduce over group 'across' and"),
        ([TWO_LEVELS, "--ranks", "node=8,across=2,node=8"], "group 'node' is given twice"),
    ],
    "bench": [
        ([], "name a pipeline, such as 'fp16(allreduce)', or ask for --codecs"),
        (["allreduce", "--engine", "regster"], "'regster' is not one of 'ddp', 'register', 'value_and_grad'"),
        (["allreduce", "--against", "dpp"], "--against: unknown peer 'dpp'; did you mean 'ddp'?"),
        (["allreduce", "--against", "bf16_hook"], "--against bf16_hook: no peer is left to compare with; add ddp"),
        (["allreduce", "--backend", "inductor", "--compile"], "--backend is for what plans compute"),
        (["allreduce", "--model", "models.py:alone"], "returns a module alone; to train it, it must return (module, "),
        (["allreduce", "--model", "models.py:text_in"], "returns inputs of str; inputs must be a tensor or a tuple"),
        (
            ["allreduce", "--model", "models.py:no_loss"],
            "returns float; loss_fn must be a function of the module's output",
        ),
        (["--codecs", "--ranks", "4", "--link", "1gbit"], "a link or a model: leave --ranks and --link out"),
    ],
    "tune": [
        (["--rate", "0"], "Invalid value for '--rate': must be a positive number, got 0"),
        (["--within=-1%"], "--within: must be 0 or a positive number"),
        (["--model", "digits", "--data", "text"], "--model digits does not take --data text: RuntimeError"),
        (["--model", "models.py:normalized", "--data", "digits"], "cannot be tuned: 1 (BatchNorm1d) changes its buf"),
        (["--ranks", "1500"], "--ranks 1500: each rank needs an image; there are 1,257 to train on"),
        (["--pipelines", "none"], "none exchanges nothing"),
        (["--pipelines", TWO_LEVELS], "process group 'node' is named, but"),
        (["--pipelines", "partition({'*.bias': none, '*': allreduce})", "--steps", "1"], "not the same on all ranks"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"), [(command, *each) for command, rows in WRONG.items() for each in rows]
)
def test_wrong_arguments_are_answered_in_a_line_before_anything_is_done(
    command: str, arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(folder.iterdir())
    assert main.main([*command.split(), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"fnddp {command}: " if command else "fnddp: ")
    assert message in err
    assert len(err.replace(f"\n\n{models.EXAMPLE}", "").splitlines()) <= 3
    assert models.EXAMPLE in err or "must return" not in err
    assert set(folder.iterdir()) - {folder / "__pycache__"} == before


@pytest.mark.parametrize("name", ["module", "Network", "values"])
def test_a_model_may_be_a_module_a_class_or_a_function(name: str, folder: Path) -> None:
    assert sum(p.numel() for p in models.parameters(f"models.py:{name}").values()) == 36


@pytest.mark.parametrize("name", ["example", "own_problem"])
def test_all_commands_take_the_example_of_their_error_and_problems(name: str, folder: Path) -> None:
    (folder / "example.py").write_text(f"{models.EXAMPLE}\n")
    model = "example.py:make" if name == "example" else "models.py:own_problem"
    assert sum(p.numel() for p in models.parameters(model).values()) == 21
    problem = models.load(model)
    batch = problem.batch(0, 1, torch.Generator())
    assert problem.loss(problem.make(0), batch).ndim == 0
    assert models.to_tune(model, None, batch=2, ranks=2, steps=2, rate=None).make(0).weight.numel() == 20


def test_a_loss_is_a_scalar() -> None:
    problem = models.load(f"{FILE}:many")
    with pytest.raises(WrongArgument, match=r"many: loss_fn must return a scalar tensor, .* of shape \(2, 4\)$"):
        problem.loss(nn.Linear(8, 4), problem.batch(0, 1, torch.Generator()))


def test_processes_that_a_machine_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    check_processes(2 * RANKS_PER_CORE)
    with pytest.raises(WrongArgument, match="on 2 cores at most 16 are started; virtual ranks need none: fnddp tune"):
        check_processes(2 * RANKS_PER_CORE + 1)


def test_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match="'alreduce'; did you mean 'allreduce'"):
        _ = fnddp.alreduce
    assert dir(fnddp) == sorted(fnddp.__all__)
    assert all(hasattr(fnddp, name) for name in dir(fnddp))


def test_calls_that_users_get_wrong() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert list(fnddp.lower(fnddp.allreduce, module, world_size=2).leaves) == ["weight"]
    with pytest.raises(TypeError, match="is a Linear, not a tensor; give dict"):
        fnddp.error_feedback(fnddp.allreduce).init(module)
    for n in (0, -5):
        with pytest.raises(ValueError, match=f"lower: world_size must be at least 1, .* got {n}"):
            fnddp.lower(fnddp.allreduce, {"w": torch.ones(2)}, world_size=n)
    with pytest.raises(TypeError, match=r"the pipeline by name: DistributedDataParallel\(module, sync=allreduce\)"):
        fnddp.DistributedDataParallel(module, fnddp.allreduce)


@pytest.mark.usefixtures("own_transforms")
@pytest.mark.parametrize("name", ["mine_own", "mine_own.py"])
def test_own_transforms_are_imported(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "halving(allreduce)", "--import", name, "--model", "models.py:module", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert planned["pipeline"] == "halving(allreduce)"
    assert models.imported(name) is models.imported(name)


@pytest.mark.usefixtures("own_transforms")
def test_the_demo_trains_own_models_with_own_transforms_on_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--import", "mine_own.py", "--model", "models.py:small", "--steps", "11", "--out", "out"]
    assert main.main(["demo", "--pipelines", "halving(allreduce)", *options]) == 0
    out = capsys.readouterr().out
    assert "models.py:small on its own batch; ranks: 2" in out
    assert "final loss" in out
    (trained,) = json.loads((folder / "out" / "results.json").read_text())["pipelines"]
    assert trained["test_accuracy"] is None
    assert trained["loss_by_step"][-1] < trained["loss_by_step"][0]
    assert trained["bytes_per_step"] == 4 * (64 * 32 + 32)


WITHOUT_THE_EXTRA = """
import sys
sys.modules.update(matplotlib=None, sklearn=None)
from fnddp.cli import main
sys.exit(main.main())
"""


@pytest.mark.thorough
def test_plan_needs_no_extra_and_ends_quietly_when_its_reader_does(folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, "plan", "allreduce", "--model", "models.py:module", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=folder)
    assert json.loads(done.stdout)["parameters"] == 36
    process = subprocess.Popen(command[:-1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    process.stdout.close()  # as `head` does when it has seen enough
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (BROKEN_PIPE, "")


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """What bash is offered for the last of some words."""

    def completed(*words: str) -> set[str]:
        monkeypatch.setenv("_FNDDP_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit, match="0"):
            main.main([])
        return set(capsys.readouterr().out.split())

    return completed


def test_commands_options_and_what_options_may_be_are_completed(complete: Callable[..., set[str]]) -> None:
    assert {"demo", "plan", "bench", "tune", "trace", "doctor", "completion"} <= complete("fnddp", "")
    assert complete("fnddp", "plan", "--mo") == {"--model"}
    assert complete("fnddp", "plan", "--model", "g") == {"gpt2"}
    assert complete("fnddp", "bench", "--engine", "") == {"ddp", "register", "value_and_grad"}
    assert complete("fnddp", "bench", "--model", "") == set(MODELS)


def test_models_that_a_command_refuses_are_not_completed(
    monkeypatch: pytest.MonkeyPatch, complete: Callable[..., set[str]]
) -> None:
    monkeypatch.setattr("fnddp.cli.options.find_spec", lambda name: None if name == "sklearn" else name)
    assert complete("fnddp", "tune", "--model", "") == set(MODELS) - {"digits", "resnet18"}  # which has buffers


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_FNDDP_COMPLETE=complete_{shell}" in script
    if shell != "fish" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)
