"""`lockstep plan`: the cheapest configuration that meets the SLO at a rate, or the largest rate of each configuration.

    question.py   the question, and the configurations that it spans
    trial.py      one simulation: its description, its key, its result; the code that workers run
    workers.py    where trials run: in this process, in other processes, on a Ray cluster
    ledger.py     finished trials by key, stored on disk
    interval.py   confidence intervals
    search.py     which trials to run
    answer.py     the table, the Pareto front, the commands
    page.py       the report, one file
    cli.py        argument parsing only

docs/planning.md explains the method and an example of an answer.
"""
