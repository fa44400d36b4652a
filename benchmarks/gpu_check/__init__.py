"""One run that checks the runtime on a machine with an NVIDIA GPU: correct, and how fast. `make gpu-check`

    PYTHONPATH=... python -m benchmarks.gpu_check --out results        # on a GPU: under nine minutes
    python -m benchmarks.gpu_check --device cpu --small --out results  # every section at sizes that mean nothing

Each section is a process of its own with a limit of time: one that hangs, or spoils the device, affects no other.
What it has found is on disk after each step, so that a section that was stopped has lost nothing. What cannot run here
is skipped with the reason. `gpu_check.json` has everything, `gpu_check.md` the summary for a reader.
"""
