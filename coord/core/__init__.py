"""The protocol core: deterministic state machines without threads, sockets or clock; standard library only."""
