"""A step on a clock against numbers worked out by hand; what is measured for it; and its trace beside a profiler's."""

import json
from itertools import combinations
from typing import Any

import pytest
import torch

from fnddp import Compute, Link, Plan, lower, measure_backward, measure_segments, parse

B = 1e6
LINK = Link(B)
LEAF = 1000  # elements: on two ranks 4 ms in float32
PARAMS = {name: torch.empty(LEAF, device="meta") for name in "cba"}  # gradients come in the order a, b, c
SYNCS = ["allreduce", "error_feedback(powersgd(fp16(allreduce), rank=2))", "quantize(two_shot)", "topk(allgather, k=3)"]


def three_buckets(text: str = "allreduce", params: Any = PARAMS, n: int = 2) -> Plan:
    return lower(parse(text), params, world_size=n, bucket_cap_mb=1e-3, first_bucket_mb=1e-3)


@pytest.mark.parametrize("text", SYNCS)
def test_without_computation_it_is_the_estimate(text):
    plan = three_buckets(text, {name: torch.empty(100, 50, device="meta") for name in "abc"}, n=4)
    for link in (LINK, Link(1e6, 1e-3, burst=4000.0)):
        for backward in (0.0, 0.001, 0.5):
            step = plan.predict(link, Compute(backward_seconds=backward))
            costs = plan.estimate(link, backward_seconds=backward)
            assert (step.wire_bytes, step.link_bytes) == (costs.wire_bytes, costs.link_bytes)
            assert step.communication_seconds == pytest.approx(costs.communication_seconds)
            assert step.exposed_seconds == pytest.approx(costs.exposed_seconds)
            assert step.seconds == pytest.approx(costs.seconds) == pytest.approx(backward + step.exposed_seconds)


def test_arrivals_are_those_that_were_measured():
    plan = three_buckets()
    assert [segment.needs for segment in plan.segments[:3]] == [("a",), ("b",), ("c",)]
    early = Compute(1.0, 0.1, {"a": 0.01, "b": 0.02, "c": 0.1})
    # a: 1.010 to 1.014, b: 1.020 to 1.024, c: 1.100 to 1.104.
    step = plan.predict(LINK, early)
    assert [cost.end_seconds for cost in step.collectives] == pytest.approx([1.014, 1.024, 1.104])
    assert (step.seconds, step.exposed_seconds) == pytest.approx((1.104, 0.004))
    late = Compute(1.0, 0.1, {"a": 0.099, "b": 0.099, "c": 0.1})
    assert plan.predict(LINK, late).seconds == pytest.approx(1.111)  # three in a row
    assert early.order == ["a", "b", "c"]
    assert Compute().order is None


def test_segments_push_backward_and_hide_behind_the_wire():
    plan = three_buckets()
    arrivals = {"a": 0.010, "b": 0.020, "c": 0.030}
    encode, decode = 0.002, 0.003
    step = plan.predict(LINK, Compute(0.0, 0.030, arrivals, (encode,) * 3 + (decode,)))
    # a: encoded 10 to 12, on the wire to 16. b arrives at 22, is encoded to 24, and c at 34. c's gradient is the last:
    # backward ends with it, and it is encoded behind, to 36. The wire is done at 40, the means at 43.
    assert [cost.end_seconds for cost in step.collectives] == pytest.approx([0.016, 0.028, 0.040])
    assert step.seconds == pytest.approx(0.043)
    assert step.exposed_seconds == pytest.approx(0.004)
    assert (step.encode_seconds, step.decode_seconds) == pytest.approx((0.006, 0.003))
    (backward,) = [span for span in step.spans if span.does == "backward"]
    assert backward.seconds == pytest.approx(0.034)
    assert str(step).splitlines()[-1] == "step 43 ms = backward 30 ms + encode 6 ms + decode 3 ms + exposed 4 ms"


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (Compute(segments=(0.1,)), "seconds of 1 segments, but the plan has 4; measure this plan"),
        (Compute(segments=()), "seconds of 0 segments, but the plan has 4"),
        (Compute(arrivals={"a": 0.1, "b": 0.2}), "no arrival of leaf 'c'; it was measured for another model"),
        *(
            (
                Compute(1.0, 0.3, {"a": 0.1, "b": when, "c": 0.3}),
                "leaf 'b' arrives after .* s, but backward takes only 0.3 s",
            )
            for when in (0.31, -0.1, float("nan"))
        ),
    ],
)
def test_what_is_of_another_plan(compute, message):
    with pytest.raises(ValueError, match=message):
        three_buckets().predict(LINK, compute)


