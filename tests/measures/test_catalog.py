"""The register of measures: what it says, what it refuses, and how little a new measure takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from chains import CHAINS
from torch import Tensor

import saltflat
from saltflat.bounds import BOUNDS
from saltflat.engine.statistic import COMPUTED, COSTS, STATISTICS
from saltflat.errors import OptionError, UnknownNameError
from saltflat.measures.catalog import Catalogue, CatalogueEntry
from saltflat.measures.registry import GIVEN, MEASURES, PRESETS, REFERENCES, measure, parse_measures


@pytest.fixture
def register() -> Iterator[None]:
    kept = dict(MEASURES)
    yield
    MEASURES.clear()
    MEASURES.update(kept)


def test_the_catalogue_says_everything_of_every_measure() -> None:
    entries = saltflat.list_measures()
    assert [entry.name for entry in entries] == list(MEASURES)
    for entry in entries:
        assert entry.meaning.endswith("."), entry.name
        assert len(entry.formula) > 10
        assert entry.smaller
        assert entry.needs
        assert entry.reference in REFERENCES
        assert entry.cost in COSTS


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_catalogue_prints_in_the_width_there_is(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    entry = CatalogueEntry(
        "gauge",
        "Square [bold] brackets.",
        "[/dim] formula",
        (),
        "flatter",
        ("weight",),
        "somewhere",
        {"p": 2},
        "passes",
    )
    text = str(Catalogue([*saltflat.list_measures(), entry]))
    assert max(map(len, text.splitlines())) <= width
    assert all(f"{name} " in text or f"{name}\n" in text for name in (*MEASURES, "gauge"))
    assert "Square [bold] brackets." in text
    assert "[/dim] formula" in text
    assert "needs weight; from somewhere" in text
    assert "options: p=2" in text
    assert "cost: passes)" in " ".join(text.split())


def test_every_reference_and_statistic_is_used() -> None:
    certificates = {"maurer2004note"}
    used = {each.reference for each in MEASURES.values()} | {each.reference for each in BOUNDS.values()}
    assert used | certificates == set(REFERENCES)
    needed = {need for each in MEASURES.values() for need in each.statistics}
    elsewhere = {"gradient_second_moment", "mean_gradient", "unit_trace"}  # of reports and feature robustness
    elsewhere |= {"finite_difference", "average_rise", "worst_rise"}
    assert {*STATISTICS, *COMPUTED} <= needed | elsewhere


@pytest.mark.usefixtures("register")
def test_a_new_measure_is_one_decorated_function() -> None:
    @measure(on="weights", reference="petzka2019reparameterization", formula="largest curvature of any single weight")
    def sharpest_weight(curvature_diagonal: Tensor) -> Tensor:
        """How fast the loss bends along the worst single weight."""
        return curvature_diagonal.max()

    case = CHAINS["convolutions_with_biases"]()
    report = saltflat.measure(case.model, case.batches, measures="sharpest_weight")
    diagonal = saltflat.compute_statistics(case.model, case.batches, names="curvature_diagonal")["curvature_diagonal"]
    expected = {name: float(value.max()) for name, value in diagonal.items() if value.dim() > 1}
    assert dict(report["sharpest_weight"].layers) == pytest.approx(expected)
    assert any(entry.name == "sharpest_weight" for entry in saltflat.list_measures())


def test_all_misspelt_measures_are_named_with_what_they_are_close_to() -> None:
    with pytest.raises(UnknownNameError, match=r"the measures 'kapa' and 'rhoo'\. Try 'kappa' and 'rho'\."):
        parse_measures(["kapa", "hessian_trace", "rhoo"])
    with pytest.raises(UnknownNameError, match=r"the measure 'zz'\. Try one of these\."):
        parse_measures("zz")
    with pytest.raises(OptionError, match=r"got the measures 'rho, kappa'\. Try \['rho', 'kappa'\]\."):
        parse_measures("rho, kappa")


@pytest.mark.usefixtures("register")
def test_a_misspelt_statistic_fails_where_it_is_written() -> None:
    with pytest.raises(UnknownNameError, match=r"unit_trase.*Try 'unit_trace'"):

        @measure(on="weights", reference="petzka2021relative", formula="anything at all")
        def wrong(unit_trase: Tensor) -> Tensor:
            return unit_trase


@pytest.mark.usefixtures("register")
@pytest.mark.parametrize(
    "claims", [{"reference": "petzka2022"}, {"invariant_to": ("layer_scales",)}], ids=["reference", "symmetry"]
)
def test_a_claim_that_means_nothing_fails_where_it_is_written(claims: dict[str, str]) -> None:
    with pytest.raises(UnknownNameError):

        @measure(**{"on": "weights", "reference": "petzka2021relative", "formula": "anything at all", **claims})  # type: ignore[arg-type]
        def wrong(weight: Tensor) -> Tensor:
            return weight.sum()


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("rho", "rho"),
        ("rho()", "rho"),
        (" rho ( axis = 'row' ) ", "rho(axis='row')"),
        ("rho(axis=row)", "rho(axis='row')"),
        ("rho(axis='column')", "rho"),
        ("fisher_logdet(draws=3, subset=2)", "fisher_logdet(draws=3, subset=2)"),
        ("fisher_logdet(subset=2,draws=3)", "fisher_logdet(draws=3, subset=2)"),
        ("regularized_normalized_sharpness(grid=(0, 1))", "regularized_normalized_sharpness(grid=(0, 1))"),
    ],
)
def test_a_measure_is_asked_for_with_its_options(asked: str, key: str) -> None:
    assert [each.key for each in parse_measures(asked)] == [key]


QUICK = {
    *("fisher_rao_norm", "fisher_rao_diagonal", "rho", "rho_max", "relative_flatness", "minimum_unit_sharpness"),
    *("normalized_sharpness", "normalized_sharpness_arxiv", "normalized_sharpness_printed"),
    *("parameterwise_normalized_sharpness", "minimum_sharpness", "kappa_trace", "kappa_trace_max", "hessian_trace"),
    *("squared_norm", "distance_from_init", "fisher_trace", "fisher_frobenius"),
}


def test_the_quick_measures_are_those_that_one_sweep_gives() -> None:
    assert {each.key for each in parse_measures(None)} == QUICK
    assert [each.key for each in parse_measures("quick")] == [each.key for each in parse_measures(None)]
    for request in parse_measures("quick"):
        assert {*request.measure.statistics} <= {*STATISTICS, *GIVEN, "feature_deviation", "rescalings"}


def test_a_preset_stands_for_its_measures_those_first_that_rescaling_cannot_fool() -> None:
    assert {each.key for each in parse_measures("all")} == set(MEASURES)
    assert {each.key for each in parse_measures("invariant")} == {
        n for n, each in MEASURES.items() if each.invariant_to
    }
    for preset in PRESETS:
        claims = [len(each.measure.invariant_to) for each in parse_measures(preset)]
        assert claims == sorted(claims, reverse=True)


def test_presets_and_names_can_be_mixed_and_each_measure_comes_once() -> None:
    keys = [each.key for each in parse_measures(["kappa", "quick", "rho", "rho(axis='row')", "all", "quick"])]
    assert keys[0] == "kappa"
    assert len(keys) == len(set(keys)) == len(MEASURES) + 1
    named = {each.key for each in parse_measures(["kappa", "quick", "rho", "all"]) if each.named}
    assert named == {"kappa", "rho"}


def test_what_only_a_preset_asks_for_is_left_out_and_what_is_named_is_nan() -> None:
    case = CHAINS["mlp_with_biases"]()
    report = saltflat.measure(case.model, case.batches, measures=["quick", "kappa"], certificate=False)
    assert set(report) == QUICK - {"distance_from_init"} | {"kappa"}
    assert set(report.left_out) == {"distance_from_init"}
    report = saltflat.measure(case.model, case.batches, measures=["quick", "distance_from_init"], certificate=False)
    assert not report.left_out
    assert math.isnan(report["distance_from_init"].value)


def test_the_cost_of_a_measure_is_its_own_or_that_of_what_it_needs() -> None:
    costs = {each.name: each.cost for each in saltflat.list_measures()}
    assert costs["hessian_trace"] == costs["relative_flatness"] == costs["minimum_sharpness"] == "sweep"
    assert costs["adaptive_sharpness"] == costs["input_robustness"] == "passes"
    assert costs["regularized_normalized_sharpness"] == "search"
    assert costs["kappa"] == costs["hessian_top_eigenvalue"] == costs["pac_bayes_flatness"] == "search"


def test_a_preset_is_no_name_for_a_measure(register: None) -> None:
    with pytest.raises(OptionError, match="stands for"):

        @measure(on="weights", reference="petzka2021relative", formula="anything at all")
        def quick(weight: Tensor) -> Tensor:
            """Nothing."""
            return weight.sum()


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ("rhoo", UnknownNameError, "Try 'rho'"),
        ("quik", UnknownNameError, "Try 'quick'"),
        ("quick()", OptionError, "one measure is wanted"),
        (["all", "fast"], UnknownNameError, "'fast'"),
        ("rho(axes='row')", UnknownNameError, "Try 'axis'"),
        ("rho('row')", OptionError, "name=value"),
        ("rho(axis=", OptionError, "name=value"),
        ("rho(axis=__import__('os'))", OptionError, "name=value"),
        ("rho(**{})", OptionError, "name=value"),
        ([], OptionError, "no measures"),
        (7, OptionError, "name or a list"),
        (["kappa", 3], OptionError, "name or a list"),
    ],
)
def test_a_request_that_means_nothing_is_refused(asked: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse_measures(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        "rho(axis='diagonal')",
        "normalized_sharpness_printed(side='left')",
        "regularized_normalized_sharpness(grid=())",
        "regularized_normalized_sharpness(strength=0)",
        "fisher_logdet(draws=0)",
        "fisher_logdet(subset=-1)",
        "fisher_logdet(pool=0)",
        "fisher_logdet(convention='third')",
        "fisher_logdet(floor=2)",
        "fisher_determinant(jitter=-1)",
        "adaptive_sharpness(case='best')",
        "adaptive_sharpness(radius=0)",
        "sharpness(steps=0)",
        "pac_bayes_flatness(drop=-1)",
        "hessian_top_eigenvalue(tolerance=0)",
        "kappa(tolerance=-1)",
        "kappa(steps=0)",
        "relative_flatness(normalize='yes')",
    ],
)
def test_an_option_that_means_nothing_is_refused(asked: str) -> None:
    case = CHAINS["mlp_with_biases"]()
    with pytest.raises(saltflat.SaltflatError, match=r"^Expected .*, but got .*\. Try "):
        saltflat.measure(case.model, case.batches, measures=asked)


def test_measures_share_what_they_need_and_do_not_disturb_each_other() -> None:
    case = CHAINS["convolutions_with_biases"]()
    every = saltflat.measure(case.model, case.batches, measures="all")
    for name in ("kappa", "fisher_logdet", "adaptive_sharpness", "relative_flatness"):
        alone = saltflat.measure(case.model, case.batches, measures=name, certificate=False)
        assert alone[name].value == pytest.approx(every[name].value, rel=1e-9)
    backwards = saltflat.measure(case.model, case.batches, measures=list(reversed(list(every))), certificate=False)
    assert list(backwards) == list(reversed(list(every)))
    for name, reading in backwards.items():
        assert reading.value == pytest.approx(every[name].value, rel=1e-9, nan_ok=True)


def test_progress_tells_what_is_being_done() -> None:
    case = CHAINS["mlp_with_biases"]()
    seen: list[tuple[str, int, int | None]] = []
    saltflat.measure(case.model, case.batches, measures="all", progress=lambda *step: seen.append(step))
    assert len({step for step, _, _ in seen}) > 5
    assert all(done <= total for _, done, total in seen if total is not None)


def test_logits_without_a_scale_make_a_measure_independent_of_it() -> None:
    case = CHAINS["mlp_with_biases"]()
    names = ["fisher_trace", "adaptive_sharpness"]
    for logits in ("std", "l2"):
        one = saltflat.measure(case.model, case.batches, measures=names, logits=logits)
        with torch.no_grad():
            for name in ("4.weight", "4.bias"):
                case.model.get_parameter(name).mul_(10)
        ten = saltflat.measure(case.model, case.batches, measures=names, logits=logits)
        assert ten["adaptive_sharpness"].value == pytest.approx(one["adaptive_sharpness"].value, rel=1e-8)
        assert ten.loss == pytest.approx(one.loss, rel=1e-10)
    plain = saltflat.measure(case.model, case.batches, measures=names)
    assert plain["adaptive_sharpness"].value != pytest.approx(one["adaptive_sharpness"].value, rel=1e-2)


def test_the_diagonal_may_be_an_estimate() -> None:
    case = CHAINS["mlp_with_biases"]()
    exact = saltflat.measure(case.model, case.batches, measures="fisher_rao_diagonal", certificate=False)
    for diagonal in ("finite_difference", "gaussian", "hutchinson"):
        report = saltflat.measure(
            case.model, case.batches, measures="fisher_rao_diagonal", diagonal=diagonal, certificate=False
        )
        reading = report["fisher_rao_diagonal"]
        assert not reading.exact
        assert reading.stderr is not None
        assert any("estimate" in note for note in reading.notes)
        assert reading.value == pytest.approx(exact["fisher_rao_diagonal"].value, rel=0.9)
    with pytest.raises(UnknownNameError, match="hutchinson"):
        saltflat.measure(case.model, case.batches, diagonal="hutchison")


def test_a_reading_is_found_under_the_name_it_was_asked_for_with() -> None:
    case = CHAINS["mlp_with_biases"]()
    asked = ["rho(axis='column')", "fisher_logdet( subset=2,draws=3 )"]
    report = saltflat.measure(case.model, case.batches, measures=asked, certificate=False)
    audit = saltflat.audit_invariance(case.model, case.batches, measures=asked[0], draws=1, kinds="layer")
    both = saltflat.compare(report, report, names=asked)
    for found in (report, both):
        assert list(found) == ["rho", "fisher_logdet(draws=3, subset=2)"]
        assert all(name in found for name in asked)
        assert found[asked[0]] is found.get("rho(axis=column)") is found["rho"]
    assert audit[asked[0]] is audit.get(asked[0]) is audit["rho"]
    assert asked[0] in audit
    for unknown in ("rho(axis='row')", "rho(axis='column'", "no such measure", ""):
        assert unknown not in report
        assert report.get(unknown) is None
        with pytest.raises(UnknownNameError, match="rho"):
            report[unknown]
    assert 3 not in report  # type: ignore[comparison-overlap]
