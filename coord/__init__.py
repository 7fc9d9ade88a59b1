"""The cross-rank protocol of kvcached_dist, installed as ``kvcached_dist.coord``.

``core`` decides (state machines, standard library only); ``links`` carries (torch.distributed).
"""
