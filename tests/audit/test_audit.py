"""Audits: what rescalings do to measures is told as it is, and what is claimed falsely is found."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NETWORKS
from chains import CHAINS
from rich.console import Console
from torch import Tensor, nn

import saltflat
from saltflat.audit import Audit, AuditLine, Change
from saltflat.audit.audit import audit_invariance
from saltflat.audit.change import BROKEN, MOVES, STAYS, UNCLAIMED, UNDEFINED, UNMEASURED, WITHIN, compute_change
from saltflat.errors import ModelError, OptionError, ReportError, SaltflatError, UnknownNameError
from saltflat.measures.registry import MEASURES, measure
from saltflat.render.audit import sort_measures
from saltflat.results import Reading, Report
from saltflat.results.text import render_text
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.rescale import apply_rescaling

NAN, INF = float("nan"), float("inf")
FEW = ["hessian_trace", "normalized_sharpness", "kappa"]


def audited(name: str, *measures: str, **options: Any) -> Audit:
    case = {**CHAINS, **NETWORKS}[name]()
    return audit_invariance(case.model, case.batches, case.loss, list(measures) or FEW, **{"draws": 2, **options})


@pytest.fixture(scope="module")
def of_mlp() -> Audit:
    return audited("mlp_with_biases", draws=3)


@pytest.fixture
def boastful() -> Iterator[str]:
    """A measure that claims what is not true of it."""

    @measure(on="weights", invariant_to=("unit_scale",), reference="petzka2019reparameterization", formula="|w|_1")
    def boastful_norm(weight: Tensor) -> Tensor:
        """How large the weights are, said to be something else."""
        return weight.abs().sum()

    yield "boastful_norm"
    del MEASURES["boastful_norm"]


def test_each_measure_does_what_it_claims_on_an_mlp(of_mlp: Audit) -> None:
    assert of_mlp.holds
    assert of_mlp.scales == {"layer": 2, "unit": 11}
    assert of_mlp["hessian_trace"].verdicts == {"layer": MOVES, "unit": MOVES}
    assert of_mlp["normalized_sharpness"].verdicts == {"layer": STAYS, "unit": STAYS}
    assert of_mlp["kappa"].verdicts == {"layer": STAYS, "unit": MOVES}
    assert of_mlp["kappa"].claims == ("layer_scale",)


@pytest.mark.parametrize("name", ["resnet18_with_convolutional_shortcuts", "resnet20_with_padded_shortcuts"])
def test_each_measure_does_what_it_claims_on_a_residual_network_with_batch_norm(name: str) -> None:
    found = audited(name)
    assert found.holds
    assert found.failed == {"layer": {}, "unit": {}}
    assert found["hessian_trace"].changes["unit"].largest > 10
    assert found["normalized_sharpness"].changes["unit"].moved < 1e-9


def test_values_are_those_of_the_rescaled_networks_measured_by_hand(of_mlp: Audit) -> None:
    case = CHAINS["mlp_with_biases"]()
    group = find_symmetries(case.model, case.batches[0][0])  # type: ignore[index]
    for kind, part in {"layer": group.restrict_to_layers(), "unit": group}.items():
        for draw in range(3):
            other = apply_rescaling(case.model, part, part.sample(draw, 2.0))
            wanted = saltflat.measure(other, case.batches, case.loss, FEW, certificate=False)
            for name in FEW:
                assert of_mlp[name].values[kind][draw] == pytest.approx(wanted[name].value, rel=1e-12)


def test_changes_are_the_extremes_of_new_by_old(of_mlp: Audit) -> None:
    line = of_mlp["hessian_trace"]
    for kind, change in line.changes.items():
        ratios = [float(value or NAN) / line.reading.value for value in change.values]
        assert (change.smallest, change.largest) == (min(ratios), max(ratios))
        assert change.moved == pytest.approx(max(abs(each - 1) for each in ratios))
        assert line.compute_draw_decades(kind) == pytest.approx(np.log10(ratios))


def test_a_false_claim_is_reported_as_broken(boastful: str) -> None:
    found = audited("mlp_with_biases", boastful, "normalized_sharpness")
    assert found[boastful].verdicts == {"layer": MOVES, "unit": BROKEN}
    assert not found.holds
    assert found.broken_claims == [boastful]
    shown = str(found)
    assert "MOVES" in shown
    assert f"{boastful} moved by a factor of" in shown
    assert shown.index(boastful) < shown.index("normalized_sharpness")
    assert Audit.from_dict(found.to_dict()).broken_claims == [boastful]
    assert found.plot() is not None


def test_float32_models_are_audited_in_float64() -> None:
    case = CHAINS["mlp_with_biases"]()
    data = [(inputs.float(), targets) for inputs, targets in case.batches]  # type: ignore[union-attr]
    found = audit_invariance(case.model.float(), data, measures=FEW, draws=2)
    assert found.report.settings["dtype"] == "float64"
    assert found["normalized_sharpness"].changes["unit"].moved < 1e-12


@pytest.mark.parametrize("name", ["mlp_with_biases", "vgg_with_batch_norm"])
def test_the_users_model_is_left_bit_for_bit(name: str) -> None:
    case = {**CHAINS, **NETWORKS}[name]()
    case.model.train()
    parameter = next(case.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before, modes = deepcopy(case.model.state_dict()), [each.training for each in case.model.modules()]
    objects = [id(each) for each in case.model.parameters()]
    state = torch.get_rng_state()
    audit_invariance(case.model, case.batches, measures=["hessian_trace"], draws=2)
    assert all(torch.equal(value, before[key]) for key, value in case.model.state_dict().items())
    assert [each.training for each in case.model.modules()] == modes
    assert [id(each) for each in case.model.parameters()] == objects
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_in_train_mode_is_noted() -> None:
    case = CHAINS["mlp_with_biases"]()
    case.model.train()
    found = audit_invariance(case.model, case.batches, measures=["hessian_trace"], draws=1)
    assert any("train mode" in note for note in found.notes)


def test_the_quick_measures_are_taken_if_none_is_named() -> None:
    case = CHAINS["mlp_with_biases"]()
    found = audit_invariance(case.model, case.batches, draws=1, kinds="layer")
    quick = {name for name, each in MEASURES.items() if each.cost == "sweep"}
    assert set(found) | set(found.report.left_out) == quick
    assert "distance_from_init" in found.report.left_out
    assert set(found.scales) == {"layer"}
    with_start = audit_invariance(case.model, case.batches, measures="distance_from_init", draws=1, initial=case.model)
    assert with_start["distance_from_init"].verdicts == {"layer": MOVES, "unit": MOVES}
    assert with_start["distance_from_init"].changes["unit"].largest == INF


def test_options_of_measures_keep_their_claims() -> None:
    found = audited("mlp_with_biases", "rho(axis='row')", "hessian_trace")
    assert found["rho(axis='row')"].changes["layer"].claimed


def test_random_columns_are_the_same_in_every_draw() -> None:
    found = audited("mlp_with_biases", "normalized_sharpness", columns="sampled:4")
    assert found["normalized_sharpness"].changes["unit"].moved < 1e-12
    assert "~" in str(found)


def test_other_seeds_draw_other_rescalings(of_mlp: Audit) -> None:
    other = audited("mlp_with_biases", "hessian_trace", seed=1)
    assert other["hessian_trace"].values["unit"] == pytest.approx(of_mlp["hessian_trace"].values["unit"][1:])
    wide = audited("mlp_with_biases", "hessian_trace", spread=3.0)
    assert wide["hessian_trace"].changes["unit"].largest > of_mlp["hessian_trace"].changes["unit"].largest


def test_a_network_without_rescalings_is_an_answer() -> None:
    found = audited("gelu_only")
    assert found.scales == {"layer": 0, "unit": 0}
    assert found.holds
    assert all(not line.changes for line in found.values())
    assert found["hessian_trace"].reading.value > 0
    assert "This network has no rescalings: held fixed by gelu in " in str(found)
    assert Audit.from_dict(found.to_dict()) == found
    found.plot()


def test_a_network_of_one_layer_has_no_rescalings() -> None:
    model, data = nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    found = audit_invariance(model, data, measures=["hessian_trace"], draws=1)
    assert "This network has no rescalings: there is no unit" in str(found)


def test_units_may_be_free_where_layers_are_not() -> None:
    class Halves(nn.Module):
        """Half of the hidden units keep their size, so that no layer as a whole can change."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.one(inputs)
            left, right = hidden.chunk(2, dim=1)
            joined: Tensor = self.two(torch.cat([left.relu(), right.tanh()], dim=1))
            return joined

    data = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    found = audit_invariance(Halves(), data, measures=FEW, draws=2)
    assert found.scales == {"layer": 0, "unit": 2}
    assert set(found["hessian_trace"].changes) == {"unit"}
    shown = str(found)
    assert "no rescalings by layer" in shown
    assert "Held fixed by tanh at test_audit.py:" in shown
    found.plot()


