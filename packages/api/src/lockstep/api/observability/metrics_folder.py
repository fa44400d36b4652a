"""Name of the variable with the folder in which workers share figures, without an import of `metrics`."""

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported."""
