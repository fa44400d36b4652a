"""Observability of a server: Prometheus metrics, logs, spans, request times and drift.

Imports the messages of `processes.wire`; modules of `endpoints` only as types.
"""