def test_a_draw_that_fails_is_kept_as_failed_and_the_others_as_they_are(
    monkeypatch: pytest.MonkeyPatch, of_mlp: Audit
) -> None:
    calls = []

    def overflowing(*args: Any) -> nn.Module:
        calls.append(args)
        model = apply_rescaling(*args)
        if len(calls) == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(INF)
        return model

    monkeypatch.setattr("saltflat.audit.audit.apply_rescaling", overflowing)
    found = audited("mlp_with_biases", draws=3)
    assert list(found.failed["layer"]) == ["1"]
    assert "infinite numbers in '0.weight'" in found.failed["layer"]["1"]
    assert found.failed["unit"] == {}
    values = found["hessian_trace"].values["layer"]
    wanted = of_mlp["hessian_trace"].values["layer"]
    assert values == (wanted[0], None, wanted[2])
    assert found.holds
    assert "Failed: draw 1 by layer: Expected" in str(found)
    assert Audit.from_dict(found.to_dict()) == found
    found.plot()


def test_factors_beyond_all_numbers_are_failed_draws() -> None:
    found = audited("mlp_with_biases", "hessian_trace", spread=1e4)
    assert len(found.failed["unit"]) == 2
    assert found["hessian_trace"].verdicts["unit"] == UNMEASURED
    assert "no draw was measured" in str(found)


