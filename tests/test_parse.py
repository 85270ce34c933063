"""`parse` is the inverse of `repr`, and harmless."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fnddp
from fnddp import Sync, parse
from fnddp.core.sync import registry
from tests.pipelines import nestings


@given(nestings())
def test_inverse_of_repr(sync):
    assert parse(repr(sync)) == sync


def test_white_space_and_lines():
    text = """
        error_feedback(
            powersgd(fp16(allreduce), rank=4),
            decay=0.9,
        )
    """
    assert repr(parse(text)) == "error_feedback(powersgd(fp16(allreduce), rank=4), decay=0.9)"


def test_names_that_errors_list_are_those_of_the_package():
    with pytest.raises(ValueError, match="known names are ") as raised:
        parse("foo(allreduce)")
    listed = str(raised.value).splitlines()[0].partition("known names are ")[2].split(", ")
    assert {"two_shot", "all_gather", "powersgd"} <= {*listed}
    ours = [name for name in listed if name not in registry or registry[name].__module__.startswith("fnddp.")]
    assert [name for name in ours if not hasattr(fnddp, name)] == []  # others are of tests in this process
    with pytest.raises(ValueError, match=r"did you mean 'two_shot'\?"):
        parse("two_shot_mea")


HOSTILE = {
    "__import__('os')": (0, "unknown name '__import__'"),
    "fp16(__import__('os').system('true'))": (5, "Call"),
    "fp16(allreduce.ops)": (5, "Attribute is not allowed"),
    "fp16(**{'inner': allreduce})": (0, "** is not allowed"),
    "partition({**{}})": (10, "a dict key must be a literal"),
    "powersgd(allreduce, rank=...)": (25, "Constant is not allowed"),
    "fp16(allreduce": (4, "'(' was never closed"),
    "fp16": (0, "'fp16' is a transform, not a value; call it: fp16(...)"),
    "allreduce()": (0, "'allreduce' is a ready-made value; write it without parentheses"),
    "fp17(allreduce)": (0, "unknown name 'fp17'; did you mean 'fp16'?"),
    "3": (0, "this is a int, not a pipeline"),
    "fp16(\r\n  'ü' .x)": (2, "Attribute is not allowed"),
    "partition({'größe': nothing})": (20, "unknown name 'nothing'"),  # counted in characters, not in bytes
    "": (0, "the text is empty, expected a pipeline; write for example fp16(allreduce)"),
    "a; b": (1, "invalid syntax"),
    "fp16(\x00)": (0, "null bytes"),
    "fp16(" * 150 + "allreduce" + ")" * 150: (None, ""),
    "-" * 5000 + "1": (None, ""),
    "x" * 200_000: (None, "the text has 200000 characters, more than 100000"),
    "partition({'a': allreduce, 'a': allreduce})": (10, "a key occurs twice"),
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30])
def test_hostile_text_is_a_value_error_with_the_position(text):
    column, problem = HOSTILE[text]
    with pytest.raises(ValueError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("parse: ")
    assert problem in message
    if column is not None:
        assert message.splitlines()[-1] == "  " + " " * column + "^"


def test_constructors_errors_keep_their_type_and_show_the_position():
    with pytest.raises(TypeError, match="takes a max or min") as caught:
        parse("fp16(powersgd(all_reduce(op='max')))")
    assert caught.value.__notes__ == ["  fp16(powersgd(all_reduce(op='max')))\n       ^"]
    with pytest.raises(TypeError, match=r"^powersgd: unknown option 'rnk'; did you mean 'rank'\?") as caught:
        parse("fp16(powersgd(allreduce, rnk=2))")
    assert caught.value.__notes__ == ["  fp16(powersgd(allreduce, rnk=2))\n       ^"]
    with pytest.raises(TypeError, match=r"^bf16: unknown option 'zzz'; it has inner, check"):
        parse("bf16(allreduce, zzz=2)")
    with pytest.raises(TypeError, match=r"^two_shot: unknown option 'server'; did you mean 'server_memory'\?"):
        parse("fp16(two_shot(server=True))")


@given(st.one_of(st.text(), st.text(alphabet="allreducefp16powersgd(){}[]'*=,.:_-0123 ")))
def test_any_text_gives_a_pipeline_or_an_error(text):
    with contextlib.suppress(ValueError, TypeError):
        assert isinstance(parse(text), Sync)


def test_not_a_string():
    with pytest.raises(TypeError, match="expected a string such as"):
        parse(fnddp.allreduce)  # type: ignore[arg-type]
