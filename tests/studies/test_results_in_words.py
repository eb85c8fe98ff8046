"""What a study prints says which networks missed the stopping rule, and what the scores mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_studies import drawn, made_study

from saltflat.studies import Results


def stop_at(found: Results, loss: float) -> Results:
    return replace(found, study=replace(found.study, stop={"epochs": 5, "loss": loss}))


def test_networks_that_missed_the_stopping_rule_are_named_by_their_setting() -> None:
    found = stop_at(made_study(drawn, status=lambda place: "missed" if place["lr"] == 0.4 else "done"), 0.005)
    assert found.describe_missed() == (
        "Missed the stopping rule: 12 runs; all with lr 0.4 (12); with a training loss of 0.01, where 0.005 was asked "
        "for."
    )
    assert "all with lr 0.4" in " ".join(str(found).split())


def test_networks_that_missed_here_and_there_have_no_setting_in_common() -> None:
    some = stop_at(made_study(drawn, status=lambda place: "missed" if place["seed"] == 0 else "done"), 0.005)
    assert some.describe_missed().startswith("Missed the stopping rule: 12 runs; with a training loss of 0.01")
    every = stop_at(made_study(drawn, status=lambda place: "missed"), 0.02)
    assert every.describe_missed() == "Missed the stopping rule: 36 runs.", "their loss is below the target"
    untold = replace(every, study=replace(every.study, stop={"epochs": 5, "loss": None}))
    assert untold.describe_missed() == "Missed the stopping rule: 36 runs."
    assert made_study(drawn).describe_missed() == ""


def test_scores_begin_with_what_they_say() -> None:
    def hold_gap(place: dict[str, Any]) -> float:
        return float(0.1 + 0.3 * place["lr"] + 0.01 * place["width"] + 0.02 * place["seed"])

    clear = str(made_study(hold_gap, error=hold_gap).scores())
    assert "Larger where the gap is larger: hessian_trace" in clear
    assert clear.index("Larger where") < clear.index("tau-b")
    unclear = str(made_study(lambda place: drawn({**place, "lr": 1.0, "width": 0}), error=hold_gap).scores())
    assert "No measure correlates with the gap: every interval contains zero." in unclear
    assert "No sign of a relation" not in unclear, "the table has it"


def test_an_axis_of_several_settings_is_named_in_full() -> None:
    joint: dict[str, list[Any]] = {"lr, optimizer": [[0.1, "sgd"], [0.2, "adam"], [0.4, "adam"]], "width": [8, 16]}
    text = " ".join(str(made_study(drawn, axes=joint).scores()).split())
    assert "lr stands for lr, optimizer, which vary together." in text
    assert "stands for" not in str(made_study(drawn).scores())
