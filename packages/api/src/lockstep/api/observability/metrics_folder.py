"""Where several workers share their figures. Apart from `metrics`, which the launcher has no need to import."""

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported."""
