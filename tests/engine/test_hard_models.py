"""Models that write where they should not, mix their examples, or look simpler in the first batch than they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single_examples import NAMES, check_with_single_examples, labels, random
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import saltflat
from saltflat import errors


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    shared, norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
    net = nn.Sequential(shared, norm, nn.ReLU(), shared, norm, nn.Linear(6, 3))
    before = {id(p) for p in net.parameters()} | {id(b) for b in net.buffers()}
    data = random(7, 6).float(), labels(7)
    saltflat.compute_statistics(net, data, names=NAMES)
    saltflat.certify(net, data)
    with pytest.raises(errors.LabelError):
        saltflat.compute_statistics(net, (data[0], data[1] + 5), names=NAMES)
    assert {id(p) for p in net.parameters()} | {id(b) for b in net.buffers()} == before
    assert all(isinstance(p, nn.Parameter) and p.dtype == torch.float32 for p in net.parameters())
    check_with_single_examples(net.double(), [(random(7, 6), labels(7))])


class Cached(nn.Module):
    """Makes a table on its first call, keeps its last activation, counts its calls, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.ones(6))
        self.table: Tensor | None = None
        self.seen: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.linspace(0, 1, 6).to(self.shift) * self.shift.detach()
            self.register_buffer("late", torch.ones(1))
        x -= 0.5
        self.seen = self.first(x) * self.table + self.shift
        out: Tensor = self.last(self.seen)
        return out


def test_what_a_forward_pass_leaves_behind_is_gone() -> None:
    net, x = Cached(), random(7, 6).float()
    kept = x.clone()
    for dtype in (None, torch.float64):
        saltflat.compute_statistics(net, (x, labels(7)), names=NAMES, dtype=dtype)
    saltflat.certify(net, (x, labels(7)))
    assert (net.table, net.seen, net.calls) == (None, None, 0)
    assert "late" not in dict(net.named_buffers())
    assert torch.equal(x, kept)


def test_the_generator_of_a_loader_is_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(TensorDataset(random(7, 6), labels(7)), 3, shuffle=True, generator=generator)
    before = generator.get_state()
    saltflat.compute_statistics(nn.Linear(6, 3).double(), loader, names="curvature_trace")
    assert torch.equal(generator.get_state(), before)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, two = self.encode(torch.cat([a, b])).chunk(2)
        out: Tensor = self.head(F.relu(one - two))
        return out


def test_first_examples_without_a_gradient_decide_nothing() -> None:
    torch.manual_seed(0)
    a, b = random(7, 6, seed=1), random(7, 6, seed=2)
    b[:2] = a[:2]
    check_with_single_examples(Siamese().double(), [((a, b), labels(7))])


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        examples, time, width = x.shape
        rows = self.inner(x.transpose(0, 1).reshape(time * examples, width))
        out: Tensor = self.head(rows.view(time, examples, 5).tanh().mean(0))
        return out


def test_later_batches_of_another_length_are_looked_at_again() -> None:
    torch.manual_seed(0)
    batches = [(random(3, 1, 6), labels(3)), (random(4, 4, 6, seed=3), labels(4))]
    check_with_single_examples(SequenceFirst().double(), batches)


def test_an_input_overwritten_after_its_layer_is_refused_as_in_training() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.a(x)
            hidden.add_(self.b(hidden))
            return hidden

    with pytest.raises(errors.ModelError, match="in place"):
        saltflat.compute_statistics(Overwrites(), (random(4, 6).float(), labels(4)), names="curvature_trace")


def test_pruned_layers_and_subclasses_with_more_parameters_are_measured() -> None:
    torch.manual_seed(0)

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.log_scale = nn.Parameter(torch.zeros(()))

    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Scaled()).double()
    prune.l1_unstructured(net[0], "weight", amount=0.3)
    found = check_with_single_examples(net, [(random(7, 6), labels(7))])
    diagonal = found["curvature_diagonal"]
    mask = dict(net[0].named_buffers())["weight_mask"]
    assert bool((diagonal["0.weight_orig"][mask == 0] == 0).all())
    assert float(diagonal["2.log_scale"]) == 0


