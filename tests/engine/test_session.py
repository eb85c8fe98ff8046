"""The session a call is made from: precision settings, threads, modes and transforms."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saltflat
from saltflat import errors
from saltflat.engine.session import use_full_precision
from saltflat.studies.training.build import use_matmul_precision

DATA = torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])
KEYS = [("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))]

new_style = pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="torch has no fp32_precision settings before 2.9"
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # torch refuses to read old settings that contradict new ones
        return "contradiction"


def settings() -> Any:
    backends = torch.backends
    return (
        [torch._C._get_fp32_precision_getter(*key) for key in KEYS],
        read(torch.get_float32_matmul_precision),
        read(lambda: backends.cudnn.allow_tf32),
        read(lambda: backends.cuda.matmul.allow_tf32),
        backends.cudnn.enabled,
    )


def set_to_default() -> None:
    for key in KEYS:
        torch._C._set_fp32_precision_setter(*key, "none")
    torch.set_float32_matmul_precision("highest")
    torch._C._set_fp32_precision_setter("cuda", "matmul", "none")
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")
    torch.backends.cudnn.allow_tf32 = True


def steps() -> list[Callable[[], Any]]:
    """Everything a user can do to the precision of float32."""
    new = [
        (key, value)
        for key in KEYS
        for value in ("none", "ieee", "tf32", "bf16")
        if (key[0], value) != ("cuda", "bf16")
    ]
    holders = torch.backends.cudnn, torch.backends.cuda.matmul
    return [
        *(partial(torch._C._set_fp32_precision_setter, *key, value) for key, value in new),
        *(partial(torch.set_float32_matmul_precision, value) for value in ("highest", "high", "medium")),
        *(partial(setattr, holder, "allow_tf32", value) for holder in holders for value in (False, True)),
    ]


@new_style
def test_precision_settings_in_any_order_come_back_and_stay_out_of_the_way() -> None:
    dice = random.Random(0)
    try:
        for _ in range(150):
            before, after = (dice.choices(steps(), k=dice.randint(1, 6)) for _ in range(2))
            set_to_default()
            for step in before:
                step()
            shown = settings()
            for context in (use_full_precision(nn.GRU(2, 2)), use_matmul_precision("float32")):
                with context:
                    assert {torch._C._get_fp32_precision_getter(*key) for key in KEYS[1:]} == {"ieee"}
                    assert torch.get_float32_matmul_precision() == "highest"
                    assert not torch.backends.cudnn.allow_tf32
                    assert not torch.backends.cuda.matmul.allow_tf32
                assert settings() == shown
            # What was set behind other settings is as it was, too: it shows when those are taken away.
            for step in after:
                step()
            shown = settings()
            set_to_default()
            for step in [*before, *after]:
                step()
            assert settings() == shown
    finally:
        set_to_default()


@new_style
def test_measuring_is_precise_whatever_is_set_and_raises_nothing() -> None:
    plain = saltflat.compute_statistics(net(), DATA, names="curvature_trace")["curvature_trace"]
    try:
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        torch.backends.mkldnn.set_flags(_fp32_precision="bf16")
        torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16")
        shown = settings()
        found = saltflat.compute_statistics(net(), DATA, names="curvature_trace")["curvature_trace"]
        assert settings() == shown
        saltflat.certify(net(), DATA)
        assert settings() == shown
    finally:
        set_to_default()
    assert all(torch.equal(found[name], value) for name, value in plain.items())


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