def test_a_rescaling_that_changes_the_loss_is_a_failed_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> nn.Module:
        model = apply_rescaling(*args)
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        return model

    monkeypatch.setattr("saltflat.audit.audit.apply_rescaling", wrong)
    found = audited("mlp_with_biases", "hessian_trace")
    assert all("not the same function" in why for why in found.failed["unit"].values())
    assert len(found.failed["unit"]) == 2


def test_progress_is_one_step_per_measurement() -> None:
    seen: list[tuple[str, int, int | None]] = []
    audited("mlp_with_biases", "hessian_trace", progress=lambda *step: seen.append(step))
    assert seen == [("Measuring rescaled networks", done, 5) for done in range(1, 6)]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"draws": 0}, OptionError, "draws=0"),
        ({"draws": 2.5}, OptionError, "draws=2.5"),
        ({"draws": True}, OptionError, "draws=True"),
        ({"spread": 0}, OptionError, "spread=0"),
        ({"spread": NAN}, OptionError, "spread=nan"),
        ({"kinds": "units"}, UnknownNameError, "Try 'unit'"),
        ({"kinds": ()}, OptionError, "no kinds"),
        ({"seed": -1}, OptionError, "seed=-1"),
        ({"measures": ["hessian_tract"]}, UnknownNameError, "Try 'hessian_trace'"),
        ({"progress": "yes"}, OptionError, "progress"),
        ({"model": torch.relu}, ModelError, "Expected a torch.nn.Module"),
        ({"model": nn.Linear(9, 2)}, ModelError, "on this example"),
        ({"data": ()}, SaltflatError, "at least one example"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], error: type[Exception], told: str) -> None:
    case = CHAINS["mlp_with_biases"]()
    with pytest.raises(error, match=told) as raised:
        audit_invariance(**{"model": case.model, "data": case.batches, **options})
    assert all(word in str(raised.value) for word in ("Expected ", ", but got "))


