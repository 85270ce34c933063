"""The command as a whole: versions, suggestions, completion, models of one's own, errors in a line, terminals."""

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fnddp
from fnddp.cli import main, models, terminal
from fnddp.cli.failures import BROKEN_PIPE, WrongArgument
from fnddp.cli.options import MODELS
from fnddp.wire.groups import LAUNCHERS
from tests import workloads
from tests.hosts import complaints
from tests.workloads import SMALL, WIDE

FILE = workloads.__file__
TWO_LEVELS = "hierarchical(fp16(all_reduce('across')), intra='node')"
TRANSFORM = """
from fnddp import Sync, transform, tree

@transform
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
def test_an_old_torch_is_an_error_in_a_line_and_none_is_needed_for_the_version(command, code, said) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, command], capture_output=True, text=True, timeout=100)
    (line,) = [*done.stdout.splitlines(), *complaints(done.stderr)]
    assert done.returncode == code
    assert line.startswith(said)


WRONG = {
    "": [(["pln"], "Did you mean 'plan'?")],
    "demo": [
        (["--ranks", "0"], "Invalid value for '--ranks'"),
        (["--ranks", "5000"], "; to use virtual ranks in one process: fnddp tune"),
        (["fp16(alreduce)"], "; did you mean 'allreduce'?"),
        (["--out", "mine_own.py/out"], "--out: cannot write mine_own.py/out: Not a directory; choose another path"),
    ],
    "plan": [
        (["--modle", "gpt2"], "No such option: --modle (Possible options: --model)"),
        (["--model", "gtp2"], "unknown model 'gtp2'; did you mean 'gpt2'?"),
        (["--model", "models.py:Netwrk"], "has no function or module 'Netwrk'; did you mean 'Network'?"),
        (["--model", "models.py:x"], "no function or module 'x'; it has Network, Positions, alone, branches, broken, "),
        (["--model", "models.py:broken"], "models.py:broken failed: KeyError: 'no such layer' (at "),
        (["--model", "models.py:number"], "number must return a torch.nn.Module or (module, inputs, loss_fn), got int"),
        (["--model", "models.py:frozen"], "has no parameters that require gradients: there is nothing to synchronize"),
        (["--model", "models.py"], "models.py is a file: name its function that makes the model, models.py:fn"),
        (["--model", "absent.py:f"], "cannot import absent.py: FileNotFoundError: [Errno 2] No such file"),
        (["--model", "models.py:lazy"], "models.py:lazy has uninitialized lazy parameters; run its forward once"),
        (["--import", "script"], "--import: cannot import script: SystemExit: usage: script (at "),
        (["quantize()"], "plan: quantize: missing a required argument: 'inner'; its options are inner (a pipeline)"),
        (["quantize(two_shot, 8, 128, 'nearest', 0, 1)"], "plan: quantize: too many positional arguments; its options"),
        (["allreduce", "powersgd(allreduce, rank=0)"], "\n  powersgd(allreduce, rank=0)\n  ^\n"),
        (["partition({'encoder.*': allreduce})"], "partition: leaf 'blocks.0.linear1.bias' matches none"),
        (["fp16(allreduce, check=True)"], "fp16(allreduce, check=True) cannot be lowered"),
        (["auto", "--link", "node=1gbit"], "auto: estimate: process group None has no link; links are given for"),
        (["--link", "10mbps"], "; bits are mbit or Mbps, since tc reads mbps as bytes"),
        (["--bucket-cap-mb", "nan"], "Invalid value for '--bucket-cap-mb': must be a positive number, got nan"),
        (["--show", "--json"], "--json prints only JSON: remove --show"),
        (["--replicas", "2"], "plan a model's axes: give --shards N"),
        (["--shards", "2", "--ranks", "8", "--show"], "remove --ranks, --show"),
        (["allreduce", "--shards", "2"], "one pipeline is planned, between replicas: give their number, --replicas N"),
        (["--shards", "2", "--gradients", "topk(allgather, k=1)"], "FSDP sends gradients over its own group, as two"),
        (["--shards", "2", "--link", "node=1gbit"], "--link node=1gbit: give shards=..., or one link for all"),
        ([TWO_LEVELS, "--ranks", "0"], "--ranks must be a whole number of at least 1, or one for each group"),
        ([TWO_LEVELS, "--ranks", "1024"], "group 'across' and group 'node'; give --ranks across=...,node=..."),
        ([TWO_LEVELS, "--ranks", "node=8,across=2,rack=2"], "rack=2: the pipelines reduce over group 'across' and"),
        ([TWO_LEVELS, "--ranks", "node=8,across=2,node=8"], "group 'node' is given twice"),
    ],
    "bench": [
        (["weighted(allreduce)"], "weighted(allreduce) needs a weight in each step, which commands do not pass"),
        ([], "name a pipeline, such as 'fp16(allreduce)', or pass --codecs"),
        (["allreduce", "--engine", "regster"], "'regster' is not one of 'ddp', 'register', 'value_and_grad'"),
        (["--against", "dpp"], "--against: unknown peer 'dpp'; did you mean 'ddp'?"),
        (["allreduce", "--against", "bf16_hook"], "--against bf16_hook: no peer is left to compare with; add ddp"),
        (["allreduce", "--model", "models.py:alone"], "returns only a module; for a training it must return (module, "),
        (["allreduce", "--model", "models.py:text_in"], "returns inputs of str; inputs must be a tensor or a tuple"),
        (["allreduce", "--model", "models.py:no_loss"], "returns float; loss_fn must be a function of the module's"),
        (["allreduce", "--device", "npu"], "--device npu: torch finds "),
        (["--codecs", "--ranks", "4", "--link", "1gbit"], "a link or a model: remove --ranks and --link"),
    ],
    "run": [
        (["absent.py"], "there is no script absent.py"),
        (["--link", "loopback", "script.py"], "use torchrun if no slow link is needed, or give one, such as 200mbit"),
        (["--link", "slow", "script.py"], "'slow' is not a link"),
    ],
    "tune": [
        (["--within=-1%"], "--within must be 0 or a positive number"),
        (["--model", "digits", "--data", "text"], "--model digits fails on --data text: RuntimeError"),
        (["--model", "models.py:detached"], "detached fails on --data own: RuntimeError: element 0 of tensors does"),
        (["--model", "models.py:raises"], "raises fails on --data own: RuntimeError: odd gradient (at "),
        (["--model", "models.py:sparse"], "sparse cannot be tuned: the gradient of weight is sparse; remove sparse"),
        (
            ["--model", "models.py:normalized", "--data", "digits"],
            "normalized fails on virtual ranks, since 1 changes its buffers (GroupNorm does not): RuntimeError: ",
        ),
        (["--model", "models.py:small", "--batch", "4"], "--batch 4: models.py:small has batches of its own; change"),
        (["--model", "models.py:branches"], "branches fails on virtual ranks: RuntimeError: vmap"),
        (["--model", "models.py:of_closures"], "cannot be tuned with LBFGS (it needs closures); return another optimi"),
        (["--ranks", "1500"], "--ranks 1500: each rank needs an image; there are 1,257 to train on"),
        ([TWO_LEVELS], "process group 'node' is named, but"),
        (["partition({'*.bias': none, '*': allreduce})", "--steps", "1"], "differs between ranks"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"), [(command, *each) for command, rows in WRONG.items() for each in rows]
)
def test_wrong_arguments_are_answered_in_a_line_before_anything_is_done(command, arguments, message, folder, capsys):
    before = set(folder.iterdir())
    assert main.main([*command.split(), *arguments]) == 2
    out, err = capsys.readouterr()
    err = "".join(f"{line}\n" for line in complaints(err))
    assert out == ""
    assert err.startswith(f"fnddp {command}: " if command else "fnddp: ")
    assert message in err
    assert len(err.replace(f"\n\n{models.EXAMPLE}", "").splitlines()) <= 3
    assert models.EXAMPLE in err or "must return" not in err
    assert set(folder.iterdir()) - {folder / "__pycache__"} == before


@pytest.mark.parametrize("name", ["module", "Network", "values"])
def test_a_model_may_be_a_module_a_class_or_a_function(name: str, folder: Path) -> None:
    shapes = {"weight": ((4, 8), True), "bias": ((4,), True)}  # on the meta device, although `values` reads its own
    parameters = models.parameters(f"models.py:{name}")
    assert {path: (p.shape, p.is_meta) for path, p in parameters.items()} == shapes


def test_a_file_imports_from_its_folder_and_from_the_current_one(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "of_here.py").write_text("WIDTH = 3\n")
    (folder / "sub" / "of_sub.py").write_text("HEIGHT = 4\n")
    code = "import of_here, of_sub, torch\nmodule = torch.nn.Linear(of_here.WIDTH, of_sub.HEIGHT)\n"
    (folder / "sub" / "both.py").write_text(code)
    assert models.parameters("sub/both.py:module")["weight"].shape == (4, 3)


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
    with pytest.raises(TypeError, match=r"the pipeline by name: DistributedDataParallel\(module, sync=allreduce\)"):
        fnddp.DistributedDataParallel(module, fnddp.allreduce)


@pytest.mark.usefixtures("own_transforms")
def test_own_transforms_are_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = ["--import", "mine_own", "--model", "models.py:module"]
    assert main.main(["plan", "halving(allreduce)", *of, "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert planned["pipeline"] == "halving(allreduce)"


@pytest.mark.usefixtures("own_transforms")
def test_the_demo_trains_own_models_with_own_transforms_on_ranks(folder, capsys) -> None:
    options = ["--import", "mine_own.py", "--model", "models.py:small", "--steps", "11", "--out", "out"]
    assert main.main(["demo", "halving(allreduce)", *options]) == 0
    assert models.imported("mine_own.py") is models.imported("mine_own.py")  # a transform is registered once
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
    told = [line for line in errors.splitlines() if not line.startswith("... ")]  # what it does, if that takes long
    assert (process.returncode, told) == (BROKEN_PIPE, [])


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


def test_models_that_a_command_refuses_are_not_completed(monkeypatch, complete) -> None:
    monkeypatch.setattr("fnddp.cli.options.find_spec", lambda name: None if name == "sklearn" else name)
    assert complete("fnddp", "tune", "--model", "") == set(MODELS) - {"digits", "resnet18"}  # which has buffers


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_FNDDP_COMPLETE=complete_{shell}" in script
    if shell != "fish" and shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


# Terminals of several widths: names fold, columns give way, numbers stay whole.

LOW_RANK = "error_feedback(powersgd(fp16(allreduce), rank=2))"
NUMBERS = ("2,153,760", "17.23 ms", "1.723 ms", "9,520")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = re.compile(r"\x1b\[[0-9;]*m")
PLAN = ("plan", "allreduce", LOW_RANK, "--model", WIDE, "--link", "1gbit", "--link", "10gbit")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """`said(columns, *arguments, **environment)`: what a command writes to a terminal, and its errors."""

    def run(columns: int, *arguments: str, **environment: str) -> tuple[str, str]:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        assert main.main(list(arguments)) == 0
        return capsys.readouterr()

    return run


def names_of(lines: list[str]) -> str:
    below = lines[1 + next(i for i, line in enumerate(lines) if line.startswith("───")) :]
    assert "…" not in "".join(below)
    return "".join(re.split(r"\s{2,}", line.strip())[0] for line in below[: below.index("")]).replace(" ", "")


def require_fit(text: str, columns: int) -> None:
    lines = [line.rstrip() for line in ESCAPES.sub("", text).split("\n")]
    words = [line for line in lines if "/" not in line.split(" ")[0] and not line.startswith("Wrote ")]
    assert max(map(len, words)) <= columns, "\n".join(words)
    assert LOW_RANK.replace(" ", "") in names_of(lines)


@pytest.mark.parametrize(("columns", "numbers"), [(40, NUMBERS[1:2]), (80, NUMBERS), (200, NUMBERS)])
def test_what_is_printed_fits_and_numbers_stay_whole(said, columns: int, numbers: tuple[str, ...]) -> None:
    text, _ = said(columns, *PLAN)
    require_fit(text, columns)
    for number in numbers:
        assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.])", ESCAPES.sub("", text)), number
    assert ("Not shown" in text) == (columns < 200)
    assert STYLES.search(text)
    assert STYLES.findall(said(columns, *PLAN, NO_COLOR="1")[0]) == []


@pytest.mark.thorough
def test_a_dumb_terminal_gets_text_alone(said: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    demo = ["demo", LOW_RANK, "--ranks", "1", "--steps", "11", "--model", WIDE, "--out", str(tmp_path)]
    text, progress = said(60, *demo)
    require_fit(text, 60)
    assert "\r" in progress
    assert max(map(len, re.split(r"[\r\n]|made a plan .*", ESCAPES.sub("", progress)))) <= 60
    assert not {"\x1b", "\r"} & set("".join(said(60, *demo, TERM="dumb")))


TUNE = ("tune", "--ranks", "2", "--steps", "1", "--seeds", "1", "sign(allgather)")
PHASES = {
    (*PLAN[:2], "--model", SMALL): ["loading ", "checking pipelines", "lowering allreduce"],
    (*TUNE, "--model", SMALL): ["loading ", "timing forward and backward", "timing allreduce", "training allreduce, "],
    ("bench", "allreduce", "--ranks", "1", "--pairs", "1", "--model", SMALL): [
        *("loading ", "starting 1 rank", "preparing allreduce", "warming up ", "timing "),
    ],
}


@pytest.mark.parametrize("command", PHASES)
def test_progress_shows_each_phase_from_its_start(command: tuple[str, ...], said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, shown = said(200, *command)
    at = [shown.find(phase) for phase in ("importing torch", *PHASES[command])]
    assert -1 not in at
    assert at == sorted(at)


def test_a_file_that_fails_is_not_kept_half_loaded(tmp_path, capsys):
    (tmp_path / "half.py").write_text("model = 1\nraise KeyError('no such layer')\n")
    for _ in range(2):
        assert main.main(["plan", "--model", f"{tmp_path}/half.py:model"]) == 2
        assert "KeyError: 'no such layer'" in capsys.readouterr().err


def test_what_has_no_terminal_gets_a_line_for_each_phase_with_the_time_that_is_left() -> None:
    now, file = [0.0], io.StringIO()
    lines = terminal.Lines(file, lambda: now[0])
    lines.show("importing torch")
    lines.show("loading data")
    lines.begin()
    for now[0], *shown in (
        (0.0, "training a", 0, 100),
        (10.0, "training a", 20, 100),
        (20.0, "training b", 50, 100),
        (49.0, "training b", 60, 100),
        (60.0, "training b", 75, 100),
        (200.0, "done"),
    ):
        lines.show(*shown)
    assert file.getvalue().splitlines() == [
        "... loading data",
        "... training a",
        "... training b, about 20 s left",
        "... training b, about 20 s left",
        "... done",
    ]


def test_only_the_first_rank_shows_progress(monkeypatch, capsys) -> None:
    assert set(terminal.RANKS) == {rank for rank, *_ in LAUNCHERS.values()}
    monkeypatch.setattr(terminal, "Timer", lambda _, begin: SimpleNamespace(start=begin, cancel=lambda: None))
    for name in terminal.RANKS:
        monkeypatch.setenv(name, "1")
        with terminal.progress("working") as show:
            show("on", 1, 2)
        assert capsys.readouterr().err == ""
        monkeypatch.setenv(name, "0")
    with terminal.progress("working"):
        assert capsys.readouterr().err == "... working\n"


@pytest.mark.parametrize("arguments", [["plan", "bf16((allreduce"], ["trace", "fp16(allreduce"], ["tune", "a b"]])
def test_wrong_syntax_is_told_before_torch_is_imported(arguments: list[str]) -> None:
    run = f"import sys; from fnddp.cli.main import main; code = main({arguments})"
    code = f"{run}; assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fnddp {arguments[0]}: parse: ")
    assert done.stderr.splitlines()[2].strip() == "^"


def test_nothing_at_all_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    said = capsys.readouterr().out
    for name in ("demo", "plan", "bench", "tune", "trace", "doctor"):
        assert re.search(rf"^  {name} +[A-Z]", said, re.MULTILINE)
