"""The registry of measures, and measures as users ask for them: by name, with options, or by preset."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from torch import Tensor

from saltflat.engine.statistic import COMPUTED, COSTS, STATISTICS, find_keyword_defaults
from saltflat.errors import OptionError, SaltflatError, make_unknown_name_error, make_unknown_names_error

REFERENCES = {
    "tsuzuku2020normalized": "Tsuzuku, Sato, Sugiyama. Normalized Flat Minima: Exploring Scale Invariant Definition of "
    "Flat Minima for Neural Networks Using PAC-Bayesian Analysis. ICML 2020.",
    "petzka2019reparameterization": "Petzka, Adilova, Kamp, Sminchisescu. A Reparameterization-Invariant Flatness "
    "Measure for Deep Neural Networks. 2019.",
    "petzka2021relative": "Petzka, Kamp, Adilova, Sminchisescu, Boley. Relative Flatness and Generalization. "
    "NeurIPS 2021.",
    "ibayashi2021minimum": "Ibayashi, Hamaguchi, Imaizumi. Minimum Sharpness: Scale-Invariant Parameter-Robustness of "
    "Neural Networks. 2021.",
    "jia2020information": "Jia, Su. Information-Theoretic Local Minima Characterization and Regularization. ICML 2020.",
    "maurer2004note": "Maurer. A Note on the PAC Bayesian Theorem. 2004.",
    "neyshabur2017exploring": "Neyshabur, Bhojanapalli, McAllester, Srebro. Exploring Generalization in Deep Learning. "
    "NeurIPS 2017.",
    "jiang2020fantastic": "Jiang, Neyshabur, Mobahi, Krishnan, Bengio. Fantastic Generalization Measures and Where to "
    "Find Them. ICLR 2020.",
    "neyshabur2015norm": "Neyshabur, Tomioka, Srebro. Norm-Based Capacity Control in Neural Networks. COLT 2015.",
    "jiang2019predicting": "Jiang, Krishnan, Mobahi, Bengio. Predicting the Generalization Gap in Deep Networks with "
    "Margin Distributions. ICLR 2019.",
    "liang2019fisher": "Liang, Poggio, Rakhlin, Stokes. Fisher-Rao Metric, Geometry, and Complexity of Neural "
    "Networks. AISTATS 2019.",
    "rangamani2019scale": "Rangamani, Nguyen, Kumar, Phan, Chin, Tran. A Scale Invariant Flatness Measure for Deep "
    "Network Minima. 2019.",
    "foret2021sharpness": "Foret, Kleiner, Mobahi, Neyshabur. Sharpness-Aware Minimization for Efficiently Improving "
    "Generalization. ICLR 2021.",
    "andriushchenko2023modern": "Andriushchenko, Croce, Mueller, Hein, Flammarion. A Modern Look at the Relationship "
    "between Sharpness and Generalization. ICML 2023.",
}

# Of which a measure may claim to be independent.
SYMMETRIES = {
    "layer_scale": "multiplying layers by factors that cancel over the network",
    "unit_scale": "multiplying the weights into a unit by a factor and dividing those out of it",
}
# Not found in a sweep, but at hand: the parameters, and what they were before training.
GIVEN = ("weight", "initial_weight")
# Names that stand for several measures.
PRESETS = {
    "quick": "every measure that the one shared sweep gives: what is measured if nothing is named",
    "invariant": "every measure that rescaling layers, or layers and single units, leaves unchanged, whatever it costs",
    "all": "every measure there is",
}


@dataclass(frozen=True)
class MeasureResult:
    """The value of a measure for a layer or the network, with what a bare number does not say.

    Attributes:
        value: the number; nan where it is not defined, with the reason in ``notes``.
        residual: how far a solver was from the minimum.
        converged: whether that is close enough to call it one.
        exact: False for estimates, bounds and searches.
        stderr: standard error, where the measure knows it itself.
        sampling_stderr: standard error over examples, where the measure knows it itself.
        depends_on_all: whether it is made of something that is known of all examples together alone, so that its
            standard error over examples is not known.
        slopes: the derivative of ``value`` by each statistic, in its shape: where evaluating the measure again is
            expensive, its standard error over examples is found with these. At a minimum over scales they are the
            terms' own factors (the envelope theorem).
        units: one number per unit.
        layers: one number per parameter, for measures on the network.
        notes: plain sentences for the reader.
        details: whatever else was found.
    """

    value: Tensor | float
    residual: float | None = None
    converged: bool = True
    exact: bool = True
    stderr: float | None = None
    sampling_stderr: float | None = None
    depends_on_all: bool = False
    slopes: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[float, ...] | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A registered measure: its function, claims and source."""

    name: str
    function: Callable[..., Tensor | float | MeasureResult]
    on: Literal["weights", "parameters", "network"]
    total: Literal["sum", "max"]
    invariant_to: tuple[str, ...]
    reference: str
    formula: str
    smaller: str
    logarithmic: bool
    by_matrix: bool
    statistics: tuple[str, ...]
    own_options: tuple[str, ...]
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    own_cost: str = "sweep"

    @property
    def meaning(self) -> str:
        """The first sentence of its docstring."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    @cached_property
    def cost(self) -> str:
        """One of :data:`COSTS`: the cost of its most expensive statistic with default options, or its own."""
        costs = [COMPUTED[need].cost for need in self.statistics if need in COMPUTED]
        return max([self.own_cost, *costs], key=list(COSTS).index)


MEASURES: dict[str, Measure] = {}
Function = TypeVar("Function", bound=Callable[..., "Tensor | float | MeasureResult"])


def measure(
    *,
    on: Literal["weights", "parameters", "network"],
    reference: str,
    formula: str,
    invariant_to: tuple[str, ...] = (),
    total: Literal["sum", "max"] = "sum",
    smaller: str = "flatter",
    logarithmic: bool = False,
    by_matrix: bool = False,
    fixed: Mapping[str, Any] | None = None,
    cost: Literal["sweep", "passes", "search"] = "sweep",
) -> Callable[[Function], Function]:
    """Register a measure and its claims.

    Args:
        on: what it is called with; see the package.
        reference: a key of :data:`saltflat.measures.registry.REFERENCES`.
        formula: in words.
        invariant_to: which of :data:`SYMMETRIES` leave it as it is. What is claimed must hold and what is not claimed
            must visibly fail: the tests try both.
        total: how the layers make one number.
        smaller: what a smaller value says of the minimum.
        logarithmic: whether differences, not ratios, tell.
        by_matrix: whether factors of units leave it as it is because each is one of a row times one of a column of the
            weight; where they are not, the reading of that weight withdraws the claim.
        fixed: options of the statistics that this measure is about and that nobody else may choose.
        cost: of the function itself, where it takes long beside its statistics.
    """

    def register_function(function: Function) -> Function:
        name = getattr(function, "__name__", "")
        if name in PRESETS:
            raise OptionError(
                f"Expected another name, but got a measure of the name {name!r}, which stands for {PRESETS[name]}. "
                "Try renaming the function."
            )
        arguments = inspect.signature(function).parameters.values()
        needs = tuple(a.name for a in arguments if a.kind is not inspect.Parameter.KEYWORD_ONLY)
        own = options = find_keyword_defaults(function)
        for need in needs:
            if need not in STATISTICS and need not in COMPUTED and need not in GIVEN:
                raise make_unknown_name_error(
                    f"statistic (a parameter of the measure {name!r})", need, {*STATISTICS, *COMPUTED, *GIVEN}
                )
            options = {**get_statistic_options(need), **options}
        options = {option: value for option, value in options.items() if option not in (fixed or {})}
        for symmetry in invariant_to:
            if symmetry not in SYMMETRIES:
                raise make_unknown_name_error(f"symmetry (claimed by the measure {name!r})", symmetry, SYMMETRIES)
        if reference not in REFERENCES:
            raise make_unknown_name_error(f"reference (of the measure {name!r})", reference, REFERENCES)
        MEASURES[name] = Measure(
            name,
            function,
            on,
            total,
            invariant_to,
            reference,
            formula,
            smaller,
            logarithmic,
            by_matrix,
            needs,
            tuple(own),
            options,
            fixed or {},
            cost,
        )
        return function

    return register_function


def get_statistic_options(statistic: str) -> Mapping[str, Any]:
    """Return the options of a statistic with their defaults."""
    if statistic in COMPUTED:
        return COMPUTED[statistic].options
    return STATISTICS[statistic].options if statistic in STATISTICS else {}


@dataclass(frozen=True)
class StatisticRequest:
    """A statistic and the options it is requested with."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """The statistic as a call, with the options that differ from the defaults."""
        return format_call(self.name, dict(self.options))


@dataclass(frozen=True)
class MeasureRequest:
    """A measure and the options it is requested with.

    Attributes:
        key: how the report names it.
        measure: what is asked for.
        options: of the measure's own function.
        needs: the statistic behind each of its parameters.
        named: whether it was asked for by its name. What only a preset asks for may be left out, with the reason.
    """

    key: str
    measure: Measure
    options: Mapping[str, Any]
    needs: Mapping[str, StatisticRequest]
    named: bool = True


def parse_measures(measures: str | Sequence[str] | None) -> list[MeasureRequest]:
    """Return the requested measures, each once; the preset ``"quick"`` if None.

    >>> [each.key for each in parse_measures(["kappa", "rho( axis = 'row' )"])]
    ['kappa', "rho(axis='row')"]
    >>> [each.key for each in parse_measures(["kappa", "quick"])][:3]
    ['kappa', 'fisher_rao_norm', 'minimum_unit_sharpness']
    """
    texts = ["quick"] if measures is None else [measures] if isinstance(measures, str) else measures
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise OptionError(f"Expected a name or a list of names, but got measures={measures!r}. Try ['kappa', 'rho'].")
    if not texts:
        raise OptionError(
            "Expected at least one name, but got no measures. Try leaving measures out for the quick ones."
        )
    known = (*MEASURES, *PRESETS)
    for text in texts:
        listed = [each.strip() for each in text.split(",")]
        if len(listed) > 1 and all(each in known for each in listed):
            raise OptionError(f"Expected one name in a string, but got the measures {text!r}. Try {listed!r}.")
    unknown = [name for text in texts if (name := text.partition("(")[0].strip()) not in known]
    if unknown:
        raise make_unknown_names_error("measure", unknown, known)
    found: dict[str, MeasureRequest] = {}
    for text in texts:
        several = _expand_preset(text.strip()) if text.strip() in PRESETS else [parse_measure(text)]
        for each in several:
            # A measure that is both in a preset and named is named.
            found[each.key] = each if each.named else found.get(each.key, each)
    return list(found.values())


def _expand_preset(name: str) -> list[MeasureRequest]:
    chosen = {
        "quick": [each for each in MEASURES.values() if each.cost == "sweep"],
        "invariant": [each for each in MEASURES.values() if each.invariant_to],
        "all": list(MEASURES.values()),
    }[name]
    first = sorted(chosen, key=lambda each: len(each.invariant_to), reverse=True)
    return [replace(_make_request(measure, {}), named=False) for measure in first]


def parse_measure(text: str) -> MeasureRequest:
    """Parse one measure from its name and options."""
    name, opened, rest = text.strip().partition("(")
    name = name.strip()
    if name in PRESETS:
        raise OptionError(
            f"Expected the name of a measure, but got {text.strip()!r} where one measure is wanted; {name} is "
            f"{PRESETS[name]}. Try taking one of the list that saltflat.list_measures() prints, or plain {name!r} "
            "where several can be."
        )
    if name not in MEASURES:
        raise make_unknown_name_error("measure", name, (*MEASURES, *PRESETS))
    return _make_request(MEASURES[name], _parse_options(text, rest) if opened else {})


def get_measure_key(text: str) -> str:
    """Return the name under which a report keeps a measure; the text itself if it names none.

    >>> [get_measure_key(each) for each in ("rho( axis = 'column' )", "rho(axis=row)", "of another version")]
    ['rho', "rho(axis='row')", 'of another version']
    """
    try:
        return parse_measure(text).key
    except SaltflatError:
        return text


def _parse_options(text: str, rest: str) -> dict[str, Any]:
    wrong = OptionError(
        f"Expected options as name=value in parentheses, but got the measure {text!r}. Try \"rho(axis='row')\"."
    )
    try:
        tree = ast.parse(f"f({rest}", mode="eval").body
    except SyntaxError:
        raise wrong from None
    if not isinstance(tree, ast.Call) or tree.args or any(each.arg is None for each in tree.keywords):
        raise wrong
    if len({each.arg for each in tree.keywords}) < len(tree.keywords):
        raise wrong
    found = {}
    for each in tree.keywords:
        # A bare word is text: shells take quotes away.
        if isinstance(each.value, ast.Name):
            found[str(each.arg)] = each.value.id
            continue
        try:
            found[str(each.arg)] = ast.literal_eval(each.value)
        except (ValueError, TypeError, SyntaxError):
            raise wrong from None
    return found


def _make_request(measure: Measure, given: Mapping[str, Any]) -> MeasureRequest:
    for name in given:
        if not measure.options:
            raise OptionError(
                f"Expected none, but got {name}= of {measure.name}. It has no options. Try leaving it out."
            )
        if name not in measure.options:
            raise make_unknown_name_error(f"option of {measure.name}", name, measure.options)
    # Only what differs from the usual is part of the name.
    changed = {name: value for name, value in given.items() if value != measure.options[name]}
    filled = {**measure.options, **given, **measure.fixed}
    needs = {
        name: StatisticRequest(
            name, tuple((o, filled[o]) for o, default in get_statistic_options(name).items() if filled[o] != default)
        )
        for name in measure.statistics
    }
    own = {name: filled[name] for name in measure.own_options}
    return MeasureRequest(format_call(measure.name, changed), measure, own, needs)


def format_call(name: str, options: Mapping[str, Any]) -> str:
    """Format a name and its options as a call.

    >>> format_call("rho", {}), format_call("rho", {"axis": "row"})
    ('rho', "rho(axis='row')")
    """
    inside = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items()))
    return f"{name}({inside})" if inside else name
