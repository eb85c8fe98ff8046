"""Processes that share a measurement: each takes some of the examples, and sums are added up over all of them.

Every process makes the same call with the same model and all of the data. What is a sum over examples is computed on
its own part and added up; everything else is computed by all alike, from the same numbers to the last bit, so that all
of them take the same decisions. Before each sum the processes exchange a message that says where they are and whether
one has failed, so that an error of one is raised by all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import fsum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

import saltflat.errors
from saltflat.engine.data import Batch
from saltflat.errors import NotDefinedError, OptionError, ProcessError, SaltflatError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Channel(Protocol):
    """Connections between processes: what is used of a backend of ``torch.distributed``."""

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Add up tensors in place."""

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor]) -> dist.Work:
        """Gather tensors of one shape."""


PIECE = 1 << 21  # numbers that are added up in one message
GRAVEST = 2  # how far an error reaches that ends the measurement
KNOWN = "_known_to_all"  # attribute of errors that every process has raised, or is about to
SOME = "_of_some_processes"  # attribute of errors: whether other processes had none
# Connections for the messages of measurements, by the groups of the user's that they serve.
_CHANNELS: WeakKeyDictionary[ProcessGroup, Channel] = WeakKeyDictionary()


class Processes:
    """The processes that share a measurement; this process alone without a group.

    Whatever the backend of the group, messages take connections of their own, by gloo, so that they cannot mix with
    those of a training loop. They have the timeout of the group.

    Args:
        group: the processes; None for this one alone.

    Attributes:
        rank: the number of this process in the group.
        count: the number of processes.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def list_global_ranks(self) -> list[int]:
        """Return the numbers of the processes among all that were started; none without a group."""
        return [] if self._group is None else dist.get_process_group_ranks(self._group)

    def select_own(self, batch: Batch, total: int | None) -> Batch | None:
        """Return the examples of a batch that this process takes, or None if there are none.

        Args:
            batch: some of the examples.
            total: the number of all examples; None if unknown, and each batch is divided.
        """
        if self.count == 1:
            return batch
        first, size = (0, batch.examples) if total is None else (batch.first, total)
        start, stop = (size * part // self.count - first for part in (self.rank, self.rank + 1))
        if self.rank == self.count - 1:  # a loader may yield more examples than it says
            stop = batch.examples
        start, stop = max(0, start), min(stop, batch.examples)
        return batch.cut(start, stop) if start < stop else None

    def count_own(self, total: int | None) -> int | None:
        """Return how many of all examples this process takes, if their number is known."""
        if total is None:
            return None
        return total * (self.rank + 1) // self.count - total * self.rank // self.count

    def gather(self, what: str, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their ranks.

        Args:
            what: names the message, in words.
            value: that of this process; it is pickled.
        """
        if self.count == 1:
            return [value]
        answers = self._exchange((what, value, None))
        self._raise_failure(answers)
        places = list(dict.fromkeys(place for place, _, _ in answers))
        if len(places) > 1:
            error = ProcessError(
                f"Expected {self.count} processes that make the same calls, but got one at {places[0]!r} and another "
                f"at {places[1]!r}. Try calling with the same arguments in every process."
            )
            raise _mark_known(error)
        return [each for _, each, _ in answers]

    def sum_tensors(self, what: str, tensors: Mapping[Key, Tensor], device: torch.device) -> dict[Key, Tensor]:
        """Return the sums over all processes, in float64. A process may lack some of the tensors.

        Args:
            what: names the message, in words.
            tensors: those of this process.
            device: where to put the sums.
        """
        if self.count == 1:
            return dict(tensors)
        shapes: dict[Key, tuple[int, ...]] = {}
        for each in self.gather(what, {key: tuple(value.shape) for key, value in tensors.items()}):
            shapes |= each
        found: dict[Key, Tensor] = {}
        for keys in _iterate_pieces(shapes):
            parts = [
                tensors[key].detach().double().cpu().reshape(-1)
                if key in tensors
                else torch.zeros(torch.Size(shapes[key]).numel(), dtype=torch.float64)
                for key in keys
            ]
            buffer = torch.cat(parts)
            with self._guard():
                self._get_channel().allreduce([buffer]).wait()
            pieces = buffer.split([len(part) for part in parts])
            found |= {key: piece.view(shapes[key]).to(device) for key, piece in zip(keys, pieces, strict=True)}
        return found

    def sum_parts(
        self, what: str, numbers: Sequence[float], vectors: Sequence[dict[str, Tensor]] = ()
    ) -> tuple[list[float], list[dict[str, Tensor]]]:
        """Return sums of numbers and of vectors with one part per parameter, over all processes."""
        if self.count == 1:
            return list(numbers), list(vectors)
        sums = [fsum(each) for each in zip(*self.gather(what, tuple(numbers)), strict=True)]
        device = next((value.device for vector in vectors for value in vector.values()), torch.device("cpu"))
        flat = {(number, name): value for number, vector in enumerate(vectors) for name, value in vector.items()}
        found = self.sum_tensors(what, flat, device) if vectors else {}
        return sums, [{name: found[number, name] for name in vector} for number, vector in enumerate(vectors)]

    @contextmanager
    def join(self, ends_all: Callable[[Exception], bool] = lambda error: False) -> Iterator[Processes]:
        """Run a part of a measurement that fails in all processes if it fails in one, and ends in all together.

        Args:
            ends_all: returns whether an error of this process ends the measurement, whatever its type.
        """
        if self.count == 1:
            yield self
            return
        with self._guard():
            self._get_channel()
        try:
            yield self
            self.gather("the end", None)
        except Exception as error:
            if not getattr(error, KNOWN, False):
                self._announce(error, GRAVEST if ends_all(error) else _rank_gravity(error))
            raise
        except BaseException:  # Ctrl-C: nothing is known of the others, which notice that the connection is closed
            self._close()
            raise

    def check_same(self, what: str, found: Mapping[str, str]) -> list[tuple[str, int]]:
        """Return the names whose texts differ from those of the first process, with a rank where they do."""
        first, *others = self.gather(what, dict(found))
        return [
            (name, rank)
            for rank, each in enumerate(others, start=1)
            for name in dict.fromkeys([*first, *each])
            if first.get(name) != each.get(name)
        ]

    def _exchange(self, message: tuple[str, Any, tuple[int, str, str] | None]) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        sizes = [int(each) for each in self._gather_tensors(torch.tensor([len(own)]))]
        padded = self._gather_tensors(F.pad(own, (0, max(sizes) - len(own))))
        return [pickle.loads(each[:size].numpy().tobytes()) for each, size in zip(padded, sizes, strict=True)]

    def _gather_tensors(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.count)]
        with self._guard():
            self._get_channel().allgather([found], [own]).wait()
        return found

    def _announce(self, error: Exception, gravity: int) -> None:
        """Tell the others of an error. If one of them has a graver one, raise that."""
        _mark_known(error)
        try:
            answers = self._exchange(("an error", None, (gravity, type(error).__name__, str(error))))
        except ProcessError:
            return  # the error itself says more
        setattr(error, SOME, any(failure is None for _, _, failure in answers))
        self._raise_failure(answers, error, gravity)

    def _raise_failure(self, answers: Sequence[Any], own: Exception | None = None, own_gravity: int = -1) -> None:
        """Raise the gravest error of the processes as all have to, unless this one is about to."""
        failures = [(failure, rank) for rank, (_, _, failure) in enumerate(answers) if failure]
        if not failures:
            return
        (gravest, kind, message), rank = max(failures, key=lambda each: each[0][0])
        if own_gravity == gravest:
            return
        raise _mark_known(_make_error_of_other(gravest, kind, message, rank)) from own

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Raise an error that says so if another process does not answer."""
        failed = ""
        try:
            yield
        except RuntimeError as error:
            failed = str(error)
        if failed:
            # Closed outside of the handler, whose traceback holds the group. The others notice at once.
            self._close()
            how = "no answer in time" if "imed out" in failed else "a closed connection"
            raise _mark_known(
                ProcessError(
                    f"Expected {self.count} processes that measure together, but got {how}: one has ended, or makes "
                    "other calls. Try looking for the first error among their logs; one that was killed may have run "
                    "out of memory."
                ),
                is_connected=False,
            )

    def _get_channel(self) -> Channel:
        """Return the connection of the processes, which is opened at the first call and kept with the group."""
        group = self._group
        assert group is not None
        if group not in _CHANNELS:
            if not dist.is_gloo_available():
                raise OptionError(
                    "Expected a build of torch with gloo for process_group=, but got one without. Try measuring in one "
                    "process."
                )
            # Groups of torch.distributed itself have to be opened by processes outside of this group, too.
            name = [uuid4().hex]
            dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group)
            store = dist.PrefixStore(f"saltflat/{name[0]}", _get_default_store())  # type: ignore[attr-defined]
            opened = dist.ProcessGroupGloo(store, self.rank, self.count, _find_timeout(group))
            _CHANNELS[group] = cast("Channel", opened)
        return _CHANNELS[group]

    def _close(self) -> None:
        if self._group is not None:
            _CHANNELS.pop(self._group, None)


SINGLE_PROCESS = Processes()


def combine_nested(
    processes: Processes, what: str, nested: Mapping[str, list[dict[str, Tensor]]], device: torch.device
) -> None:
    """Put the sums over all processes in the place of lists of tensors by name."""
    flat = {
        (key, number, name): value
        for key, parts in nested.items()
        for number, part in enumerate(parts)
        for name, value in part.items()
    }
    for (key, number, name), value in processes.sum_tensors(what, flat, device).items():
        parts = nested[key]
        parts += [{} for _ in range(number + 1 - len(parts))]
        parts[number][name] = value


def parse_process_group(given: ProcessGroup | None) -> Processes:
    """Return the processes of a group; this one alone for None."""
    if given is None:
        return SINGLE_PROCESS
    if not dist.is_available() or not isinstance(given, dist.ProcessGroup):
        raise OptionError(
            "Expected a group of torch.distributed that this process belongs to, but got process_group of type "
            f"{type(given).__name__}. Try torch.distributed.group.WORLD, which is None outside of torchrun."
        )
    return Processes(given)


def _iterate_pieces(shapes: Mapping[Key, tuple[int, ...]]) -> Iterator[list[Key]]:
    """Yield the keys of tensors that share a message."""
    held: list[Key] = []
    size = 0
    for key, shape in shapes.items():
        numel = torch.Size(shape).numel()
        if held and size + numel > PIECE:
            yield held
            held, size = [], 0
        held.append(key)
        size += numel
    if held:
        yield held


def _mark_known(error: Exception, is_connected: bool = True) -> Exception:
    setattr(error, KNOWN, "connected" if is_connected else "closed")
    return error


def is_announced(error: BaseException) -> bool:
    """Return whether all processes know of an error, and are still connected."""
    return getattr(error, KNOWN, "") == "connected"


def is_of_some(error: BaseException) -> bool:
    """Return whether other processes had no error, and raise one of their own for this."""
    return getattr(error, SOME, False)


def _rank_gravity(error: Exception) -> int:
    """Return how far an error reaches: 0 and 1 may leave out a single statistic, as callers catch them."""
    if isinstance(error, NotDefinedError):
        return 0
    return 1 if isinstance(error, RuntimeError) and not isinstance(error, SaltflatError) else GRAVEST


def _make_error_of_other(gravity: int, kind: str, message: str, rank: int) -> Exception:
    """Return the error to raise for that of another process."""
    known = getattr(saltflat.errors, kind, None)
    if gravity == 0:
        return NotDefinedError(message)  # the reason, the same in all processes
    if isinstance(known, type) and issubclass(known, SaltflatError):
        return known(f"{message} (in process {rank})")
    line = (message.strip() or "no message").splitlines()[0]
    if gravity < GRAVEST:
        return RuntimeError(line)
    return ProcessError(
        f"Expected every process to finish, but got {kind}: {line} in process {rank}. Try looking at the traceback of "
        "that process."
    )


def _find_timeout(group: ProcessGroup) -> timedelta:
    """Return how long a process of the group waits for the others."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return default_pg_timeout
