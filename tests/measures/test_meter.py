"""A meter gives the reports of ``saltflat.measure`` to the last digit, prepares once, and notices every change."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from architectures import NETWORKS
from cases import CASES, Case, Net
from torch import Tensor, nn

import saltflat
from saltflat import Meter, Report
from saltflat.engine.model_identity import identify_model
from saltflat.errors import ModelError, NonFiniteError, OptionError, UnknownNameError

MEASURES = ["quick", "minimum_unit_sharpness"]
OF_THE_CALL = {"seconds", "seconds_by_step", "created"}

BUILDERS: dict[str, Callable[[], Case]] = {**CASES, **NETWORKS}
KINDS = (
    "biased_mlp",
    "residual_with_batch_norm",
    "lstm_in_two_directions",
    "transformer_layer_with_examples_in_dimension_one",
    "tied_embedding_and_output",
    "mobilenet_like",
    "linear_called_twice",
    "frozen_parameters",
    "vit_block",
    "dict_batches_and_an_output_object",
    "class_weights_and_label_smoothing",
    "checkpointed_functions",
    "batches_of_one",
    "gradient_inside_of_the_forward_pass",
)
# These read values, have single examples only, or are computed by autograd alone: prepared every time.
ALWAYS_PREPARED = ("checkpointed_functions", "batches_of_one", "gradient_inside_of_the_forward_pass")


def describe(report: Report) -> dict[str, str]:
    return {each.name: repr(getattr(report, each.name)) for each in fields(report) if each.name not in OF_THE_CALL}


def assert_like_a_single_call(meter: Meter, data: Any, **options: Any) -> None:
    found = describe(meter.measure(data))
    alone = describe(saltflat.measure(meter.model, data, meter.loss, progress=False, **options))
    for name in alone:
        assert found[name] == alone[name], name


def step(model: nn.Module) -> None:
    """Change the weights, and the statistics of BatchNorm, as training does."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64).to(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.mul_(1.1)


@pytest.mark.parametrize("kind", KINDS)
def test_reports_are_those_of_single_calls_while_the_model_is_trained(kind: str) -> None:
    case = BUILDERS[kind]()
    meter = Meter(case.model, case.loss, MEASURES, progress=False)
    for _ in range(3):
        assert_like_a_single_call(meter, case.batches, measures=MEASURES)
        step(case.model)
    assert meter.num_preparations == (3 if kind in ALWAYS_PREPARED else 1)


@pytest.mark.parametrize(
    "options",
    [
        {"columns": "sampled:4"},
        {"dtype": torch.float64, "mode": "keep", "seed": 3},
        {"layers": ["0"], "memory": "2MiB", "sampling": False},
        {"logits": "std", "certificate": False},
        {"diagonal": "hutchinson", "limit": 9},
        {"device": "cpu"},
    ],
)
def test_every_option_has_the_effect_it_has_on_a_single_call(options: dict[str, Any]) -> None:
    model, data = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False, **options)
    for _ in range(2):
        assert_like_a_single_call(meter, data, measures=MEASURES, **options)
        step(model)
    assert meter.num_preparations == 1


def test_the_distance_from_the_initial_weights_is_measured_again() -> None:
    model, data = make_problem()
    initial = copy.deepcopy(model.state_dict())
    meter = Meter(model, measures="distance_from_init", initial=initial, progress=False)
    assert meter.measure(data)["distance_from_init"].value == 0
    step(model)
    assert_like_a_single_call(meter, data, measures="distance_from_init", initial=initial)