def test_torchs_loss_module_has_its_classes_at_the_second_place() -> None:
    net = nn.Unflatten(1, (3, 3))
    model = nn.Sequential(nn.Linear(6, 9), net).double()
    x, y = random(4, 6), torch.arange(12).reshape(4, 3) % 3
    outputs = model(x).detach()
    second = saltflat.compute_statistics(model, (x, y), names="curvature_trace", loss=nn.CrossEntropyLoss())
    assert second.loss == pytest.approx(float(F.cross_entropy(outputs, y)))
    last = saltflat.compute_statistics(model, (x, y), names="curvature_trace", loss="cross_entropy")
    assert last.loss == pytest.approx(float(F.cross_entropy(outputs.mT, y)))


def test_inputs_of_several_tensors_are_one_batch() -> None:
    torch.manual_seed(0)
    net, a, b = Siamese().double(), random(5, 6, seed=1), random(5, 6, seed=2)
    listed = saltflat.compute_statistics(net, [((a, b), labels(5))], names="curvature_trace")
    plain = saltflat.compute_statistics(net, ((a, b), labels(5)), names="curvature_trace")
    torch.testing.assert_close(dict(plain["curvature_trace"]), dict(listed["curvature_trace"]))


def test_certificates_do_not_vouch_for_nothing() -> None:
    net, x = nn.Linear(6, 3), random(7, 6).float()
    with pytest.raises(errors.EmptyDataError):
        saltflat.certify(net, (x, torch.full((7,), -100)))
    assert saltflat.certify(net, [(x[:1], labels(1)), (x[1:], labels(6))], examples=5).examples == 5


def test_squares_that_overflow_are_named() -> None:
    with pytest.raises(errors.NonFiniteError, match="float64"):
        saltflat.compute_statistics(
            nn.Linear(6, 3), (random(4, 6).float() * 1e25, torch.zeros(4, 3)), names="curvature_trace", loss="mse"
        )


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.jit.script], ids=["parallel", "script"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_wrappers_are_refused_with_what_to_pass_instead(wrap: Any) -> None:
    with pytest.raises(errors.ModelError, match="Try passing"):
        saltflat.compute_statistics(wrap(nn.Linear(6, 3)), (random(4, 6).float(), labels(4)), names="curvature_trace")


def test_checkpoints_of_the_older_kind_are_measured_and_left_as_they_were() -> None:
    class Net(nn.Module):
        def __init__(self, reentrant: bool | None) -> None:
            super().__init__()
            self.first, self.last, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 3), reentrant

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.first(x).tanh()
            if self.reentrant is None:
                return self.last(hidden)  # type: ignore[no-any-return]
            return checkpoint.checkpoint(self.last, hidden, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    kept = checkpoint.CheckpointFunction, checkpoint._checkpoint_hook
    found = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        net = Net(reentrant).double()
        found.append(check_with_single_examples(net, [(random(7, 6), labels(7))]))
    for other in found[1:]:
        for name in NAMES:
            torch.testing.assert_close(dict(other[name]), dict(found[0][name]), rtol=1e-12, atol=0)
    assert (checkpoint.CheckpointFunction, checkpoint._checkpoint_hook) == kept


class Encoder(nn.Module):
    """Leaves a mask aside where nothing is masked, as libraries of transformers do; examples are at the second axis."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.layer = nn.TransformerEncoderLayer(4, 2, 5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = None if self.looks and mask.all() else ~mask
        out: Tensor = self.head(self.layer(x.transpose(0, 1), src_key_padding_mask=hidden).mean(0))
        return out


@pytest.mark.parametrize(("padded", "way"), [((), "mapped"), ((0, 1, 2, 3), "mapped"), ((1, 2), "single")])
def test_examples_that_agree_on_what_their_masks_decide_are_mapped(padded: tuple[int, ...], way: str) -> None:
    torch.manual_seed(0)
    looks, plain = Encoder(looks=True).double(), Encoder(looks=False).double()
    plain.load_state_dict(looks.state_dict())
    mask = torch.ones(4, 5).bool()
    mask[list(padded), 3:] = False
    data = [((torch.randn(4, 5, 4).double(), mask), torch.tensor([0, 1, 2, 0]))]
    measures = ["hessian_trace", "fisher_frobenius"]
    found, wanted = (saltflat.measure(each, data, measures=measures, certificate=False) for each in (looks, plain))
    assert found.settings["strategy"] == way
    for name in measures:
        assert found[name].value == pytest.approx(wanted[name].value, rel=1e-9)


class Force(nn.Module):
    """Gives the gradient of an energy, and cuts the graph only where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy, self.last = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.first(x)
            h = h if h.requires_grad else h.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(h).tanh().square().sum(), h, create_graph=True)
        out: Tensor = self.last(force)
        return out


