"""`fnddp plan --shards`: what a model that FSDP2 shards would send along its axes, before there is a cluster."""

import json
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from fnddp.cli import checks
from fnddp.cli.failures import WrongArgument
from fnddp.cli.terminal import echo
from fnddp.cost.link import Link
from fnddp.integrations.fsdp.axes import plan_axes
from fnddp.show.text import count

_BLOCK = re.compile(r"(?:.*?\.)??\d+(?=\.)")


def show(
    model: str,
    ranks: tuple[int, int],
    of_shards: tuple[str | None, str | None],
    pipelines: Sequence[str],
    links: Sequence[str],
    as_json: bool,
) -> None:
    """Print the plan of a step of `model`, with the time of each axis on each of `links`.

    `ranks` are the numbers of shards and of their replicas; `of_shards` the pipelines of gradients and of weights.
    """
    (shards, replicas), (gradients, weights) = ranks, of_shards
    if len(pipelines) > (replicas > 1):
        fix = "give one" if replicas > 1 else "give their number, --replicas N; --gradients and --weights are of shards"
        raise WrongArgument(f"{' '.join(map(repr, pipelines))}: one pipeline is planned, between replicas: {fix}")
    by_text = {text: _by_axis(text, replicas) for text in links}
    parameters = checks.check_model(model, trains=False)
    groups = blocks(parameters)
    sync = pipelines[0] if pipelines else "allreduce"
    try:
        plan = plan_axes(groups, shards=shards, replicas=replicas, gradients=gradients, weights=weights, sync=sync)
    except (TypeError, ValueError) as error:
        raise WrongArgument.of(error) from error
    elements = sum(p.numel() for p in parameters.values())
    if as_json:
        axes = [
            {
                "axis": axis.name,
                "pipeline": axis.pipeline,
                "ranks": axis.ranks,
                "messages": len(axis.messages),
                "wire_bytes": axis.wire_bytes,
                "links": {text: axis.seconds(on[axis.name]) for text, on in by_text.items()},
            }
            for axis in plan.axes
        ]
        print(json.dumps({"model": model, "parameters": elements, "groups": len(groups), "axes": axes}, indent=1))
        return
    echo(
        f"{model}: {elements:,} parameters in {count(len(groups), 'group')}, as fully_shard on each numbered module "
        f"and on the model makes them; {count(shards, 'shard')} in {count(replicas, 'replica')}"
    )
    for text, on in by_text.items():
        print(f"\n{text}\n{plan.show(on)}")


def blocks(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return parameters by the numbered module that they are in, such as "layers.3"; "" for the rest.

    >>> list(blocks({"wte.weight": None, "h.0.up.weight": None, "h.1.up.weight": None, "2.weight": None}))
    ['', 'h.0', 'h.1', '2']
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for path, parameter in parameters.items():
        block = _BLOCK.match(path)
        groups.setdefault(block[0] if block else "", {})[path] = parameter
    return groups


def _by_axis(text: str, replicas: int) -> dict[str, Link]:
    links = checks.check_links(text)
    if isinstance(links, Link):
        links = {"shards": links, "replicas": links}
    wanted = ("shards", "replicas") if replicas > 1 else ("shards",)
    if not set(wanted) <= links.keys() <= {"shards", "replicas"}:
        raise WrongArgument(f"--link {text}: give {','.join(f'{each}=...' for each in wanted)}, or one link for all")
    return {
        "gradients": links["shards"],
        "weights": links["shards"],
        "replicas": links.get("replicas", links["shards"]),
    }
