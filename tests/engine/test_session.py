"""The session a call is made from: precision settings, threads, modes and transforms."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saltflat
from saltflat import errors

DATA = torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def test_a_model_built_under_inference_mode_is_measured() -> None:
    wanted = saltflat.compute_statistics(net(), DATA, names="curvature_trace")["curvature_trace"]
    with torch.inference_mode():
        model = net()
    for data in (DATA, tuple(each.clone() for each in DATA)):
        found = saltflat.compute_statistics(model, data, names="curvature_trace")["curvature_trace"]
        torch.testing.assert_close(dict(found), dict(wanted))
    assert saltflat.certify(model, DATA).holds
    assert all(value.is_inference() for value in model.parameters())


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_a_call_inside_of_a_transform_is_refused(transform: Any) -> None:
    model = net()

    def call(scale: Tensor) -> Tensor:
        return saltflat.compute_statistics(model, DATA, names="curvature_trace").loss * scale.sum()

    with pytest.raises(errors.OptionError, match=r"torch\.func.*but got .*Try "):
        transform(call)(torch.ones(2))
    saltflat.compute_statistics(model, DATA, names="curvature_trace")


def test_threads_that_measure_one_model_take_turns() -> None:
    model = net().train()
    data = torch.randn(200, 4), torch.arange(200) % 3
    wanted = saltflat.compute_statistics(model, data, names="curvature_trace", memory="100kB")["curvature_trace"]
    before = {name: id(value) for name, value in model.named_parameters()}
    state, found = torch.get_rng_state(), list[Any]()

    def work() -> None:
        try:
            found.append(
                saltflat.compute_statistics(model, data, names="curvature_trace", memory="100kB")["curvature_trace"]
            )
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.training
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert torch.equal(torch.get_rng_state(), state)
    for each in found:
        torch.testing.assert_close(each, wanted)
