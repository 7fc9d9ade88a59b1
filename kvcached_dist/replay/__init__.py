"""The main job: replay a serving trace on TP x PP real processes with elastic pools.

==============  ================================================================
module          cares about
==============  ================================================================
traces          files and the generator -> requests
workload        what a request is; virtual time
prefix_cache    which blocks stay after their request; least recently used first
scheduler       what runs in a step; equal on every rank
stamps          what is in the blocks; checked before anything is given back
pipeline        activations to the next stage, results back, lag between stages
engine          one rank: the loop that joins all of the above to a coordinator
launcher        all ranks: start, watch, end
report, plot    what the operator sees
==============  ================================================================

Imports go downwards in this table only.
"""
