"""Everything that is known of one run of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saltflat.report.reading import Reading
from saltflat.studies.trained import Outcome

STATUSES = ("done", "missed", "diverged", "failed")


@dataclass(frozen=True)
class Row:
    """One run: what it was asked to do, how it ended, and what was measured.

    Attributes:
        key: the hash of its configuration, and the name of its files.
        config: every setting by name, the seed among them.
        status: ``"done"``, ``"missed"`` (the stopping rule), ``"diverged"`` (not finite) or ``"failed"`` (an error).
        outcome: losses, errors, norm; None where the run failed in training.
        readings: by measure; empty where nothing could be measured.
        measured: with what settings they were taken.
        failure: the error in one line and its traceback, of a failed run.
        seconds: of training and of measuring. Not part of the study's table, which two runs share byte for byte.
        made_with: versions and device.
    """

    key: str
    config: Mapping[str, Any]
    status: str
    outcome: Outcome | None = None
    readings: Mapping[str, Reading] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    failure: Mapping[str, str] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> dict[str, float]:
        """Test minus training, of the error and of the loss; empty where the run failed."""
        if self.outcome is None:
            return {}
        return {
            "error": self.outcome.test_error - self.outcome.train_error,
            "loss": self.outcome.test_loss - self.outcome.train_loss,
        }