def readings(*values: float | None, **facts: Any) -> list[Reading | None]:
    return [None if value is None else Reading("x", value, **facts) for value in values]


@pytest.mark.parametrize(
    ("old", "new", "logarithmic", "unclaimed", "claimed"),
    [
        (2.0, [2.0, 2.0], False, UNCLAIMED, STAYS),
        (2.0, [2.0, 2.0 + 1e-6], False, UNCLAIMED, STAYS),
        (2.0, [2.0, 2.0 + 5e-6], False, MOVES, BROKEN),
        (2.0, [None, 4.0], False, MOVES, BROKEN),
        (2.0, [None, 2.0], False, UNCLAIMED, STAYS),
        (2.0, [None, None], False, UNMEASURED, UNMEASURED),
        (NAN, [NAN, NAN], False, UNDEFINED, UNDEFINED),
        (NAN, [NAN, 1.0], False, MOVES, BROKEN),
        (2.0, [2.0, NAN], False, MOVES, BROKEN),
        (0.0, [0.0, 0.0], False, UNCLAIMED, STAYS),
        (0.0, [0.0, 1e-9], False, MOVES, BROKEN),
        (-INF, [-INF, -INF], True, UNCLAIMED, STAYS),
        (-INF, [3.0, -INF], True, MOVES, BROKEN),
        (2.0, [-2.0], False, MOVES, BROKEN),
        (1e-3, [1e-3 + 5e-7], True, UNCLAIMED, STAYS),
        (1e-3, [1e-3 + 5e-7], False, MOVES, BROKEN),
        (-50.0, [-50.0 + 1e-3], True, MOVES, BROKEN),
    ],
)
def test_a_verdict_tells_what_moved_from_what_was_claimed(
    old: float, new: list[float | None], logarithmic: bool, unclaimed: str, claimed: str
) -> None:
    before = Reading("x", old)
    assert compute_change(before, readings(*new), False, logarithmic).verdict == unclaimed
    assert compute_change(before, readings(*new), True, logarithmic).verdict == claimed


def test_what_is_within_errors_or_unfinished_breaks_no_claim() -> None:
    before = Reading("x", 2.0, stderr=0.1)
    assert compute_change(before, readings(2.1, stderr=0.1), True, False).verdict == WITHIN
    assert compute_change(before, readings(3.0, stderr=0.1), True, False).verdict == BROKEN
    assert compute_change(before, readings(2.1, stderr=0.1), False, False).verdict == MOVES
    unfinished = compute_change(before, readings(3.0, converged=False), True, False)
    assert unfinished.verdict == WITHIN
    assert not unfinished.converged
    # An estimate without a known error has no such excuse.
    assert compute_change(Reading("x", 2.0), readings(2.1, exact=False), True, False).verdict == BROKEN


def test_changes_of_logarithms_are_differences() -> None:
    change = compute_change(Reading("x", -3.0), readings(-5.0, 4.0), False, True)
    assert (change.smallest, change.largest, change.moved) == (-2.0, 7.0, 7.0)


def by_hand(name: str, old: float, new: list[float | None], claims: tuple[str, ...] = (), **facts: Any) -> AuditLine:
    before, logarithmic = Reading(name, old, **facts), "log" in name
    changes = {
        kind: compute_change(before, readings(*new), f"{kind}_scale" in claims, logarithmic)
        for kind in ("layer", "unit")
    }
    return AuditLine(before, claims, logarithmic, changes)


