"""Build the device of this folder: `python -m tests.accelerator.build` prints a folder for PYTHONPATH.

In a process that has the folder there, `import torch` finds the device, as it finds the backends of others.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ["device.cpp", "operations.cpp", "collectives.cpp"]
NAME = "fnddp_device"
FLAGS = ["-O0", "-g0", "-w", "-fvisibility=hidden"]
ENTRY = f"[torch.backends]\n{NAME} = tests.accelerator.device:autoload\n"


def folder() -> Path:
    """Return the folder of the build: another one for each version of torch and of the sources."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for name in [*SOURCES, "device.h"]:
        digest.update((HERE / name).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fnddp-tests" / digest.hexdigest()[:16]


def library() -> Path:
    return folder() / f"{NAME}.so"


def missing() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    if library().exists():
        return None
    lacks = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"needs {' and '.join(lacks)} to build a device" if lacks else None


def build() -> Path:
    """Build what is not there yet, in a process of its own, whose torch does not become that of the device."""
    if not library().exists():
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "MAX_JOBS": "1"}
        command = [sys.executable, "-m", "tests.accelerator.build"]
        subprocess.run(command, cwd=HERE.parents[1], env=environment, check=True, capture_output=True)
    return folder()


def main() -> None:
    made = folder()
    if not library().exists():
        from torch.utils.cpp_extension import load

        made.mkdir(parents=True, exist_ok=True)
        sources = [str(HERE / name) for name in SOURCES]
        load(NAME, sources, extra_cflags=FLAGS, build_directory=str(made), is_python_module=False)
    about = made / f"{NAME}-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY)
    print(made)


if __name__ == "__main__":
    main()
