"""Calls and thoughts in what a model writes: a table for each format, and one driver that reads them as text comes."""