def audit_by_hand(of: Audit, *lines: AuditLine) -> Audit:
    report = replace(of.report, readings={line.reading.name: line.reading for line in lines}, legend={})
    return replace(of, report=report, lines={line.reading.name: line for line in lines}, draws=2)


BOTH = ("layer_scale", "unit_scale")
HOSTILE = "<script>alert('x')</script> [bold red]loud[/] \x1b[2J $\\frac$"


@pytest.fixture
def everything(of_mlp: Audit) -> Audit:
    """A line of every sort, in no good order."""
    return audit_by_hand(
        of_mlp,
        by_hand("far", 1e-3, [1e9, 1.0]),
        by_hand("near", 1.0, [1.5, None]),
        by_hand("undefined", NAN, [NAN, NAN], notes=("All weights are zero.",)),
        by_hand("log_det", -3.0, [500.0, -900.0]),
        by_hand("kept", 5.0, [5.0, 5.0 * (1 + 1e-12)], BOTH),
        by_hand("still", 5.0, [5.0, 5.0]),
        by_hand("false", 5.0, [7.0, 5.0], BOTH),
        by_hand("flips", 1.0, [-2.0, NAN]),
        by_hand("leaves_zero", 0.0, [1.0, -1.0]),
        by_hand("reaches_zero", 1.0, [0.0, 0.0]),
        by_hand(HOSTILE, 1.0, [2.0, 2.0], notes=(HOSTILE,)),
    )


def test_broken_claims_come_first_then_what_stays_then_what_moves_by_size(everything: Audit) -> None:
    found = sort_measures(everything)
    assert found[:6] == ["false", "kept", "still", "near", HOSTILE, "far"]
    assert found[-1] == "undefined"


def test_the_last_line_says_it_in_a_sentence(everything: Audit, of_mlp: Audit) -> None:
    shown = render_text(everything.__rich__(), 300).splitlines()
    assert shown[-1] == "far moved by a factor of 1e12 while kept stayed where it claims to, within 1e-12."
    assert shown[-2] == "false moved by a factor of 1.4, though it claims to stay."
    assert render_text(of_mlp.__rich__(), 300).splitlines()[-1].startswith("hessian_trace moved by a factor of ")


def test_only_what_broke_a_claim_is_told_as_broken(of_mlp: Audit) -> None:
    before = Reading("false", 1.0, notes=("Inputs 3 and 4 are constant.",))
    changes = {
        "layer": compute_change(before, readings(3.0, 1.0), True, False),
        "unit": compute_change(before, readings(23.0, 1.0), False, False),
    }
    lines = [AuditLine(before, ("layer_scale",), False, changes), by_hand("near", 1.0, [2.0, 1.0])]
    shown = str(audit_by_hand(of_mlp, *lines)).splitlines()
    assert shown[-2:] == ["false moved by a factor of 3, though it claims to stay.", "near moved by a factor of 2."]
    assert "Note on false: Inputs 3 and 4 are constant." in shown


def test_what_stays_is_told_without_what_moves(of_mlp: Audit) -> None:
    kept = [by_hand(name, 5.0, [5.0, 5.0], BOTH) for name in ("one", "two")]
    assert str(audit_by_hand(of_mlp, *kept)).endswith(
        "\nThe 2 measures that claim to stay stayed where they claim to, exactly."
    )
    within = replace(kept[1].changes["unit"], verdict=WITHIN)
    partly = replace(kept[1], changes={**kept[1].changes, "unit": within})
    assert str(audit_by_hand(of_mlp, kept[0], partly)).endswith("\none stayed where it claims to, exactly.")
    assert "| 1 draw by layer (2 scales) |" in str(replace(of_mlp, draws=1))
    assert "1 measure, 1 draw;" in repr(replace(audit_by_hand(of_mlp, kept[0]), draws=1))


