"""Check under random rescalings which measures are invariant, and whether they claim to be."""

from saltflat.audit.audit import audit_invariance
from saltflat.audit.change import Change
from saltflat.audit.result import Audit, AuditLine

__all__ = ["Audit", "AuditLine", "Change", "audit_invariance"]
