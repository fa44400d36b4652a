"""`lockstep plan`: the cheapest configuration that meets the SLO at a rate, or the largest rate each one sustains.

    question.py   what is asked, and the configurations it spans
    trial.py      one simulation: its description, its key, its result; what a worker runs
    workers.py    where trials run: here, in processes, on a Ray cluster
    ledger.py     finished trials by key, kept on disk
    interval.py   how sure a number is
    search.py     which trials are worth running
    answer.py     the table, the Pareto front, the commands
    page.py       the report, one file
    cli.py        argument parsing only

docs/planning.md explains the method and reads one answer.
"""
