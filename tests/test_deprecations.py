"""Old names: each is on the page about releases, and gives what the new one gives, with a warning, or a sentence."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fnddp
from fnddp.core.deprecations import DEPRECATIONS
from fnddp.integrations.fsdp import compress, plan_axes

LAYERS = {"layers.0": {"weight": torch.empty(64, 64, device="meta")}}


def test_the_page_about_releases_has_each_old_name():
    page = (Path(fnddp.__file__).parents[1] / "docs" / "release.md").read_text()
    for old, entry in DEPRECATIONS.items():
        assert f"| `{old}` | `{entry.new}` | {entry.refused_in} |" in page


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"shards": 8}, {"world_size": {"shards": 8}}),
        ({"shards": 8, "replicas": 4}, {"world_size": {"shards": 8, "replicas": 4}}),
    ],
)
def test_old_numbers_of_plan_axes_are_its_world_size(old: dict[str, Any], new: dict[str, Any]):
    with pytest.warns(DeprecationWarning, match=r"world_size=.* now; the old one goes in fnddp 0\.3"):
        planned = plan_axes(LAYERS, **old)
    assert planned == plan_axes(LAYERS, **new)


def test_the_old_pipeline_of_replicas_is_the_new_one():
    sizes = {"replicas": 4}
    with pytest.warns(DeprecationWarning, match=r"is plan_axes\(replicas=...\) now"):
        planned = plan_axes(LAYERS, world_size=sizes, sync="fp16(allreduce)")
    assert planned == plan_axes(LAYERS, world_size=sizes, replicas="fp16(allreduce)")


def test_an_argument_under_both_names_is_refused():
    model: Any = None
    with pytest.raises(TypeError, match="both are given; leave the old one out"):
        compress(model, model, gradients="two_shot", shards="two_shot")


@pytest.mark.parametrize("old", [name for name in DEPRECATIONS if name.startswith("fnddp.")])
def test_an_old_name_of_a_class_is_the_new_class(old: str):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is"):
        found = getattr(importlib.import_module(module), name)
    assert f"{found.__module__}.{found.__name__}" == DEPRECATIONS[old].new
    with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
        _ = importlib.import_module(module).Unknown


@pytest.mark.parametrize("flag", ["needs_sums", "carries"])
def test_a_flag_that_has_been_replaced_is_refused(flag: str):
    with pytest.raises(TypeError, match=rf"own: Sync\.{flag} is .* since fnddp 0\.2"):
        type("own", (fnddp.Sync,), {flag: True})


def test_a_world_size_of_other_axes_is_refused():
    for wrong in ({"nodes": 2}, {"shards": 0}):
        with pytest.raises(ValueError, match="world_size must be"):
            plan_axes(LAYERS, world_size=wrong)
