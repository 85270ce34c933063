"""What plans look like: as text, whose whole is in docs/plan.md; and figures on dark pages."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.figures import DARK, INK, PAPER, save
from fnddp import Plan, Sync, allreduce, error_feedback, fp16, lower, parse, powersgd
from fnddp.tree import Tree

SYNC = error_feedback(powersgd(fp16(allreduce), rank=2))
PARAMS = {"weight": torch.empty(96, 64, device="meta"), "bias": torch.empty(96, device="meta")}


def plan_of(sync: Sync = SYNC, params: Tree = PARAMS, world_size: Any = 2) -> Plan:
    return lower(sync, params, world_size=world_size, first_bucket_mb=1e-4, bucket_cap_mb=0.05)


def test_peak_memory_is_shown():
    assert str(replace(plan_of(), peak_bytes=2**21)).endswith("; peak extra memory 2.0 MiB")


def test_code_lists_every_step_and_operation():
    plan = plan_of()
    lines = plan.show(code=True).splitlines()
    operations = [line for line in lines if line.startswith("      ")]
    assert len(operations) == plan.operations
    assert len([line for line in lines if re.search(r"(encode|decode), \d", line)]) == len(plan.segments)
    # By the names that the user knows.
    assert "add(grads[bias], state[0])" in "\n".join(operations)
    assert not re.search(r"grads_\d|parts_\d", "\n".join(lines))
    # A result is called by one name, wherever it is written.
    assert any(line.strip().startswith("c0[0]: float16[96] = div(") for line in operations)
    made = [line.split()[0].rstrip(":") for line in operations]
    assert len(made) == len(set(made))


def test_names():
    shown = lower(allreduce, {f"p{i}": torch.empty(2) for i in range(99)}, world_size=2).show()
    assert re.search(r"need p98, p97, \.\.\. 99 gradients: encode", shown)
    assert re.search(r"over 2 ranks, 792 B, round 1 of 1: p\d+, p\d+, \.\.\. 99 payloads", shown)
    assert max(map(len, shown.splitlines())) < 120
    of_groups = parse("partition({'*weight': fp16(all_reduce('inner')), '*': allreduce})")
    grouped = plan_of(of_groups, PARAMS, {None: 2, "inner": 2}).show()
    assert "2 ranks in group inner" in grouped
    assert re.search(r"c\d: all_reduce sum float32\[96\] over 2 ranks, 384 B", grouped)
    hostile = plan_of(params={"line\nfeed": torch.empty(7), "": torch.empty(3)}).show()
    assert r"'line\nfeed'" in hostile
    assert "line\nfeed" not in hostile
    assert "no collectives\n" in plan_of(world_size=None).show()


def test_repr_is_a_line():
    want = "<Plan of error_feedback(powersgd(fp16(allreduce), rank=2)): 2 leaves, 3 collectives, 2 rounds, 832 B>"
    assert repr(plan_of()) == want


def test_a_figure_is_the_same_in_every_run_and_dark_on_dark_pages(tmp_path: Path) -> None:
    def drawn() -> Figure:
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4], color="black")
        return figure

    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for file in (first, second):
        save(drawn, file)
    text = first.read_text()
    assert text == second.read_text()
    for colour in (INK, PAPER, "#000000"):
        assert re.search(rf'style="[^"]*(fill|stroke): {colour}', text), colour
        assert f'[style*="fill: {colour}"] {{fill: {DARK[colour]} !important}}' in text