def test_backward_is_measured_with_the_order_of_gradients():
    def loss_fn(params, x):
        return ((x @ params["first"]).relu() @ params["second"]).sum() + params["first"].sum() * 0

    params = {"first": torch.randn(8, 8), "second": torch.randn(8, 8), "unused": torch.randn(2)}
    found = measure_backward(loss_fn, params, torch.randn(4, 8), calls=3)
    assert found.arrivals is not None
    assert found.order[-2:] == ["first", "unused"] or found.order == ["second", "unused", "first"]
    assert found.order[0] == "second"
    assert found.arrivals["unused"] == found.backward_seconds
    assert all(0 < when <= found.backward_seconds for when in found.arrivals.values())
    assert found.forward_seconds > 0
    assert all(leaf.grad is None and not leaf.requires_grad for leaf in params.values())
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        measure_backward(loss_fn, params, torch.randn(4, 8), calls=0)


@pytest.mark.parametrize(
    "text",
    [*SYNCS, "warmup(sign(allgather), steps=3)", "weighted(allreduce)", "quantize(two_shot, rounding='stochastic')"],
)
def test_segments_are_measured_for_ranks_that_are_not_there(text):
    params = {name: torch.randn(24, 16) for name in "abc"}
    plan = three_buckets(text, params, n=4)
    seconds = measure_segments(plan, calls=2)
    assert len(seconds) == len(plan.segments)
    assert all(each >= 0 for each in seconds)
    assert plan.predict(LINK, Compute(segments=seconds)).seconds > sum(seconds)


def test_a_state_that_is_given_is_not_written_over():
    params = {"w": torch.randn(24, 16)}
    sync = parse("error_feedback(powersgd(allreduce, rank=1))")
    state = sync.init(params)
    plan = lower(sync, params, state=state, world_size=2)
    assert len(measure_segments(plan, state, calls=1)) == len(plan.segments)
    assert not state.residual["w"].any()


def test_nothing_is_computed_on_the_meta_device():
    with pytest.raises(ValueError, match="leaf 'c' is on the meta device; lower the plan with real tensors"):
        measure_segments(three_buckets())


def ranges(trace: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]


def test_a_trace_is_the_plan_on_two_tracks_by_the_names_of_a_profiler(tmp_path):
    plan = three_buckets(SYNCS[1], {name: torch.randn(64, 32) for name in "abc"})
    compute = Compute(0.1, 0.2, segments=(0.001,) * len(plan.segments))
    step = plan.predict(LINK, compute)
    events = ranges(plan.to_trace(LINK, compute))
    wire = [event for event in events if event["tid"] == 1]
    assert [event["name"] for event in wire] == [f"fnddp {c.name} {c.kind.name}" for c in plan.collectives]
    assert [event["args"]["wire_bytes"] for event in wire] == [c.wire_bytes for c in plan.collectives]
    assert [event["dur"] for event in wire] == pytest.approx(
        [1e6 * cost.seconds for cost in step.collectives], abs=1e-3
    )
    computed = [event for event in events if event["tid"] == 0]
    assert {"forward", "backward"} <= {event["name"] for event in computed}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e6 * step.seconds, abs=1e-2)
    # On one track ranges are side by side or within one another, or a viewer drops them.
    for track in (wire, computed):
        spans = [(round(event["ts"], 1), round(event["ts"] + event["dur"], 1)) for event in track]
        for (_, end), (start, stop) in combinations(sorted(spans, key=lambda span: (span[0], -span[1])), 2):
            assert start >= end or stop <= end

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        measure_segments(plan, calls=1)
    profile.export_chrome_trace(str(tmp_path / "measured.json"))
    measured = sorted(ranges((tmp_path / "measured.json").read_text()), key=lambda event: event["ts"])
    found = [event["name"] for event in measured if event["name"].startswith("fnddp ") and event["name"] != "fnddp end"]
    once = found[: len(found) // 2]  # a warm-up, and the step that is timed
    assert once == found[len(once) :]
    predicted = [event["name"] for event in computed if event["name"].startswith("fnddp ")]
    assert [name for name in once if not name.endswith("wait")] == [n for n in predicted if not n.endswith("wait")]
    assert {name for name in once if name.endswith("wait")} >= {name for name in predicted if name.endswith("wait")}
