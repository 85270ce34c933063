"""Which of torch's DDP tests fail with `fnddp.DistributedDataParallel`, and why."""

_NEEDLESS = "wants an error, as a parameter is unused and find_unused_parameters=False; that works here"
_COUNTS = f"wants the reducer's private _get_local_used_map; then {_NEEDLESS}"

EXPECTED_FAILURES = {
    "test_ddp_control_flow_same_across_ranks": _COUNTS,
    "test_ddp_control_flow_different_across_ranks": _COUNTS,
    "test_ddp_multiple_nested_unused_params_error": _NEEDLESS,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": _NEEDLESS,
    "test_ddp_unused_params_rebuild_buckets_exception": _NEEDLESS,
}
