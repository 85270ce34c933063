"""Saving and loading states: keys, marks and errors. That resuming is exact is a law (test_laws)."""

from typing import Annotated, NamedTuple

import pytest
import torch

import fnddp
from fnddp import allreduce, error_feedback, load_state_dict, partition, powersgd, state_dict, warmup

SYNC = warmup(error_feedback(powersgd(allreduce, rank=2)), steps=3)
PARAMS = {"fc.weight": torch.ones(12, 20), "fc.bias": torch.ones(12)}


class Commented(NamedTuple):
    step: Annotated[fnddp.Replicated[int], "counts exchanges"]


def test_keys_say_what_is_replicated_and_what_is_local():
    assert list(state_dict(SYNC.init(PARAMS))) == [
        "replicated/step",
        "local/inner.residual.fc.bias",
        "local/inner.residual.fc.weight",
        "replicated/inner.inner.q.fc.weight",
        "replicated/inner.inner.step",
    ]
    sync = partition({"*.bias": allreduce, "*": error_feedback(allreduce)})
    assert list(state_dict(sync.init(PARAMS))) == ["local/rules.*.residual.fc.weight"]


def test_a_leaf_is_the_same_compiled_or_not():
    compiled = {"_orig_mod.fc.weight": PARAMS["fc.weight"], "_orig_mod.fc.bias": PARAMS["fc.bias"]}
    in_part = {"fc._orig_mod.weight": PARAMS["fc.weight"], "fc._checkpoint_wrapped_module.bias": PARAMS["fc.bias"]}
    sync = partition({"fc.*": SYNC})
    saved = state_dict(sync.init(PARAMS))
    for params in (compiled, in_part):
        template = sync.init(params)
        assert state_dict(template).keys() == saved.keys()
        assert load_state_dict(template, saved).rules["fc.*"].inner.residual.keys() == params.keys()
        for key, value in state_dict(template).items():  # queries are random, by name
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved[key]))


def test_a_custom_state_without_marks_is_local_and_other_annotations_are_no_marks():
    assert state_dict({"mine": (torch.ones(1), 3)}) == {"local/mine.0": torch.ones(1), "local/mine.1": 3}
    assert state_dict(Commented(3)) == {"replicated/step": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local/inner.residual.fc.bias": None}, "missing ['local/inner.residual.fc.bias'], unexpected []"),
        ({"local/other": 1}, "missing [], unexpected ['local/other']"),
        ({"replicated/inner.inner.q.fc.weight": torch.ones(20, 3)}, "was saved as float32[20, 3], but this pipeline"),
        ({"local/inner.residual.fc.bias": torch.ones(12).half()}, "saved as float16[12], but this"),
        ({"replicated/step": torch.ones(())}, "'replicated/step' was saved as float32[], but"),
    ],
)
def test_mismatches_name_the_path(changes, message):
    template = SYNC.init(PARAMS)
    saved = {key: value for key, value in {**state_dict(template), **changes}.items() if value is not None}
    with pytest.raises(ValueError) as caught:
        load_state_dict(template, saved)
    assert message in str(caught.value)


def test_loading_copies_without_a_graph_and_keeps_the_templates_layout():
    params = {"conv": torch.ones(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)}
    sync = error_feedback(allreduce)
    saved = {key: leaf.requires_grad_() for key, leaf in state_dict(sync.init(params)).items()}
    loaded = load_state_dict(sync.init(params), saved)
    loaded.residual["conv"] += 1
    assert not saved["local/residual.conv"].any()
    assert loaded.residual["conv"].stride() == params["conv"].stride()
    assert not loaded.residual["conv"].requires_grad


def test_paths_that_collide_are_an_error():
    with pytest.raises(ValueError, match=r"two parts of the state have the path 'a.b'"):
        state_dict({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})


@pytest.mark.parametrize(
    "given", [torch.nn.Linear(2, 2), SYNC, {"a": [torch.ones(1), "text"]}], ids=["model", "sync", "text"]
)
def test_what_is_no_state_is_refused(given):
    for call in (lambda: state_dict(given), lambda: load_state_dict(given, {})):
        with pytest.raises(TypeError, match=r"expected a state of tensors and numbers, got .* pass model\.sync_state"):
            call()
