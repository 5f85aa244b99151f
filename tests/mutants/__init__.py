"""The mutant bank: each defect of the catalogue (docs/design/defects.md), planted into our own code, and what kills it.

    bank      the defects: id, what is broken, the tier that must see it, the invariants that should fall
    planted   … the patches themselves, by hall: ledgers.py (cores), bookies.py, brokers.py, clients.py
    hunt      runs a tier on a mutant until something falls
"""