@pytest.mark.parametrize(
    ("old", "new", "told"), [(1e160, 1e-160, "1e320"), (1.0, 5e-324, "2e323"), (1e-200, 1e200, "1e400")]
)
def test_factors_beyond_all_numbers_are_told(of_mlp: Audit, old: float, new: float, told: str) -> None:
    found = audit_by_hand(of_mlp, by_hand("far", old, [new, old]))
    assert str(found).endswith(f"far moved by a factor of {told}.")
    found.plot().draw_without_rendering()


def test_what_moved_is_never_told_as_a_factor_of_1(of_mlp: Audit) -> None:
    found = audit_by_hand(of_mlp, by_hand("near", 1.0, [0.97, 1.0003]), by_hand("nearer", 1.0, [1.0, 1.0000042]))
    shown = render_text(found.__rich__(), 200)
    assert "x 0.97 to 1.0003 " in shown
    assert "x 1 to 1.000004 " in shown


def test_80_columns_have_room_for_a_table_of_all_measures(of_mlp: Audit) -> None:
    names = [*MEASURES, "parameterwise_normalized_sharpness2"]
    lines = [by_hand(name, 5.0, [5.0 + 1e-12, 5.0], BOTH, exact=False) for name in names[:10]]
    lines += [by_hand(name, 5.0, [6.0, 1.1e-5], BOTH) for name in names[10:12]]
    lines += [by_hand(name, 5.0, [5.1, 1.1e5]) for name in names[12:]]
    shown = render_text(audit_by_hand(of_mlp, *lines).__rich__(), 80)
    assert "by layer" in shown.splitlines()[4]
    assert "MOVES x 2.2e-6" in shown
    assert "within 2e-13" in shown
    assert "x 1.02 to 2.2e4" in shown


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_broken_claims_are_red_at_every_width(everything: Audit, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(everything)
    assert "\x1b[1;31mMOVES" in capture.get()


@pytest.mark.parametrize("width", [30, 80, 100, 160, 300])
def test_every_width_shows_every_measure_and_nothing_cut(everything: Audit, width: int) -> None:
    text = render_text(everything.__rich__(), width)
    assert all(len(line) <= width for line in text.splitlines())
    squeezed = "".join(text.split())
    assert all(name in squeezed for name in everything if name != HOSTILE)
    assert "…" not in text
    assert "\x1b" not in text
    assert "[boldred]loud" in squeezed


def test_verdicts_are_told_in_words_where_there_is_room(everything: Audit) -> None:
    text = render_text(everything.__rich__(), 300)
    for verdict in (BROKEN, STAYS, MOVES, UNCLAIMED, UNDEFINED):
        assert verdict in text
    assert "Not defined: undefined: All weights are zero." in text


def test_a_notebook_shows_a_table_and_runs_nothing(everything: Audit) -> None:
    page = everything._repr_html_()
    assert BROKEN in page
    assert "<script" not in page
    assert page.count("<tr") == 1 + len(everything)


def test_an_audit_is_a_mapping_of_its_lines(of_mlp: Audit) -> None:
    assert list(of_mlp) == FEW
    assert len(of_mlp) == 3
    assert "kappa" in of_mlp
    assert of_mlp.get("nothing") is None
    assert repr(of_mlp) == "<Audit of Sequential, 89 parameters: 3 measures, 3 draws; print() shows it>"
    assert repr(of_mlp["kappa"]) == "<AuditLine of kappa: layer stays, as claimed; unit moves, as expected>"
    with pytest.raises(UnknownNameError, match="Try 'kappa'"):
        of_mlp["kapa"]


def test_what_is_saved_is_loaded_as_it_was(everything: Audit, of_mlp: Audit, tmp_path: Path) -> None:
    for found in (everything, of_mlp):
        path = found.save(tmp_path / "audit.json")
        assert Audit.load(path) == found
        assert json.loads(path.read_text())["schema"] == "saltflat.audit/1"
        assert json.loads(path.read_text())["holds"] is found.holds
    assert os.listdir(tmp_path) == ["audit.json"]
    assert everything != of_mlp


def test_an_audit_that_cannot_be_written_leaves_the_old_one(
    of_mlp: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.json"
    path.write_text("old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ReportError, match="No space left"):
        of_mlp.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["audit.json"]


def test_files_that_are_no_audit_are_refused(of_mlp: Audit, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    of_mlp.report.save(path)
    with pytest.raises(ReportError, match=r"is not an audit but a report.*Report.load"):
        Audit.load(path)
    of_mlp.save(path)
    with pytest.raises(ReportError, match=r"is not a report but an audit.*Audit.load, or saltflat show"):
        Report.load(path)
    path.write_text(path.read_text().replace("saltflat.audit/1", "saltflat.audit/2"))
    with pytest.raises(ReportError, match=r"Expected 'saltflat.audit/1', but got .* 'saltflat.audit/2'"):
        Audit.load(path)
    path.write_text('{"schema": "saltflat')
    with pytest.raises(ReportError, match=r"Expected an audit written by Audit.save, but got .* broken or cut short"):
        Audit.load(path)
    with pytest.raises(ReportError, match="cannot be read"):
        Audit.load(tmp_path / "nowhere.json")


def test_content_that_was_tampered_with_is_refused(of_mlp: Audit) -> None:
    good = of_mlp.to_dict()
    changes: tuple[dict[str, Any], ...] = (
        {"draws": "3"},
        {"lines": []},
        {"lines": {"unknown": good["lines"]["kappa"]}},
        {"lines": {"kappa": {**good["lines"]["kappa"], "more": 1}}},
        {"report": {}},
        {"holds": False},
        {"extra": 1},
        {"failed": []},
        {"obstacles": None},
    )
    for change in changes:
        with pytest.raises(ReportError, match="cannot be understood"):
            Audit.from_dict({**good, **change})


OBSTACLE = {"operation": "aten.gelu", "where": "2", "line": "", "known": True, "pinned": 3}


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["draws"], 0, "draws is 0"),
        (["draws"], 2, "3 values for 2 draws"),
        (["scales"], {}, "the kinds of scales"),
        (["scales"], {"layer": 2, "units": 11}, "the kinds of scales"),
        (["scales", "unit"], -1, "scales is negative"),
        (["scales", "unit"], 0, r"the changes have the kinds \['layer', 'unit'\]"),
        (["failed", "units"], {}, "failed"),
        (["holds"], False, "holds is False, which the verdicts contradict"),
        (["obstacles"], ["gelu"], "an obstacle"),
        (["obstacles"], [{"operation": "aten.gelu"}], "an obstacle"),
        (["obstacles"], [{**OBSTACLE, "known": 1}], "an obstacle"),
        (["obstacles"], [{**OBSTACLE, "line": None}], "an obstacle"),
        (["lines", "kappa", "claims"], ["everything"], "the claims are"),
        (["lines", "kappa", "claims"], ["unit_scale"], "claimed is True, which the claims contradict"),
        (["lines", "kappa", "logarithmic"], 0, "logarithmic"),
        (["lines", "kappa", "changes"], {}, "the changes have the kinds"),
        (["lines", "kappa", "changes", "unit", "verdict"], "moves", "the verdict 'moves'"),
        (["lines", "kappa", "changes", "unit", "verdict"], ["moves"], "the verdict"),
        (["lines", "kappa", "changes", "unit", "verdict"], STAYS, "contradicts claimed=False"),
        (["lines", "kappa", "changes", "unit", "claimed"], 0, "neither true nor false"),
        (["lines", "kappa", "changes", "unit", "converged"], "yes", "neither true nor false"),
        (["lines", "kappa", "changes", "unit", "values"], [1.0], "1 values for 3 draws"),
        (["lines", "kappa", "changes", "unit", "values"], [1.0, "2", None], "neither a number nor null"),
        (["lines", "kappa", "changes", "unit", "values"], [1.0, True, None], "neither a number nor null"),
        (["lines", "kappa", "changes", "unit", "values"], [10**400, 1, 2], "too large"),
        (["lines", "kappa", "changes", "unit", "moved"], None, "not a number"),
        (["lines", "kappa", "changes", "unit", "smallest"], "1", "not a number"),
        (["lines", "kappa", "changes", "unit", "largest"], [1.0], "not a number"),
    ],
)
def test_what_an_audit_cannot_say_is_refused_when_it_is_read(
    of_mlp: Audit, path: list[str], value: Any, told: str
) -> None:
    given: Any = deepcopy(of_mlp.to_dict())
    part = given
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ReportError, match=rf"cannot be understood \(.*{told}"):
        Audit.from_dict(given)


