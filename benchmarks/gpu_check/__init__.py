"""One run that says what the runtime is worth on a machine with an NVIDIA GPU: right, and how fast. `make gpu-check`

    PYTHONPATH=... python -m benchmarks.gpu_check --out results        # on a GPU: under nine minutes
    python -m benchmarks.gpu_check --device cpu --small --out results  # every section at sizes that mean nothing

Each section is a process of its own with a limit of time: one that hangs, or spoils the device, takes nobody along.
What it has found is on disk after each step, so that a section that was stopped has lost nothing. What cannot run here
is skipped with the reason. `gpu_check.json` has everything, `gpu_check.md` what a person wants to know first.
"""
