"""The precision of float32 products: torch's settings, old and new, and TF32 as a choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import saltflat
from saltflat import errors
from saltflat.engine import precision as precision_module
from saltflat.engine.context import Context
from saltflat.engine.losses import parse_loss
from saltflat.engine.output_curvature import parse_column_plan
from saltflat.engine.precision import use_full_precision
from saltflat.engine.problem import Problem
from saltflat.engine.session import open_session
from saltflat.engine.statistic import find_statistics
from saltflat.engine.sweep import Sweep
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


@pytest.mark.parametrize("has_new_settings", [True, False])
def test_setting_tf32_the_old_way_between_calls_raises_nothing(
    has_new_settings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_new_settings:  # as before torch 2.9
        monkeypatch.setattr(precision_module, "_has_new_settings", lambda: False)
    model, data, matmul = net(), DATA, torch.backends.cuda.matmul
    wanted = saltflat.measure(model, data, measures="hessian_trace", progress=False)
    meter = saltflat.Meter(model, measures="hessian_trace", progress=False)
    try:
        for allowed in (True, False, True, True, False, False):
            matmul.allow_tf32 = allowed
            for measure in (meter.measure, partial(saltflat.measure, model, measures="hessian_trace", progress=False)):
                assert measure(data)["hessian_trace"].value == wanted["hessian_trace"].value
                assert matmul.allow_tf32 == allowed
                assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
                assert torch.backends.cudnn.allow_tf32
    finally:
        matmul.allow_tf32 = False
        if hasattr(torch._C, "_set_fp32_precision_setter"):
            set_to_default()


class RoundToTF32(TorchDispatchMode):
    """Round the factors of matrix products to 11 bits while TF32 is allowed, as tensor cores do."""

    products = frozenset(["mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.products and torch.backends.cuda.matmul.allow_tf32:
            args = tree_map_only(Tensor, self.round, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def round(value: Tensor) -> Tensor:
        return ((value.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("saltflat.measures.collect.supports_tf32", lambda value: True)
    with RoundToTF32():  # type: ignore[no-untyped-call]
        yield


MEASURES = ["hessian_trace", "normalized_sharpness", "fisher_trace"]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("columns", ["exact", "sampled:4"])
def test_a_report_in_tf32_states_its_error(columns: str) -> None:
    model = net()
    data = torch.randn(50, 4), torch.arange(50) % 3
    measure = partial(saltflat.measure, model, data, measures=MEASURES, columns=columns, progress=False)
    full, fast = measure(), measure(precision="tf32")
    errors = fast.settings["precision_errors"]
    assert fast.settings["precision"] == "tf32"
    assert set(errors) >= {"curvature_trace", "curvature_diagonal", "gradient_norms"}
    assert all(1e-6 < error < 3e-3 for error in errors.values())
    # All examples are one chunk, so that the error on the first chunk is that of the statistic.
    names = ["curvature_diagonal", "gradient_norms"]
    with open_session(model, "eval"):
        problem = Problem.build(model, data, parse_loss("cross_entropy"), None, None, "eval")
        context = Context(problem, parse_column_plan(columns), 0, 1 << 30)
        wanted = find_statistics(names)
        exact, rounded = (
            Sweep(context, wanted, replicate=True, precision=each).run().compute_values() for each in ("ieee", "tf32")
        )
    for name in names:
        off = torch.cat([(rounded[name][key] - value).flatten() for key, value in exact[name].items()]).norm()
        of = torch.cat([value.flatten() for value in exact[name].values()]).norm()
        assert errors[name] == pytest.approx(float(off / of), rel=1e-6)
    for name in MEASURES:
        assert fast[name].value != full[name].value
        assert fast[name].value == pytest.approx(full[name].value, rel=1e-2)
    (note,) = [note for note in fast.notes if "TF32" in note]
    assert f"curvature_trace by {errors['curvature_trace']:.1e}" in note
    assert note not in full.notes
    assert "precision" not in full.settings
    assert any("TF32 keeps three digits" in doubt for doubt in saltflat.compare(full, fast).doubts)


@pytest.mark.usefixtures("tf32")
def test_all_but_the_sweep_is_in_full_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = torch.randn(50, 4), torch.arange(50) % 3
    measure = partial(
        saltflat.measure, model, data, measures=["hessian_trace", "hessian_top_eigenvalue"], progress=False
    )
    full, fast = measure(), measure(precision="tf32")
    assert full["hessian_top_eigenvalue"].value == fast["hessian_top_eigenvalue"].value
    assert full.certificate == fast.certificate
    assert full["hessian_trace"].value != fast["hessian_trace"].value
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("tf32")
def test_coupled_examples_are_noticed_in_tf32() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).train()
    with pytest.raises(errors.ModelError, match="batch"):
        saltflat.measure(model, DATA, mode="keep", precision="tf32", progress=False)


def test_tf32_has_no_effect_on_a_cpu_and_the_report_says_so() -> None:
    measure = partial(saltflat.measure, net(), DATA, measures=MEASURES, progress=False)
    full, fast = measure(), measure(precision="tf32")
    assert {name: fast[name].value for name in fast} == {name: full[name].value for name in full}
    assert [note for note in fast.notes if note not in full.notes] == [
        "precision='tf32' has no effect on this device (cpu): all products were computed in full precision."
    ]
    assert fast.settings == full.settings


@pytest.mark.parametrize("name", ["tf23", None, 3, torch.float32])
def test_an_unknown_precision_is_refused(name: Any) -> None:
    for call in (partial(saltflat.measure, net(), DATA), partial(saltflat.Meter, net())):
        with pytest.raises(errors.UnknownNameError, match=r"Expected one of ieee, tf32, but got the precision"):
            call(precision=name)
