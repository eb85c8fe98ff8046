"""Counter-based random numbers: each depends on a key and a counter alone.

So a network draws the same numbers alone and in a batch, on a CPU and on a GPU, in a captured CUDA graph, and after an
interruption. The generator is SplitMix64 (Steele et al., 2014): the n-th number of a key is a hash of ``key + n * c``.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from saltflat.studies.recipe import Recipe

LANES = 4  # numbers of 16 bits in a word


def derive_seed(*what: int | str) -> int:
    """Return a seed for these words and numbers, the same on every machine.

    Example:
        >>> seed = derive_seed(0, "order", 1)
        >>> seed == derive_seed(0, "order", 1), seed == derive_seed(0, "order", 2)
        (True, False)
    """
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


def make_generator(*what: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a random generator of its own for this purpose."""
    return torch.Generator(device).manual_seed(derive_seed(*what))


def make_keys(recipes: Sequence[Recipe], purpose: str, epoch: int) -> Tensor:
    """Return the key of each network for one purpose in one epoch, ``(networks, 1)``."""
    return torch.tensor([[derive_seed(recipe.seed, purpose, epoch)] for recipe in recipes])


def _to_signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


STEP = _to_signed(0x9E3779B97F4A7C15)
ROUNDS = ((30, _to_signed(0xBF58476D1CE4E5B9)), (27, _to_signed(0x94D049BB133111EB)))
LAST = 31


def draw_words(keys: Tensor, counters: Tensor) -> Tensor:
    """Return one random word of 64 bits for each key and counter, which are broadcast.

    Example:
        >>> draw_words(torch.tensor([0]), torch.tensor([1, 2]))
        tensor([-2152535657050944081,  7960286522194355700])
    """
    return _mix_words(keys + counters * STEP)


def _mix_words(word: Tensor) -> Tensor:
    for shift, factor in ROUNDS:
        word = _shift_right(word, shift).bitwise_xor_(word).mul_(factor)
    return _shift_right(word, LAST).bitwise_xor_(word)


def _shift_right(word: Tensor, places: int) -> Tensor:
    # Torch repeats the sign.
    return (word >> places).bitwise_and_(2 ** (64 - places) - 1)


def draw_short_numbers(keys: Tensor, count: int) -> Tensor:
    """Return ``count`` random numbers of 16 bits for each key, as int16 along a new last axis.

    Example:
        >>> draw_short_numbers(torch.tensor([7]), 5).shape
        torch.Size([1, 5])
    """
    words = -(-count // LANES)
    counters = torch.arange(1, words + 1, device=keys.device)
    return draw_words(keys[..., None], counters).view(torch.int16)[..., :count]


def compute_lanes(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what :func:`draw_lanes` needs for ``count`` numbers: the word of each, and its place in the word."""
    which = torch.arange(count, device=device)
    return (which // LANES + 1) * STEP, which % LANES * 16


def draw_lanes(keys: Tensor, steps: Tensor, shifts: Tensor) -> Tensor:
    """Return the numbers of :func:`draw_short_numbers`, each from a word of its own.

    That is four times the arithmetic, in operations that ``torch.compile`` fuses into one kernel. (It miscompiles views
    as a type of another size, and large numbers times ``torch.arange``.)

    Example:
        >>> keys = torch.tensor([7])
        >>> bool((draw_lanes(keys, *compute_lanes(5, keys.device)) == draw_short_numbers(keys, 5)).all())
        True
    """
    return (_mix_words(keys[..., None] + steps) >> shifts).to(torch.int16)
