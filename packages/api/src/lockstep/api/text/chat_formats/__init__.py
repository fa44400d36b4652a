"""Tool calls and thoughts in a model's output: one table per format, and one driver that parses text piece by piece."""
