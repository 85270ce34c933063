"""Write README's measured result from what `fnddp bench` has written.

python benchmarks/measured.py                          # the block of README, from results/bench.json
python benchmarks/measured.py fnddp-bench/results.json # the same, after keeping that file as results/bench.json
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results" / "bench.json"
BLOCK = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- /measured -->)", re.DOTALL)
NAMES = {
    "ddp": "torch's `DistributedDataParallel`",
    "fp16_hook": "the same with torch's `fp16_compress_hook`",
    "powersgd_hook": "the same with torch's `powerSGD_hook`",
}


def table(found: dict[str, Any]) -> str:
    """Return rows of arms, peers first, with times against torch's class and losses, and the conditions of the run."""
    verdicts = (KEPT.parent / "convergence-verdicts.md").read_text()
    dense = next(arm["link_bytes"] for arm in found["arms"] if arm["arm"] == "ddp")
    lines = [
        "| a training step with | ms | of torch DDP's time | times fewer bytes | loss in the study, nats |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm in sorted(found["arms"], key=lambda arm: (not arm["peer"], -arm["median_seconds"])):
        ratio = arm["ratios"].get("ddp", {"median": 1.0})["median"]
        name = NAMES[arm["arm"]] if arm["peer"] else f"`{arm['arm']}`"
        fewer = dense / arm["link_bytes"]
        found_loss = re.search(rf"^\| `{re.escape(arm['arm'])}` \| (\S+) \|", verdicts, re.MULTILINE)
        loss = "0" if arm["arm"] == "ddp" else found_loss[1] if found_loss else "not studied"
        lines.append(f"| {name} | {1e3 * arm['median_seconds']:,.0f} | {ratio:.2f} | {fewer:.1f} | {loss} |")
    command = found["command"].replace("'", '"').replace(" --link", " \\\n    --link")
    millions, ranks, torch = found["parameters"] / 1e6, found["ranks"], found["torch"].split("+")[0]
    return (
        "\n".join(lines)
        + f"""

Times and bytes: a transformer of {millions:.1f} M parameters on {ranks} workers with one thread each, in network
namespaces of one machine ({found["machine"]}), gloo, torch {torch}, medians of {found["pairs"]} steps,
and of their ratios to the DDP step measured next to them. A step is forward and backward, without the
optimizer. Losses: above the plain mean's, with AdamW, in [the study](docs/convergence.md), as means over its two
models of 40,000 parameters on 8 and 64 workers; +0.003 is not distinguishable from 0. To repeat the times, on
Linux as root:

```sh
{command}
```
"""
    )


def main() -> None:
    if len(sys.argv) > 1:
        found = json.loads(Path(sys.argv[1]).read_text())
        found["command"] = re.sub(r" --out \S+", "", found["command"])
        for arm in found["arms"]:
            arm.pop("interface_bytes_by_step", None)
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    readme = ROOT / "README.md"
    text = table(json.loads(KEPT.read_text()))
    readme.write_text(BLOCK.sub(lambda _: text, readme.read_text()))


if __name__ == "__main__":
    main()
