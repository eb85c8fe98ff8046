"""How much the loss rises on average when every parameter is changed by random few percent of itself."""

from __future__ import annotations

from math import fsum, isfinite, nan

from saltflat.amounts import check_count, check_positive
from saltflat.errors import OptionError
from saltflat.noise import compute_mean_and_error, draw_normals
from saltflat.setting import Setting, StatisticResult
from saltflat.statistics import statistic
from saltflat.whole import check_finite_loss, compute_grouped_losses, compute_moved_weights


@statistic(
    per="network",
    meaning="Mean rise of the loss under random relative changes of all parameters.",
    passes=lambda draws, **_: draws + 1,
)
def average_rise(setting: Setting, *, radius: float = 0.05, draws: int = 20) -> StatisticResult:
    r"""E L(w + d) - L(w) with :math:`d_i = \rho w_i \xi_i` and standard normal :math:`\xi`.

    Draws come in pairs :math:`\pm\xi`, so that the slope of the loss cancels; their scatter gives the error.

    Args:
        setting: what is measured.
        radius: :math:`\rho`, the relative size of the changes.
        draws: how many; an even number.

    Returns:
        ``value``, ``stderr`` and the rises of all ``pairs``.
    """
    check_positive(radius=radius)
    check_count(4, draws=draws)
    if draws % 2:
        raise OptionError(f"Got draws={draws}. Want an even number: they come in pairs. Do: take {draws + 1}.")
    start = compute_grouped_losses(setting)
    here = check_finite_loss(start.compute_mean())
    pairs, by_group = [], []
    for draw in range(draws // 2):
        # Relative to the weights from the start, so that rescaled networks are disturbed in the same way.
        noise = draw_normals(setting, draw)
        step = {name: radius * each * noise[name] for name, each in setting.problem.network.measured.items()}
        there = compute_grouped_losses(setting, compute_moved_weights(setting, step))
        back = compute_grouped_losses(
            setting, compute_moved_weights(setting, {name: -each for name, each in step.items()})
        )
        pairs.append((there.compute_mean() + back.compute_mean()) / 2 - here)
        by_group.append((there.make_leave_one_out(), back.make_leave_one_out()))
        setting.tick("Loss under random changes", 2 * (draw + 1), draws)
    if not all(map(isfinite, pairs)):
        note = "The loss overflows at some of the changed weights."
        return StatisticResult({"value": nan, "stderr": nan, "pairs": pairs}, exact=False, notes=(note,))
    value, stderr = compute_mean_and_error(pairs)

    def compute_without(group: int) -> dict[str, float]:
        before = start.make_leave_one_out()
        assert before is not None
        rises = [(there(group) + back(group)) / 2 - before(group) for there, back in by_group if there and back]
        return {"value": fsum(rises) / len(rises)}

    known = start.make_leave_one_out() is not None
    result = {"value": value, "stderr": stderr, "pairs": pairs}
    return StatisticResult(result, exact=False, without=compute_without if known else None)
