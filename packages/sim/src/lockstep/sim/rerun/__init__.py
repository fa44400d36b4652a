"""A recorded run simulated again with its own facts, and compared with the recording step by step.

    record.py      facts of a journal: requests, what the model drew by position, the order of the events
    facts.py       these facts as parts of a simulated host: the source of requests, the device
    rerun.py       the run, and its comparison with the journal

A replay gives the recorded events to the core. Here the simulator's host makes the events: it offers the slots, puts
the results of its batches together, and answers only orders that it has received. Taken from the journal are the facts
that come from outside of a scheduler and its host: requests, cancels and control requests; the tokens that the model
drew at each position of a request, with the number of right drafts; what ended or failed; and the order in which the
recorded host noticed all this.
"""