def make_problem(dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(24, 4, generator=noise).to(dtype), torch.randint(3, (24,), generator=noise)
    return model.to(dtype), data


def test_optimizer_steps_and_new_weights_do_not_make_it_prepare_again() -> None:
    model, (inputs, labels) = make_problem()
    model.insert(1, nn.BatchNorm1d(6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    meter = Meter(model, measures=MEASURES, progress=False)
    for _ in range(3):
        assert_like_a_single_call(meter, (inputs, labels), measures=MEASURES)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert_like_a_single_call(meter, (inputs[:20] + 1, labels[:20]), measures=MEASURES)
    assert meter.num_preparations == 1


def test_later_measurements_run_the_model_less_often() -> None:
    model, data = make_problem()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    meter = Meter(model, measures=MEASURES, progress=False)
    counts = []
    for _ in range(3):
        calls.clear()
        meter.measure(data)
        counts.append(len(calls))
    assert counts[0] > counts[1] == counts[2]


class Switched(nn.Module):
    """Two layers, whose order and scale are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale, self.swapped = 1.0, False
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.two, self.one) if self.swapped else (self.one, self.two)
        found: Tensor = self.head(second(first(x).relu() * self.scale + self.offset).relu())
        return found


def set_parameter(model: Switched, name: str, value: Tensor) -> None:
    setattr(model.one, name, nn.Parameter(value))


def reshape_buffer(model: Switched) -> None:
    model.offset = torch.ones(1, 4)


def widen(model: Switched) -> None:
    model.one, model.two, model.offset = nn.Linear(4, 5), nn.Linear(5, 4), torch.zeros(5)


def tie(model: Switched) -> None:
    model.two.weight = model.one.weight


def replace_forward(model: Switched) -> None:
    layer = model.one
    layer.forward = lambda x: type(layer).forward(layer, x).tanh()  # type: ignore


def rename(model: Switched) -> None:
    model.last = model.head
    del model.head
    model.forward = lambda x: model.last(model.two(model.one(x).relu()).relu())  # type: ignore


CHANGES: dict[str, Callable[[Switched], object]] = {
    "a module is added": lambda model: setattr(model, "one", nn.Sequential(model.one, nn.Tanh())),
    "a module is replaced by one of its kind": lambda model: setattr(model, "one", nn.Linear(4, 4)),
    "a module is replaced by another": lambda model: setattr(model, "two", nn.Identity()),
    "a module without effect is removed": lambda model: delattr(model, "spare"),
    "parameters have other names": rename,
    "a parameter has another shape": widen,
    "a parameter is gone": lambda model: model.one.register_parameter("bias", None),
    "a parameter has other strides": lambda model: set_parameter(model, "weight", torch.randn(4, 4).t()),
    "two parameters are tied": tie,
    "a parameter is frozen": lambda model: model.one.weight.requires_grad_(False),
    "the model is in train mode": lambda model: model.train(),
    "one module is in train mode": lambda model: model.two.train(),
    "there is a forward hook": lambda model: model.two.register_forward_hook(lambda m, x, y: 2 * y),
    "there is a hook before the forward pass": lambda model: model.two.register_forward_pre_hook(
        lambda m, x: (x[0] + 1,)
    ),
    "there is a backward hook": lambda model: model.two.register_full_backward_hook(lambda *_: None),
    "there is a hook before the backward pass": lambda model: model.two.register_full_backward_pre_hook(
        lambda *_: None
    ),
    "a buffer has another shape": reshape_buffer,
    "there is another buffer": lambda model: model.register_buffer("more", torch.zeros(2)),
    "a layer has another forward": replace_forward,
    "layers run in another order": lambda model: setattr(model, "swapped", True),
    "a number in the forward pass is another": lambda model: setattr(model, "scale", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_model_is_noticed(change: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, data = Switched().eval(), make_problem()[1]
        model.spare = nn.ReLU()
        meter = Meter(model, measures=MEASURES, progress=False)
        before = meter.measure(data)
        assert describe(meter.measure(data)) == describe(before)
        assert meter.num_preparations == 1
        CHANGES[change](model)
    assert_like_a_single_call(meter, data, measures=MEASURES)
    assert meter.num_preparations == 2


def test_hooks_are_told_apart_and_a_removed_one_is_noticed() -> None:
    model, data = make_problem()
    handle = model[0].register_forward_hook(lambda m, x, y: 2 * y)
    meter = Meter(model, measures=MEASURES, progress=False)
    assert_like_a_single_call(meter, data, measures=MEASURES)
    handle.remove()
    handle = model[0].register_forward_hook(lambda m, x, y: y + 1)
    assert_like_a_single_call(meter, data, measures=MEASURES)
    handle.remove()
    assert_like_a_single_call(meter, data, measures=MEASURES)
    assert meter.num_preparations == 3


def test_another_forward_of_the_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Switched().eval(), make_problem()[1]
    meter = Meter(model, measures=MEASURES, progress=False)
    meter.measure(data)
    monkeypatch.setattr(Switched, "forward", lambda self, x: self.head(self.one(x).tanh()))
    assert_like_a_single_call(meter, data, measures=MEASURES)
    assert meter.num_preparations == 2


def test_another_precision_is_noticed() -> None:
    model, (inputs, labels) = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False)
    meter.measure((inputs, labels))
    model.double()
    assert_like_a_single_call(meter, (inputs.double(), labels), measures=MEASURES)
    assert meter.num_preparations == 2


def test_another_device_is_noticed() -> None:
    model, _ = make_problem()
    before = identify_model(model)
    assert identify_model(model) == before
    assert identify_model(model.to("meta")) != before


def test_another_loss_is_noticed() -> None:
    model, data = make_problem()
    loss = nn.CrossEntropyLoss()
    meter = Meter(model, loss, MEASURES, progress=False)
    meter.measure(data)
    loss.label_smoothing = 0.2
    assert_like_a_single_call(meter, data, measures=MEASURES)
    meter.loss = "mse"
    assert_like_a_single_call(meter, (data[0], torch.ones(24, 3)), measures=MEASURES)
    assert meter.num_preparations == 3


def test_inputs_of_another_shape_type_or_name_are_noticed() -> None:
    def rule(net: Any, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        given: Any = x if x is not None else 2 * y  # type: ignore[operator]
        found: Tensor = net.head(net.layer(given.to(torch.float64)).relu().sum(1))
        return found

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(rule, layer=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
    labels = make_problem()[1][1]
    inputs = torch.randint(5, (24, 2, 4), generator=torch.Generator().manual_seed(0)).double()
    meter = Meter(model, measures=MEASURES, progress=False)
    for count, given in enumerate(
        [{"x": inputs}, {"x": inputs[:, :1]}, {"x": inputs.float()}, {"x": inputs.long()}, {"y": inputs}], 1
    ):
        for _ in range(2):
            assert_like_a_single_call(meter, [(given, labels)], measures=MEASURES)
            step(model)
        assert meter.num_preparations == count


def test_batches_of_several_kinds_are_prepared_once_each() -> None:
    model, (inputs, labels) = make_problem()
    wide = inputs[:, None].expand(-1, 3, -1).clone()
    pooled = Net(lambda net, x: net.body(x.reshape(len(x), -1, 4)).mean(1), body=model)
    meter = Meter(pooled, measures=MEASURES, progress=False)
    for _ in range(3):
        assert_like_a_single_call(
            meter, [(inputs, labels), (wide, labels), (inputs[:1], labels[:1])], measures=MEASURES
        )
        step(model)
    assert meter.num_preparations == 1


def test_other_tokens_have_rescalings_of_their_own() -> None:
    case = CASES["tied_embedding_and_output"]()
    meter = Meter(case.model, measures=MEASURES, progress=False)
    inputs, labels = torch.tensor([[0, 1, 0], [2, 2, 1], [3, 4, 5]]), torch.tensor([[0, 1, 2], [3, 4, 5], [1, 1, 1]])
    for tokens in (inputs, 5 - inputs, inputs.flip(0)):
        assert_like_a_single_call(meter, (tokens, labels), measures=MEASURES)
    assert meter.num_preparations == 1


def test_more_or_fewer_examples_than_were_compared_are_compared() -> None:
    model, (inputs, labels) = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False)
    for count, preparations in ((2, 1), (24, 2), (24, 2), (4, 3)):
        assert_like_a_single_call(meter, (inputs[:count], labels[:count]), measures=MEASURES)
        assert meter.num_preparations == preparations


def test_an_order_that_only_larger_batches_have_is_noticed() -> None:
    """Outputs do not show it, nor do two examples, and gradients would be those of other examples."""

    def rule(net: Any, x: Tensor) -> Tensor:
        mixed = net.turned and len(x) > 2
        hidden = net.one(x.flip(0) if mixed else x).relu()
        found: Tensor = net.two(hidden.flip(0) if mixed else hidden)
        return found

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, data = Net(rule, one=nn.Linear(4, 5), two=nn.Linear(5, 3)), make_problem()[1]
    model.turned = False  # type: ignore[assignment]
    meter = Meter(model, measures=["fisher_trace", "rho"], progress=False)
    meter.measure(data)
    model.turned = True  # type: ignore[assignment]
    assert_like_a_single_call(meter, data, measures=["fisher_trace", "rho"])
    assert meter.num_preparations == 2


def test_weights_without_any_gradient_are_prepared_again() -> None:
    model, data = make_problem()
    meter = Meter(model, measures=["hessian_trace"], progress=False)
    weights = copy.deepcopy(model.state_dict())
    for number, scale in enumerate((1, 0, 1)):
        model.load_state_dict({name: scale * value for name, value in weights.items()})
        for name, value in model.named_parameters():
            if scale == 0 and name.startswith("4"):
                value.requires_grad_(False)  # the last bias would have a gradient
        assert_like_a_single_call(meter, data, measures=["hessian_trace"])
        assert meter.num_preparations == number + 1


def test_a_hook_that_changes_its_mind_is_refused_as_by_a_single_call() -> None:
    model, data = make_problem(torch.float64)
    factors = [1.0]
    model[2].register_full_backward_hook(
        lambda m, before, after: (before[0] * factors[0],)  # type: ignore[index]
    )
    meter = Meter(model, measures=["hessian_trace"], progress=False)
    assert_like_a_single_call(meter, data, measures=["hessian_trace"])
    factors[0] = 2.0
    with pytest.raises(ModelError) as alone:
        saltflat.measure(model, data, measures=["hessian_trace"], progress=False)
    with pytest.raises(ModelError) as found:
        meter.measure(data)
    assert str(found.value) == str(alone.value)
    factors[0] = 1.0
    assert_like_a_single_call(meter, data, measures=["hessian_trace"])


def test_a_model_that_reads_values_is_prepared_every_time() -> None:
    def rule(net: Any, x: Tensor) -> Tensor:
        found: Tensor = net.two(net.one(x).relu() if bool(net.one.weight.sum() > 0) else net.one(x).tanh())
        return found

    model, data = Net(rule, one=nn.Linear(4, 5), two=nn.Linear(5, 3)), make_problem()[1]
    meter = Meter(model, measures=MEASURES, progress=False)
    for sign in (1.0, -1.0):
        with torch.no_grad():
            model.get_parameter("one.weight").abs_().mul_(sign)
        assert_like_a_single_call(meter, data, measures=MEASURES)
    assert meter.num_preparations == 2


def read_mask(net: Any, x: Tensor) -> Tensor:
    hidden = net.one(x).relu()
    found: Tensor = net.two(hidden if bool((x != 0).all()) else hidden * (x[:, :1] != 0))
    return found


def read_hidden(net: Any, x: Tensor) -> Tensor:
    hidden = net.one(x).relu()
    found: Tensor = net.two(hidden if bool((hidden < 9).all()) else hidden.clamp(max=9))
    return found


def read_what_a_view_wrote(net: Any, x: Tensor) -> Tensor:
    sums = x.new_zeros(2)
    sums[:1].copy_(net.one.weight.sum(0)[:1])
    found: Tensor = net.two(net.one(x).relu() if bool(sums[0] < 99) else net.one(x).tanh())
    return found


@pytest.mark.parametrize(("rule", "times"), [(read_mask, 1), (read_hidden, 2), (read_what_a_view_wrote, 2)])
def test_only_values_that_depend_on_weights_are_a_reason_to_prepare_again(rule: Any, times: int) -> None:
    model, (x, y) = Net(rule, one=nn.Linear(4, 5), two=nn.Linear(5, 3)), make_problem()[1]
    meter = Meter(model, measures=MEASURES, progress=False)
    for _ in range(2):
        assert_like_a_single_call(meter, (x, y), measures=MEASURES)
        step(model)
    assert meter.num_preparations == times
    padded = x.clone()
    padded[1:, 0] = 0.0  # the other way through the first rule
    assert_like_a_single_call(meter, (padded, y), measures=MEASURES)
    padded = x.clone()
    padded[-1, 0] = 0.0  # the same, but not in the first examples
    assert_like_a_single_call(meter, (padded, y), measures=MEASURES)


def rank_examples(net: Any, x: Tensor) -> Tensor:
    hidden = x if bool((x != 0).all()) else x * (x[:, :1] != 0)
    scores = hidden[:, 0]
    rank = (scores[:, None] > scores[None]).sum(1)  # as sorting does, by comparisons
    found: Tensor = net.two(net.one(torch.empty_like(hidden).index_copy(0, rank, hidden)).tanh())[rank]
    return found


def test_more_examples_than_a_pair_are_compared_again() -> None:
    model, (x, y) = Net(rank_examples, one=nn.Linear(4, 5), two=nn.Linear(5, 3)), make_problem()[1]
    x, y = x.repeat(3, 1)[:8] + 0.1, y.repeat(3)[:8]
    x[:, 0] = torch.arange(1.0, 9.0, dtype=x.dtype)
    meter = Meter(model, measures=MEASURES, progress=False)
    assert_like_a_single_call(meter, (x, y), measures=MEASURES)
    x = x.clone()
    x[2:, 0] = x[2:, 0].flip(0)
    assert_like_a_single_call(meter, (x, y), measures=MEASURES)


@pytest.mark.parametrize("kind", ["buffer", "plain tensor", "number"])
def test_numbers_of_the_models_own_that_change_its_rescalings_are_noticed(kind: str) -> None:
    def shift(net: Any, x: Tensor) -> Tensor:
        moved = torch.tensor(net.shift) if kind == "number" else net.shift
        found: Tensor = net.two((net.one(x) + moved).relu())
        return found

    model: Any = Net(shift, one=nn.Linear(4, 5, bias=False), two=nn.Linear(5, 3))
    data = make_problem()[1]
    model.to(data[0].dtype)

    def set_shift(value: float) -> None:
        if kind == "buffer":
            model.register_buffer("shift", torch.tensor(value))
        else:
            model.shift = value if kind == "number" else torch.tensor(value)

    set_shift(2.0)
    measures = ["minimum_unit_sharpness", "minimum_sharpness"]
    meter = Meter(model, measures=measures, progress=False)
    found = []
    for value in (2.0, 0.0, 2.0):
        if kind == "number":
            model.shift = value
        else:
            model.shift.fill_(value)
        assert_like_a_single_call(meter, data, measures=measures)
        found.append(meter.measure(data)["minimum_sharpness"].value)
    assert found[0] == found[2] != found[1]


def test_after_an_error_the_next_report_is_right() -> None:
    model, data = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False)
    meter.measure(data)
    weight = model.get_parameter("0.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        meter.measure(data)
    with torch.no_grad():
        weight.copy_(kept)
    assert_like_a_single_call(meter, data, measures=MEASURES)


def test_neither_data_nor_activations_are_kept() -> None:
    model, _ = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False)

    def count_tensors() -> int:
        gc.collect()
        return sum(1 for each in gc.get_objects() if type(each) is Tensor)

    counts = []
    for _ in range(4):
        inputs, labels = make_problem()[1]
        gone = [weakref.ref(inputs), weakref.ref(labels)]
        meter.measure((inputs, labels))
        del inputs, labels
        counts.append(count_tensors())
        assert [each() for each in gone] == [None, None]
    assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda meter: pickle.loads(pickle.dumps(meter))])
def test_a_copied_or_pickled_meter_prepares_for_its_own_model(copied: Callable[[Meter], Meter]) -> None:
    model, data = make_problem()
    meter = Meter(model, measures=MEASURES, progress=False)
    meter.measure(data)
    other = copied(meter)
    assert other.model is not model
    assert (other.num_preparations, meter.num_preparations) == (0, 1)
    step(other.model)
    assert_like_a_single_call(other, data, measures=MEASURES)
    assert describe(meter.measure(data)) == describe(saltflat.measure(model, data, measures=MEASURES, progress=False))


def test_a_loss_may_use_the_meter_itself() -> None:
    model, data = make_problem()
    inside: list[str] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if not inside:
            inside.append("")
            inside[0] = repr(meter.measure(data)["hessian_trace"])
        return nn.functional.cross_entropy(outputs, targets)

    meter = Meter(model, loss, ["hessian_trace"], progress=False)
    assert repr(meter.measure(data)["hessian_trace"]) == inside[0]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (partial(Meter, measures=["hesian_trace"]), UnknownNameError),
        (partial(Meter, loss="cross"), UnknownNameError),
        (partial(Meter, memory="some"), OptionError),
        (
            partial(Meter, sampling=1),  # type: ignore[arg-type]
            OptionError,
        ),
    ],
)
def test_wrong_options_are_refused_at_once(make: Callable[..., Meter], error: type[Exception]) -> None:
    with pytest.raises(error):
        make(make_problem()[0])


def test_only_a_module_can_be_metered() -> None:
    with pytest.raises(ModelError, match=r"Expected a torch\.nn\.Module, but got a model of type function"):
        Meter(make_problem)  # type: ignore[arg-type]