def test_a_layer_that_forward_derivatives_do_not_reach_is_measured() -> None:
    torch.manual_seed(0)
    check_with_single_examples(Force().double(), [(random(7, 6), labels(7))], layers=["first"])


def test_group_norm_of_channels_last_does_not_end_the_process() -> None:
    """Torch's backward pass does, on a CPU, where nothing before it has a gradient."""

    class Net(nn.Module):
        def __init__(self, layout: torch.memory_format) -> None:
            super().__init__()
            self.conv, self.norm, self.head, self.layout = (
                nn.Conv2d(2, 4, 2),
                nn.GroupNorm(2, 4),
                nn.Linear(16, 3),
                layout,
            )

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.conv(x).contiguous(memory_format=self.layout)
            out: Tensor = self.head(self.norm(hidden).tanh().flatten(1))
            return out

    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        data = [(random(7, 2, 3, 3), labels(7))]
        found.append(check_with_single_examples(Net(layout).double(), data, layers=["norm"])["curvature_diagonal"])
    torch.testing.assert_close(dict(found[1]), dict(found[0]), rtol=1e-12, atol=0)


class Clipped(nn.Module):
    """Couples examples only where one of them is large."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(6, 6), nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if self.kind == "clip":
            h = h / h.abs().max().clamp(min=1)
        elif self.kind == "branch" and x.abs().max() > 1:
            h = h / h.abs().max()
        elif self.kind == "long" and len(x) > 6:
            h = h - h.mean(0)
        elif self.kind == "fours" and len(x) % 4 == 0:
            h = h + h.std(0)
        result: Tensor = self.last(h)
        return result


@pytest.mark.parametrize("kind", ["clip", "branch", "long", "fours"])
@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("call", [saltflat.measure, saltflat.compute_spectrum])
def test_coupling_that_the_first_examples_do_not_show_is_refused(call: Any, kind: str, batches: int) -> None:
    torch.manual_seed(0)
    x, y = 3 * random(320, 6), labels(320)  # enough for groups of more than six
    x[:6] *= 0.02
    data = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
    options = {"measures": "hessian_trace"} if call is saltflat.measure else {"k": 2, "density": False}
    with pytest.raises(errors.CoupledExamplesError):
        call(Clipped(kind).double(), data, **options)
    assert call(Clipped("none").double(), data, **options)


class Rounding(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Rectified(torch.autograd.Function):
    """A backward pass of one's own that is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = g * (x > 0)
        return slope


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.function(self.first(x)))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_a_backward_pass_that_is_not_the_derivative_is_said(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    data = random(20, 6, seed=seed).to(dtype), labels(20)
    other = saltflat.measure(Applied(Rounding.apply).to(dtype), data, measures="hessian_trace")
    assert any("straight-through" in note for note in other.notes)
    right = Applied(Rectified.apply).to(dtype)
    plain = Applied(torch.relu).to(dtype)
    plain.load_state_dict(right.state_dict())
    found, wanted = (saltflat.measure(net, data, measures="hessian_trace") for net in (right, plain))
    assert found.notes == wanted.notes
    assert found["hessian_trace"].value == pytest.approx(wanted["hessian_trace"].value, rel=1e-5)