def test_lines_must_be_those_of_the_report(of_mlp: Audit) -> None:
    given = of_mlp.to_dict()
    lines = {name: line for name, line in given["lines"].items() if name != "kappa"}
    with pytest.raises(ReportError, match="the lines do not match the measures in the report"):
        Audit.from_dict({**given, "lines": lines})


def test_whole_numbers_in_a_file_are_numbers(everything: Audit) -> None:
    given: Any = everything.to_dict()
    given["lines"]["near"]["changes"]["unit"]["smallest"] = 2
    assert Audit.from_dict(given)["near"].changes["unit"].smallest == 2.0


def dots(figure: Any, row: int) -> list[float]:
    """The places of the dots in a row, in powers of ten."""
    (axis,) = figure.axes
    lines = [line for line in axis.lines if line.get_transform() == axis.transData and line.get_linestyle() == "None"]
    return [x for line in lines for x, y in line.get_xydata() if round(y) == row]


def test_the_picture_has_a_dot_for_every_draw_at_its_ratio(of_mlp: Audit) -> None:
    figure = of_mlp.plot()
    figure.draw_without_rendering()
    for row, name in enumerate(sort_measures(of_mlp)):
        line = of_mlp[name]
        wanted = [math.log10(float(v or NAN) / line.reading.value) for kind in line.values.values() for v in kind]
        assert dots(figure, row) == pytest.approx(wanted)
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    assert all(low <= each <= high for row in range(len(of_mlp)) for each in dots(figure, row))
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        "a draw by layer (2 scales)",
        "a draw by unit (11 scales)",
        "claims to stay, and does",
    }


