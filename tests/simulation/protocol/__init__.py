"""The fast tier: the real cores of the ledger library against a model of the service, on virtual time, without asyncio.

    options    what a seed does: drawn from its number alone
    scheduler  a heap of events; virtual seconds
    faults     which of the possible disturbances happen; each is numbered, so that a schedule can be shrunk
    network    requests between clients and bookies, with everything that a network does
    bookie     one bookie as the protocol needs it: the specification of the service
    register   the ledgers' records: compare-and-set, unknown outcomes, stale reads
    writing, recovering, reading   the drivers; short, because the cores decide
    nemesis    kills, wipes, partitions, pauses, deletions: what happens at a time
    judge      the invariants (docs/design/invariants.md), checked when they could be broken, and at rest
    run        one seed from its number to its verdict
    shrink     the smallest part of a failing schedule that still fails

What is real here: everything in ledger/. What is modelled: bookies, metadata, network, and the drivers.
The whole-cluster tier beside it runs the real ones; it is a hundred times slower and sees fewer interleavings.
"""
