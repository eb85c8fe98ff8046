"""The sweep of a report: accuracy, labels, and a number that identifies the examples, beside the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saltflat.engine.data import Batch
from saltflat.engine.losses import CrossEntropy, find_hits
from saltflat.engine.processes import Processes
from saltflat.engine.sweep import Sweep
from saltflat.errors import NotDefinedError


class Fingerprint:
    """A number that identifies the examples of a pass and their order.

    It does not depend on how the examples were batched, on the device, or on the precision they were measured in.
    """

    def __init__(self) -> None:
        self.value = 0

    def add(self, batch: Batch) -> None:
        """Add the examples of a batch."""
        for place, leaf in enumerate([*batch.list_tensors(), batch.targets]):
            if not batch.has_example_axis(leaf):
                continue
            step = max(1, (1 << 18) // max(1, leaf[0].numel()))
            for start in range(0, batch.examples, step):
                rows = _convert_to_integers(leaf[start : start + step])
                factors = _scramble_integers(torch.arange(rows.shape[1], device=rows.device) * 2 + 2 * place + 1) | 1
                each = _scramble_integers((rows * factors).sum(1))
                where = _scramble_integers(batch.example_indices[start : start + step].to(rows.device)) | 1
                self.value = (self.value + int((each * where).sum())) % 2**64

    def __str__(self) -> str:
        return f"{self.value:016x}"


def _convert_to_integers(rows: Tensor) -> Tensor:
    flat = rows.detach().reshape(len(rows), -1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.to(torch.complex64)).flatten(1)
    if flat.is_floating_point():
        # Positive and negative zero are the same number.
        flat = (flat.to(torch.float32) + 0.0).contiguous().view(torch.int32)
    return flat.to(torch.int64)


def _scramble_integers(values: Tensor) -> Tensor:
    """Scramble 64-bit integers (the finalizer of SplitMix64, as far as signed shifts allow)."""
    values = (values ^ (values >> 30)) * -4658895280553007687
    values = (values ^ (values >> 27)) * -7723592293110705685
    return values ^ (values >> 31)


class ReportSweep(Sweep):
    """A sweep that also records what every report says about the network and its data."""

    def _clear(self) -> None:
        super()._clear()
        self.fingerprint = Fingerprint()
        self.right: int | None = 0
        self.counted = 0
        self.labels: set[int] = set()
        self.classes = 0

    def _combine(self, processes: Processes) -> None:
        super()._combine(processes)
        if processes.count == 1:
            return
        own = self.fingerprint.value, self.right, self.counted, self.labels, self.classes
        values, rights, counts, labels, classes = zip(*processes.gather("the predictions", own), strict=True)
        self.fingerprint.value = sum(values) % 2**64
        known = [each for each in rights if each is not None]
        self.right = sum(known) if len(known) == len(rights) else None
        self.counted, self.labels, self.classes = sum(counts), set().union(*labels), max(classes)

    def _record_chunk(self, batch: Batch, outputs: Tensor, targets: Tensor) -> None:
        self.fingerprint.add(batch)
        try:
            met, kept = find_hits(self.context.problem.loss, outputs, targets)
        except NotDefinedError:
            self.right = None
        else:
            self.right = (self.right or 0) + int((met & kept).sum())
            self.counted += int(kept.sum())
            loss = self.problem.loss
            if isinstance(loss, CrossEntropy) and not targets.is_floating_point():
                self.classes = outputs.shape[loss.find_class_axis(outputs, targets)]
                self.labels.update(targets[kept].unique().tolist())

    def compute_report_fields(self, values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return accuracy, gradient norm and sample, as a report has them."""
        squared = sum(float(each.square().sum()) for each in values["mean_gradient"].values())
        single = sum(float(each.mean()) for each in values["gradient_norms"].values())
        return {
            "accuracy": self.right / self.counted if self.right is not None and self.counted else None,
            "gradient_norm": squared**0.5,
            "gradient_agreement": squared / single if single else None,
            "sample": self._describe_sample(),
        }

    def find_sample_notes(self) -> list[str]:
        """Find reasons why the examples are no sample of the training data."""
        if self.examples < 2 * self.classes or 2 * len(self.labels) >= self.classes:
            return []
        return [
            f"Only {len(self.labels)} of the {self.classes} classes are among these {self.examples} examples: they are "
            "no random sample, and standard errors over examples do not cover that. Shuffle the data once before "
            "taking its first examples."
        ]

    def _describe_sample(self) -> dict[str, Any]:
        found = {"fingerprint": str(self.fingerprint), "groups": list(self.context.sizes)}
        # Groups are drawn for so many examples; data that does not say how many it has is split in another way.
        return {**found, "split": self.groups.examples} if self.groups else found
