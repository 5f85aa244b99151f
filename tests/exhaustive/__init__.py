"""Bounded exhaustive search: every interleaving of a small protocol, with the real cores (reference §6.2, L2).

    actors    writer, recoverers, bookies as values: a local state and an event give the next, and what is sent
    space     the whole: whose turn it may be, what may go wrong once, what must hold
    symmetry  states that differ in names alone are one
    search    depth first over states that were not seen before
"""
