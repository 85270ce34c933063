"""Build sdist and wheel as for a release, check them, and use each in an environment of what it requires alone.

For the Python of an environment that has the extra "release". The new environments link to what it has installed: to
install torch once more would take a minute.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
ADDRESS = "https://example.org/fnddp"
STEP = """
import sys, torch, torch.distributed as dist, fnddp
from pathlib import Path
assert Path(fnddp.__file__).is_relative_to(sys.prefix), fnddp.__file__
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
sync = fnddp.parse("error_feedback(powersgd(bf16(allreduce), rank=4))")
model = fnddp.DistributedDataParallel(torch.nn.Linear(64, 32), sync=sync)
model(torch.randn(16, 64)).square().mean().backward()
assert "local/residual.weight" in fnddp.state_dict(model.sync_state)
del model
dist.destroy_process_group()
"""
MODEL = """
import torch
def make():
    return torch.nn.Linear(20, 1), torch.randn(32, 20), lambda output: output.square().mean()
"""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run `command` and return its output; exit with all that it said if it fails."""
    names = ("PYTHONPATH", "FNDDP_REPO_URL", "VIRTUAL_ENV")
    own = {name: value for name, value in os.environ.items() if name not in names} | environment
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def required(*names: str) -> dict[str, Distribution]:
    """Return the distributions `names`, and all that they require."""
    found: dict[str, Distribution] = {}
    for name in (left := list(names)):
        if name not in found:
            found[name] = distribution(name)
            needs = map(Requirement, found[name].requires or ())
            left += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def environment(folder: Path, requirements: list[str]) -> Path:
    """Make an environment that has `requirements` alone, and return its folder of scripts."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/*/site-packages")
    for each in required(*requirements).values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(each.locate_file(top)))
    return folder / "bin"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist")  # the wheel from the sdist
        (wheel,), (sdist,) = (list((work / "dist").glob(f"*.{suffix}")) for suffix in ("whl", "tar.gz"))
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        version = wheel.name.split("-")[1]

        build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", work / "addressed")
        run(sys.executable, *build, FNDDP_REPO_URL=ADDRESS)
        with ZipFile(work / "addressed" / wheel.name) as archive:
            about = message_from_bytes(archive.read(f"fnddp-{version}.dist-info/METADATA"))
        assert f"Changelog, {ADDRESS}/blob/v{version}/CHANGELOG.md" in about.get_all("Project-URL", [])
        assert "](docs/" not in str(about.get_payload())
        with tarfile.open(sdist) as archive:
            assert f"fnddp-{version}/tests/test_docs.py" in archive.getnames()

        needs = [Requirement(each) for each in about.get_all("Requires-Dist", [])]
        core = [each.name for each in needs if each.marker is None]
        for file, builds in ((wheel, []), (sdist, ["hatchling"])):
            scripts = environment(work / file.suffix, [*core, *builds])
            options = ("install", "--quiet", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
            run(sys.executable, "-m", "pip", "--python", scripts / "python", *options, file)
            assert run(scripts / "fnddp", "--version", cwd=work) == f"fnddp {version}\n"
            run(scripts / "python", "-c", STEP, cwd=work)
            print(f"{file.name}: installed and used, with {', '.join(core)} and what they require")
        scripts = work / wheel.suffix / "bin"
        (work / "model.py").write_text(MODEL)
        for command, said in {"plan": "2.0x", "doctor": "ok: means are equal on all ranks"}.items():
            assert said in (out := run(scripts / "fnddp", command, "--model", "model.py:make", cwd=work)), out


main()
