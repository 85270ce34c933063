"""The table of the two hops: every element of every leaf has one place, and a plan prints which."""

import itertools

import pytest
import torch

from fnddp import Owners, lower, parse, quantize, to_owners
from fnddp.core.table import Cut, Table

OWNERS = """\
rows of owners in bucket 0, in elements
  leaf   first  count  row  place
  w1         0     24    0      0
  embed      0     16    0     24
  w2         0     12    1      0
  embed     16     16    1     24
  b1         0      6    2      0
  b2         0      2    2      6
  embed     32     16    2     24
"""


def model() -> dict[str, torch.Tensor]:
    shapes = {"embed": (12, 4), "w1": (6, 4), "b1": (6,), "w2": (2, 6), "b2": (2,)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_a_plan_prints_what_each_owner_gets():
    """Three ranks and five leaves, one of which is cut by rows."""
    leaves = model()
    with pytest.raises(ValueError, match="cut: no leaf is called 'embde'; did you mean 'embed'?"):
        Owners.of(leaves, 3, cut={"embde"})
    with pytest.raises(ValueError, match="Owners.of: n must be at least 1, got 0"):
        Owners.of(leaves, 0)
    owners = Owners.of(leaves, 3, cut={"embed"})
    shown = str(lower(quantize(to_owners(owners=owners), bits=4), leaves, world_size=3))
    assert f"\n\n{OWNERS}\nslot 0" in shown


CHUNKS = """\
rows of owners in bucket 0, in elements
  leaf  first  count  row  place
  b         0      2    0      0
  w         0      3    0      2
  b         2      1    1      0
  w         3      2    1      2
"""


@pytest.mark.parametrize("text", ["two_shot", "error_feedback(quantize(two_shot, bits=4))", "powersgd(two_shot)"])
def test_a_plan_prints_the_chunks_of_few_leaves(text: str):
    """Of leaves themselves: PowerSGD sends others."""
    leaves = {"w": torch.empty(5, device="meta"), "b": torch.empty(3, device="meta")}
    assert (CHUNKS in str(lower(parse(text), leaves, world_size=2))) == ("powersgd" not in text)
    assert "rows of owners" not in str(lower(parse(text), leaves, world_size=13))


def test_a_plan_of_many_leaves_lists_the_first():
    leaves = {f"{i:02}": torch.empty(3, device="meta") for i in range(40)}
    shown = str(lower(to_owners(owners=Owners.of(leaves, 2)), leaves, world_size=2))
    assert "... 16 more\n" in shown
    assert shown.count("\n  ") < 40


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_each_element_is_in_one_place(n: int):
    """Of chunks, whole leaves and rows of leaves; and rows have them where the table says, apart from padding."""
    leaves = {path: torch.arange(leaf.numel()).reshape(leaf.shape) for path, leaf in model().items()}
    chunks = Table(n, {path: Cut(leaf.numel(), -(-leaf.numel() // n)) for path, leaf in leaves.items()})
    whole = Owners.of(leaves, n).table(dict.fromkeys(leaves, False))
    cut = Owners.of(leaves, n, cut={"embed", "w1"}).table(dict.fromkeys(leaves, False))
    for table in (chunks, whole, cut):
        parts, rows = [*table.parts()], table.rows(leaves)
        for path, leaf in leaves.items():
            mine = [part for part in parts if part.leaf == path]
            elements = [x for part in mine for x in range(part.first, part.first + part.count)]
            assert sorted(elements) == [*range(leaf.numel())], path
            for part in mine:
                row = rows[path][part.row if table.cuts[path].owner is None else 0]
                assert row[: part.count].tolist() == [*range(part.first, part.first + part.count)]
                assert part.count == table.count(path, part.row)
        for row in range(n):
            spans = sorted((part.place, part.place + part.count) for part in parts if part.row == row)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
