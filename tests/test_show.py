"""What plans look like: as text, as a picture, in a notebook; and figures on dark pages."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure

from fnddp import Link, Plan, Sync, allreduce, error_feedback, fp16, lower, parse, partition, powersgd
from fnddp.cli import picture
from fnddp.plan.draft import Donation
from fnddp.plan.lower import KEEP
from fnddp.show import drawing
from fnddp.show.drawing import CHARACTER, INK, MARGIN, PAPER, WIDEST
from fnddp.tree import Tree

SYNC = error_feedback(powersgd(fp16(allreduce), rank=2))
PARAMS = {"weight": torch.empty(96, 64, device="meta"), "bias": torch.empty(96, device="meta")}

# Numbers of operations depend on torch's decompositions and on our passes: they are n here.
GOLDEN = """\
error_feedback(powersgd(fp16(allreduce), rank=2))
2 leaves, 6,240 parameters, 24.4 KiB, 2 buckets; 2 ranks

slot 0
  need bias: encode, n operations
    send c0: all_reduce sum float16[96] over 2 ranks, 192 B, round 1 of 2: bias

slot 1
  need weight: encode, n operations
    send c1: all_reduce sum float16[192] over 2 ranks, 384 B, round 1 of 2: weight

slot 2
  wait c1: decode, encode, n operations
    send c2: all_reduce sum float16[128] over 2 ranks, 256 B, round 2 of 2: weight

slot 3
  wait c0, c2: decode, n operations

on the wire: 832 B per rank; on its link: 832 B, 30.0x fewer than a plain mean of float32
2 rounds, 3 collectives; peak extra memory 2.0 MiB"""

HOSTILE = {'<b>&"bold"</b>': torch.empty(96, 96), "line\nfeed": torch.empty(7), "": torch.empty(3)}


def plan_of(sync: Sync = SYNC, params: Tree = PARAMS, world_size: Any = 2, donation: Donation = KEEP) -> Plan:
    return lower(sync, params, world_size=world_size, donation=donation, first_bucket_mb=1e-4, bucket_cap_mb=0.05)


def many(world_size: int = 4) -> Plan:
    weights = {f"layers.{i}.weight": torch.empty(96, 96, device="meta") for i in range(4)}
    biases = {f"layers.{i}.bias": torch.empty(96, device="meta") for i in range(5)}
    return plan_of(params=weights | biases, world_size=world_size)


def two_groups() -> Plan:
    sync = parse("partition({'*weight': fp16(all_reduce(group='<inner & outer>')), '*': allreduce})")
    return plan_of(sync, PARAMS, {None: 2, "<inner & outer>": 2})


def long_pipeline() -> Plan:
    return plan_of(partition({f"p{i}": SYNC for i in range(9)}), {f"p{i}": torch.empty(4) for i in range(9)})


PLANS = {
    "two buckets": plan_of,
    "many buckets": many,
    "two groups": two_groups,
    "gradients at the end": lambda: plan_of(allreduce, PARAMS, None, Donation("at_end", state=True)),
    "one rank": lambda: plan_of(world_size=None),
    "nothing to do": lambda: plan_of(allreduce, {}),
    "hostile names": lambda: plan_of(params=HOSTILE),
    "a long pipeline": long_pipeline,
    "wrapped": lambda: plan_of(allreduce, {f"layers.{i}": torch.empty(96, 96, device="meta") for i in range(30)}),
}


def test_text():
    plan = replace(plan_of(), peak_bytes=2**21)
    assert re.sub(r"\d+ operations?\b", "n operations", str(plan)) == GOLDEN
    assert plan.show() == f"{plan}"


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
    grouped = two_groups().show()
    assert "2 ranks in group <inner & outer>" in grouped
    assert re.search(r"c\d: all_reduce sum float32\[96\] over 2 ranks, 384 B", grouped)
    hostile = plan_of(params=HOSTILE).show()
    assert r"'line\nfeed'" in hostile
    assert "line\nfeed" not in hostile
    assert "no collectives\n" in plan_of(world_size=None).show()


def test_repr_is_a_line():
    want = "<Plan of error_feedback(powersgd(fp16(allreduce), rank=2)): 2 leaves, 3 collectives, 2 rounds, 832 B>"
    assert repr(plan_of()) == want


class Bar(NamedTuple):
    title: str
    left: float
    top: float
    width: float

    @property
    def right(self) -> float:
        return self.left + self.width


def svg_of(plan: Plan, link: Link | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(plan.to_svg(link).replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def bars_of(svg: ElementTree.Element, kind: str) -> list[Bar]:
    groups = svg.findall(f"./g[@class='{kind}']" if kind else "./g")
    shapes = [(group.findtext("title") or "", group.find("rect")) for group in groups if group.get("class", "") == kind]
    return [Bar(title, *(float(shape.get(key, "")) for key in ("x", "y", "width"))) for title, shape in shapes]


@pytest.mark.parametrize("name", PLANS)
def test_picture(name):
    plan = PLANS[name]()
    for link in (None, Link.parse("1gbit:20us")):
        require_order(plan, link)


def require_order(plan: Plan, link: Link | None) -> None:
    svg = svg_of(plan, link)
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    assert width <= WIDEST + 2 * MARGIN
    for text in svg.iter("text"):
        x, y, size = (float(text.get(key, "")) for key in ("x", "y", "font-size"))
        assert 0 <= x < x + CHARACTER * size * len(text.text or "") <= width, text.text
        assert size <= y <= height - size / 2, text.text

    bars = bars_of(svg, "collective")
    assert [bar.title.partition(":")[0] for bar in bars] == [c.name for c in plan.collectives]
    boxes = bars_of(svg, "")
    for shapes in (bars, boxes):
        for top in {shape.top for shape in shapes}:  # a lane for each group
            lane = [shape for shape in shapes if shape.top == top]
            assert all(before.right < after.left for before, after in pairwise(lane))
    for box in boxes:  # nothing starts before what it waits for is done, to the left or in a row above
        for waited in re.findall(r"\bc(\d+)", box.title.partition("wait ")[2]):
            assert bars[int(waited)].right < box.left or bars[int(waited)].top < box.top


def test_dark_pages_have_dark_pictures():
    picture = plan_of().to_svg()
    assert "prefers-color-scheme: dark" in picture
    for light, dark in drawing.ON_DARK.items():
        assert f'="{light}"' in picture
        assert f'="{light}"] {{fill: {dark}}}' in picture


def test_in_a_notebook():
    html = plan_of(params=HOSTILE)._repr_html_()
    assert html.count("<svg") == 1
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;" in html
    ElementTree.fromstring(f"<body>{html}</body>")


def drawn() -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4], color="black")
    return figure


def test_a_figure_is_the_same_in_every_run_and_dark_on_dark_pages(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for file in (first, second):
        picture.save(drawn, file)
    text = first.read_text()
    assert text == second.read_text()
    for colour in (INK, PAPER, "#000000"):
        assert re.search(rf'style="[^"]*(fill|stroke): {colour}', text), colour
        assert f'[style*="fill: {colour}"] {{fill: {picture.DARK[colour]} !important}}' in text
