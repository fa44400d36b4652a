"""Long runs against a live server: what it promises, at a volume that no test has time for."""