def test_what_no_ratio_tells_is_drawn_without_a_warning(everything: Audit, tmp_path: Path) -> None:
    figure = everything.plot()
    figure.savefig(tmp_path / "audit.png")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label.split(" ")[0] for label in labels[:3]] == ["false", "kept", "still"]
    said = [text.get_text().strip() for text in figure.axes[0].texts]
    assert "not defined" in said
    assert "4 draws undefined or of another sign" in said


@pytest.mark.parametrize("count", [1, 2, 5])
def test_pictures_of_few_measures_show_all_their_words(of_mlp: Audit, count: int) -> None:
    found = audit_by_hand(of_mlp, *(by_hand(f"near_{row}", 1.0, [1.2, 0.9], BOTH) for row in range(count)))
    figure = found.plot()
    figure.draw_without_rendering()
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.5", "1", "2"]
    headers = [text for text in axis.texts if text.get_text() in ("layer", "unit", "claims")]
    words = [*headers, *figure.legends[0].get_texts(), *axis.get_yticklabels()]
    assert len(headers) == 3
    page, title = figure.bbox, figure._suptitle.get_window_extent()  # type: ignore[attr-defined]
    for word in words:
        place = word.get_window_extent()
        assert page.x0 <= place.x0 < place.x1 <= page.x1
        assert page.y0 <= place.y0 < place.y1 <= title.y0


def test_pictures_do_not_touch_pyplot(of_mlp: Audit) -> None:
    import sys

    before = "matplotlib.pyplot" in sys.modules
    of_mlp.plot()
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_change_knows_whether_it_stayed() -> None:
    assert Change(True, (1.0,), 1.0, 1.0, 0.0, STAYS, True).is_unchanged
    assert not Change(True, (2.0,), 2.0, 2.0, 1.0, BROKEN, True).is_unchanged
