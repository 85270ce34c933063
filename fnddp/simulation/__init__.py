"""Many ranks in one process: to try pipelines without a cluster."""
