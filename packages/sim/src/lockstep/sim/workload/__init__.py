"""Workloads: generated, recorded, fitted or mixed; all of them end as columns of turns.

Imports cost, for the tokens of media. Every room but cost, catalogue, metrics and report imports it.
"""
