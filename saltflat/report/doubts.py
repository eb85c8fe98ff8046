"""What stands against comparing reports, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saltflat.report.report import Report
from saltflat.report.text import listed
from saltflat.report.verdict import DIFFERENT

if TYPE_CHECKING:
    from saltflat.report.compare import Contrast

# How much memory was used, or which way was taken, changes no number. Another seed is another independent draw, which
# the errors account for. The device is compared by itself.
HARMLESS = {"memory", "way", "seed", "progress", "device"}

WHY = {
    "columns": "exact values have no error, others do",
    "loss": "curvature of different functions",
    "dtype": "rounding differs",
    "layers": "totals are over different parts",
}


def doubts_about(reports: Mapping[str, Report], contrasts: Mapping[str, Contrast]) -> list[str]:
    """Every reason to be careful, the weightiest first."""
    names = list(contrasts)
    found = [
        *_split(reports, "models", lambda r: r.model, "sums over layers grow with the network"),
        *_split(reports, "numbers of examples", lambda r: r.examples, "not the same data"),
        *_settings(reports),
        *_certificates(reports),
        *_formulas(reports, names),
        *_readings(reports, names),
        *_rounding(reports, contrasts.values()),
        *_split(reports, "devices", lambda r: r.device, "rounding differs"),
    ]
    for name in dict.fromkeys(name for report in reports.values() for name in report.versions):
        found += _split(reports, f"versions of {name}", _entry("versions", name), "")
    return found


def _split(reports: Mapping[str, Report], what: str, of: Callable[[Report], Any], why: str) -> list[str]:
    """One sentence if the reports differ in this, saying which has which."""
    sides: dict[str, list[str]] = {}
    for label, report in reports.items():
        sides.setdefault(_brief(of(report)), []).append(label)
    if len(sides) == 1:
        return []
    said = "; ".join(f"{value} in {listed(labels)}" for value, labels in sides.items())
    return [f"Different {what}{f' ({why})' if why else ''}: {said}."]


def _entry(table: str, key: str) -> Callable[[Report], Any]:
    return lambda report: getattr(report, table).get(key, "not said")


def _settings(reports: Mapping[str, Report]) -> list[str]:
    keys = dict.fromkeys(key for report in reports.values() for key in report.settings if key not in HARMLESS)
    return [
        sentence
        for key in sorted(keys, key=lambda key: key not in WHY)
        for sentence in _split(reports, f"settings of {key}", _entry("settings", key), WHY.get(key, ""))
    ]


def _certificates(reports: Mapping[str, Report]) -> list[str]:
    def state(report: Report) -> str:
        if report.certificate is None:
            return "not asked for"
        return "holds" if report.certificate.get("holds") else "does not hold"

    return _split(reports, "certificates", state, "curvature is the Hessian's only where it holds")


def _formulas(reports: Mapping[str, Report], names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        formulas = {str(r.legend[name].get("formula")) for r in reports.values() if name in r and name in r.legend}
        if len(formulas) > 1:
            found.append(f"Different formulas of {name}: {'; '.join(sorted(formulas))}.")
    return found


def _readings(reports: Mapping[str, Report], names: Sequence[str]) -> list[str]:
    # What is said of which reports: one sentence for all that it is true of.
    said: dict[tuple[str, str], list[str]] = {}
    for label, report in reports.items():
        taken = [report[name] for name in names if name in report]
        loose = [reading.name for reading in taken if not reading.converged]
        blind = [each.name for each in taken if each.converged and not each.exact and each.stderr is None]
        if loose:
            said.setdefault(("Not converged", f"{listed(loose)}."), []).append(label)
        if blind:
            said.setdefault(("Estimates, bounds or searches of unknown error", f"{listed(blind)}."), []).append(label)
        missing: dict[str, list[str]] = {}
        for name in names:
            if name not in report:
                missing.setdefault(report.left_out.get(name, "not asked for."), []).append(name)
        for reason, absent in missing.items():
            said.setdefault((f"No {listed(absent)}", reason), []).append(label)
    return [f"{what} in {listed(labels)}: {which}" for (what, which), labels in said.items()]


def _rounding(reports: Mapping[str, Report], contrasts: Iterable[Contrast]) -> list[str]:
    """Differences that count as such but are of the size of rounding in single precision."""
    coarse = [label for label, report in reports.items() if report.settings.get("dtype") == "float32"]
    tiny = [
        each.name
        for each in contrasts
        if any(verdict == DIFFERENT and abs(each.ratios[label] - 1) < 1e-5 for label, verdict in each.verdicts.items())
    ]
    if not (coarse and tiny):
        return []
    return [f"Measured in float32 in {listed(coarse)}: the differences of {listed(tiny)} may be rounding."]


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{', '.join(map(str, value[:3]))}, ... {value[-1]}] ({len(value)})"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
