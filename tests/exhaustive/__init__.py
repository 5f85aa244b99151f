"""Bounded exhaustive search: every interleaving of a small protocol, with the real cores.

    actors    writer, recoverers, bookies as values: a local state and an event give the next, and what is sent
    values    the shape of a search, states as tuples
    columns   one bookie with what is on its way to and from it
    space     the whole: whose turn it may be, what may go wrong once, what must hold
    symmetry  states that differ in names alone are one
    search    depth first over states that were not seen before
"""
