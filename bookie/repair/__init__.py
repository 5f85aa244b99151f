"""Auto-recovery: keeps the copies of ledgers complete (ledger protocol §1.12; docs/repair.md).

    auditor   one in the cluster, elected: marks the ledgers that miss copies      auditor.py, core/marks.py
    workers   in every bookie, or alone: make marked ledgers whole                 worker.py, copier.py, core/copies.py
    Repair    both together, as a process runs them                                run.py

Marks, locks and settings lie in the metadata (marks.py), so either side may die at any moment.
"""

from .config import RepairConfig
from .run import Repair, RepairKeeper

__all__ = ["Repair", "RepairConfig", "RepairKeeper"]
