"""The scheduler as a function of its journal: facts go in, decisions and commands come out.

The whole host, simulated or real:

    engine = Engine(config)
    for event in host.events():                 # arrivals, cancels, finished batches, then one LaneReady
        step = engine.step(event)
        journal.append(event, step.digest)      # written before anything of it leaves the process
        for command in step.commands:
            host.perform(command)               # sim: a timeout; runtime: kernels on a stream
"""
