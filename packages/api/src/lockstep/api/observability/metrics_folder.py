"""Environment variable of the folder in which workers share metrics. Importing it does not import `metrics`."""

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client reads this variable when it is imported."""
