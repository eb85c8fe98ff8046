"""Every parameter has a route through the sweep, and those that are not quick have a reason."""

import pytest
from cases import CASES

from saltflat.engine.parameter_routes import ParameterRoute
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.strategy import run_probe


def find_routes(name: str) -> dict[str, ParameterRoute]:
    case = CASES[name]()
    with open_session(case.model, "eval", case.batches):
        problem = Problem.build(case.model, case.batches, case.loss)
        probe = run_probe(problem, next(iter(problem.read_batches())), 1 << 28)
    return {each.name: each for each in probe.routes}


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("attention_by_hand", "layer"),
        ("transformer_layer_with_examples_in_dimension_one", "mapped"),
        ("lstm_in_two_directions", "single"),
    ],
)
def test_every_parameter_has_a_route_and_a_reason_if_it_is_not_quick(name: str, route: str) -> None:
    found = find_routes(name)
    assert set(found) == {name for name, _ in CASES[name]().model.named_parameters()}
    assert {each.route for each in found.values()} == {route}
    assert all(each.is_quick != bool(each.reason) for each in found.values())
