"""Many ranks on one process: to try pipelines before there is a cluster."""
