"""Fault injection on real processes: ranks as Ray actors that are killed, stopped, refused and silenced by a plan.

::

    plan       faults of a run, from a seed
    workload   what a rank does all the time: requests that allocate, stamp, verify and free blocks
    rank       one rank in its own process (a Ray actor)
    warden     what only a process on the ranks' host can do: the store server, signals, left-over processes and files
    cluster    Ray: a local instance or an existing cluster, actors, spare ones
    supervisor carries the plan out, restarts what was killed, checks
    checks     what must hold, as pure functions over what the ranks report
    report     the table and the JSON

Only ``cluster`` imports Ray.
"""
