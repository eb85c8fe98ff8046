"""The folder of a study: its definition, rows, weights and checkpoints, each file complete and with a digest.

One process at a time opens the folder with :func:`open_store` and writes; any number may read through :class:`Store` or
:func:`verify` it. The modules of this package are not public.
"""

from saltflat.studies.store.checkpoint import Checkpoint
from saltflat.studies.store.folder import DEFINITION, PARTIAL, ROWS, WEIGHTS, Store, has_damaged_copy, open_store
from saltflat.studies.store.lock import format_lock_holder, is_locked, lock_folder
from saltflat.studies.store.packed_rows import pack_rows
from saltflat.studies.store.rows import DamageError
from saltflat.studies.store.verify import FileProblem, Verification, verify

__all__ = [
    "DEFINITION",
    "PARTIAL",
    "ROWS",
    "WEIGHTS",
    "Checkpoint",
    "DamageError",
    "FileProblem",
    "Store",
    "Verification",
    "format_lock_holder",
    "has_damaged_copy",
    "is_locked",
    "lock_folder",
    "open_store",
    "pack_rows",
    "verify",
]
