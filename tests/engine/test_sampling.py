"""Standard errors over examples: what is left when groups are left out is what the rest of the data gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import saltflat
from saltflat.balance import balance_bipartite, balance_factored
from saltflat.engine.data import read_batches
from saltflat.engine.example_groups import ExampleGroups, iterate_groups
from saltflat.measures.normalized import regularized_normalized_sharpness
from saltflat.measures.registry import MEASURES
from saltflat.measures.report_sweep import Fingerprint
from saltflat.results.jackknife import Jackknife, compute_student_factor

EXAMPLES = 400
# Found by a search, with passes over subsets of a pool, or by a bisection: known otherwise, or not at all. Relative
# flatness takes the deviations of the features as they are; the Hessian has a test of its own.
OTHERWISE = {
    "fisher_determinant",
    "fisher_logdet",
    "fisher_spectral_radius",
    "hessian_top_eigenvalue",
    "pac_bayes_flatness",
    "quotient_sharpness",
    "relative_flatness",
    "sharpness",
}
# Minima over scales, and largest eigenvalues: to first order.
FIRST_ORDER = {
    "normalized_sharpness",
    "normalized_sharpness_arxiv",
    "normalized_sharpness_printed",
    "regularized_normalized_sharpness",
    "minimum_sharpness",
    "minimum_unit_sharpness",
    "kappa",
    "kappa_max",
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def data(examples: int = EXAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(examples, 3, generator=noise).double(), torch.randint(3, (examples,), generator=noise)


@pytest.fixture(scope="module")
def report() -> saltflat.Report:
    return saltflat.measure(network(), data(), measures=list(MEASURES), initial=network(5))


@pytest.fixture(scope="module")
def without() -> list[saltflat.Report]:
    """The same, measured on what is left when each group is left out."""
    inputs, targets = data()
    group = ExampleGroups(EXAMPLES).find_groups(torch.arange(EXAMPLES))
    kept = [group != number for number in range(8)]
    names = [name for name in MEASURES if name not in OTHERWISE]
    return [
        saltflat.measure(network(), (inputs[which], targets[which]), measures=names, initial=network(5), sampling=False)
        for which in kept
    ]


@pytest.mark.parametrize("name", sorted(MEASURES.keys() - OTHERWISE))
def test_leaving_out_a_group_is_measuring_the_rest(
    name: str, report: saltflat.Report, without: list[saltflat.Report]
) -> None:
    reading, rest = report[name], [each[name].value for each in without]
    if name in FIRST_ORDER:
        # The error of a first-order change is of second order.
        moved = [each - reading.value for each in rest]
        off = [abs(ours - truth) for ours, truth in zip(reading.without_group, rest, strict=True)]
        assert max(off) < 0.15 * max(map(abs, moved))
    else:
        assert reading.without_group == pytest.approx(rest, rel=1e-9)
    groups = report.sample["groups"]
    assert reading.sampling_stderr == Jackknife(reading.value, reading.without_group, groups).stderr


def test_relative_flatness_of_normalized_features_has_no_error(report: saltflat.Report) -> None:
    """The deviations of the features depend on the examples, too, and are known of all of them alone."""
    assert report["relative_flatness"].sampling_stderr is None


def test_relative_flatness_without_normalized_features_is_exact_too() -> None:
    inputs, targets = data()
    name = "relative_flatness(normalize=False)"
    kept = ExampleGroups(EXAMPLES).find_groups(torch.arange(EXAMPLES)) != 0
    whole = saltflat.measure(network(), (inputs, targets), measures=name)[name]
    rest = saltflat.measure(network(), (inputs[kept], targets[kept]), measures=name, sampling=False)[name]
    assert whole.without_group[0] == pytest.approx(rest.value, rel=1e-9)


@pytest.mark.parametrize("name", ["hessian_top_eigenvalue", "quotient_sharpness"])
def test_an_eigenvalue_without_a_group_is_taken_along_its_vector(name: str, report: saltflat.Report) -> None:
    inputs, targets = data()
    net = network()
    shapes = {key: each.detach() for key, each in net.named_parameters()}
    sizes = [each.numel() for each in shapes.values()]
    flat = torch.cat([each.flatten() for each in shapes.values()])
    root = torch.cat([torch.full_like(each, float(each.norm())).flatten() for each in shapes.values()])
    root = root if name == "quotient_sharpness" else torch.ones_like(flat)

    def hessian(which: Tensor) -> Tensor:
        def loss(values: Tensor) -> Tensor:
            parts = zip(shapes.items(), values.split(sizes), strict=True)
            weights = {key: part.reshape(each.shape) for (key, each), part in parts}
            outputs = torch.func.functional_call(net, weights, (inputs[which],))
            return nn.functional.cross_entropy(outputs, targets[which])

        found: Tensor = torch.autograd.functional.hessian(loss, flat)
        return root[:, None] * found * root

    group = ExampleGroups(EXAMPLES).find_groups(torch.arange(EXAMPLES))
    values, vectors = torch.linalg.eigh(hessian(group >= 0))
    top = vectors[:, -1]
    assert report[name].value == pytest.approx(float(values[-1]), rel=1e-8)
    rest = [float(top @ hessian(group != number) @ top) for number in range(8)]
    assert report[name].without_group == pytest.approx(rest, rel=1e-6)


def test_a_layer_has_the_error_of_its_part(report: saltflat.Report, without: list[saltflat.Report]) -> None:
    reading = report["hessian_trace"]
    for name, error in reading.layer_sampling_stderr.items():
        rest = [each["hessian_trace"].layers[name] for each in without]
        assert error == pytest.approx(Jackknife(reading.layers[name], rest, report.sample["groups"]).stderr, rel=1e-9)
    assert reading.layer_sampling_stderr.keys() == reading.layers.keys()


def test_what_does_not_depend_on_the_data_has_no_error(report: saltflat.Report) -> None:
    assert all(report[name].sampling_stderr == 0 for name in ("squared_norm", "distance_from_init", "path_norm"))


def test_sampling_changes_no_value(report: saltflat.Report) -> None:
    plain = saltflat.measure(network(), data(), measures=list(MEASURES), initial=network(5), sampling=False)
    assert {name: each.value for name, each in report.items()} == pytest.approx(
        {name: each.value for name, each in plain.items()}, rel=1e-6, nan_ok=True
    )
    assert all(each.sampling_stderr is None for name, each in plain.items() if name not in OTHERWISE)
    assert plain.sample["fingerprint"] == report.sample["fingerprint"]


@pytest.mark.parametrize("columns", ["top:1", "sampled:4"])
def test_random_columns_belong_to_the_examples_in_groups_too(columns: str) -> None:
    options: dict[str, Any] = {"measures": ["hessian_trace", "normalized_sharpness"], "columns": columns}
    one = saltflat.measure(network(), data(), **options)
    two = saltflat.measure(network(), data(), sampling=False, **options)
    for name in one:
        assert one[name].value == pytest.approx(two[name].value, rel=1e-9)
        assert one[name].stderr == pytest.approx(two[name].stderr, rel=1e-6)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("loss", ["weighted", "ignoring", "function"])
def test_groups_follow_the_shares_of_the_loss(loss: str) -> None:
    inputs, targets = data()
    given: dict[str, Any] = {
        "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5]).double()),
        "ignoring": nn.CrossEntropyLoss(ignore_index=2),
        "function": loss_of,
    }
    options: dict[str, Any] = {"loss": given[loss], "measures": ["hessian_trace", "fisher_trace", "rho"]}
    found = saltflat.measure(network(), (inputs, targets), **options)
    group = ExampleGroups(EXAMPLES).find_groups(torch.arange(EXAMPLES))
    rest = saltflat.measure(network(), (inputs[group != 3], targets[group != 3]), sampling=False, **options)
    for name, reading in found.items():
        assert reading.without_group[3] == pytest.approx(rest[name].value, rel=1e-9)


class Stream(IterableDataset[Any]):
    """Data whose length nobody knows before it has been read."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*data(), strict=True)


def test_data_of_unknown_length_has_errors_too() -> None:
    found = saltflat.measure(network(), DataLoader(Stream(), batch_size=7), measures="hessian_trace")
    known = saltflat.measure(network(), data(), measures="hessian_trace")
    reading = found["hessian_trace"]
    assert reading.value == pytest.approx(known["hessian_trace"].value, rel=1e-12)
    assert sum(found.sample["groups"]) == EXAMPLES
    assert 0.3 < (reading.sampling_stderr or 0) / (known["hessian_trace"].sampling_stderr or 1) < 3


@pytest.mark.parametrize("examples", [1, 2, 3, 9])
def test_few_examples_have_an_error_if_there_are_two(examples: int) -> None:
    found = saltflat.measure(network(), data(examples), measures="hessian_trace")["hessian_trace"]
    assert (found.sampling_stderr is None) == (examples == 1)


def test_sums_that_do_not_fit_in_memory_have_no_error() -> None:
    found = saltflat.measure(network(), data(), measures=["rho", "fisher_rao_diagonal"], memory=9500)
    assert found["fisher_rao_diagonal"].sampling_stderr is None
    assert found["rho"].sampling_stderr is not None


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = torch.tensor([1.0, 4.0, 2.0, 7.0])
    rest = [float((values.sum() - each) / 3) for each in values]
    plain = float(values.std() / 2)
    assert Jackknife(float(values.mean()), rest, [1] * 4).stderr == pytest.approx(plain * compute_student_factor(3))


def test_errors_of_means_cover_the_truth() -> None:
    """Heavy tails, as curvature has: 400 samples of 200 log-normal numbers in groups."""
    noise = torch.Generator().manual_seed(0)
    groups = ExampleGroups(200)
    which, covered = groups.find_groups(torch.arange(200)), 0
    sizes = torch.bincount(which).tolist()
    for _ in range(400):
        values = torch.randn(200, generator=noise).exp()
        rest = [float(values[which != g].mean()) for g in range(groups.count)]
        error = Jackknife(float(values.mean()), rest, sizes).stderr
        covered += abs(float(values.mean()) - 1.6487) <= 1.96 * error
    assert 0.9 <= covered / 400 <= 0.98


@pytest.mark.parametrize("size", [1, 7, 400, 401])
def test_groups_hold_every_example_once(size: int) -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=size)
    groups = ExampleGroups(EXAMPLES)
    seen = [(number, batch) for number, batch in iterate_groups(read_batches(loader), groups, 1 << 20)]
    places = torch.cat([batch.example_indices for _, batch in seen])
    assert places.sort().values.tolist() == list(range(EXAMPLES))
    assert len(seen) == groups.count  # one visit each: the batches were joined
    inputs, targets = data()
    for number, batch in seen:
        assert (groups.find_groups(batch.example_indices) == number).all()
        assert torch.equal(batch.args[0], inputs[batch.example_indices])
        assert torch.equal(batch.targets, targets[batch.example_indices])


def test_batches_of_other_shapes_are_not_joined() -> None:
    ragged = [(torch.zeros(4, length, 3), torch.zeros(4, dtype=torch.long)) for length in (2, 2, 5)]
    seen = [batch for _, batch in iterate_groups(read_batches(ragged), ExampleGroups(12), 1 << 20)]
    assert {batch.args[0].shape[1] for batch in seen} == {2, 5}
    assert sum(batch.examples for batch in seen) == 12


def fingerprint(given: Any) -> str:
    found = Fingerprint()
    for batch in read_batches(given):
        found.add(batch)
    return str(found)


def test_a_fingerprint_is_of_the_examples_alone() -> None:
    inputs, targets = data()
    inputs = inputs.float()
    whole = fingerprint((inputs, targets))
    assert fingerprint(DataLoader(TensorDataset(inputs, targets), batch_size=7)) == whole
    assert fingerprint((inputs.double(), targets)) == whole
    assert fingerprint((inputs, targets.int())) == whole
    moved = torch.arange(EXAMPLES).roll(1)
    others = [(inputs[moved], targets[moved]), (inputs[:-1], targets[:-1]), (inputs, targets.roll(1))]
    others += [(inputs + 1e-6, targets), (inputs[:, [1, 0, 2]], targets)]
    assert len({whole, *map(fingerprint, others)}) == 6


def slope_by_difference(value: Any, at: Tensor, place: tuple[int, ...]) -> float:
    step = torch.zeros_like(at)
    step[place] = 1e-5 * at[place]
    return float(value(at + step) - value(at - step)) / float(2 * step[place])


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 4)])
@pytest.mark.parametrize("solve", [balance_bipartite, balance_factored])
def test_slopes_of_balanced_matrices_are_derivatives(solve: Any, shape: tuple[int, ...]) -> None:
    noise = torch.Generator().manual_seed(0)
    F, U = (torch.rand(shape, generator=noise, dtype=torch.float64) + 0.1 for _ in range(2))
    slopes = solve(F, U).slopes
    for place in [tuple(0 for _ in shape), tuple(size - 1 for size in shape)]:
        assert float(slopes[place]) == pytest.approx(
            slope_by_difference(lambda at: solve(at, U).value, F, place), rel=1e-5
        )


def test_slopes_of_the_regularized_form_are_derivatives() -> None:
    H, weight = torch.tensor([0.5, 3.0]).double(), torch.tensor([1.0, 0.2]).double()
    found = regularized_normalized_sharpness(weight, H)
    for place in (0, 1):
        truth = slope_by_difference(lambda at: regularized_normalized_sharpness(weight, at).value, H, (place,))
        assert float(found.slopes["curvature_diagonal"][place]) == pytest.approx(truth, rel=1e-5)


def test_a_mean_that_rests_on_few_examples_says_so() -> None:
    inputs, targets = data()
    inputs[7] *= 100
    found = saltflat.measure(network(), (inputs, targets), measures=["fisher_trace", "hessian_trace"])
    assert any("4 of 400 examples account for" in note for note in found["fisher_trace"].notes)
    assert found["hessian_trace"].notes == ()
    assert saltflat.measure(network(), data(), measures="fisher_trace")["fisher_trace"].notes == ()


def test_a_report_says_how_well_the_network_does_and_whether_it_is_at_a_minimum() -> None:
    inputs, targets = data()
    net = network()
    found = saltflat.measure(net, (inputs, targets), measures="rho")
    outputs = net(inputs)
    assert found.accuracy == float((outputs.argmax(1) == targets).double().mean())
    gradient = torch.autograd.grad(nn.functional.cross_entropy(outputs, targets), list(net.parameters()))
    squared = sum(float(each.square().sum()) for each in gradient)
    assert found.gradient_norm == pytest.approx(squared**0.5)
    single = saltflat.measure(net, (inputs, targets), measures="fisher_trace")["fisher_trace"].value
    assert found.gradient_agreement == pytest.approx(squared / single)
    assert saltflat.measure(net, (inputs, inputs), "mse", measures="rho").accuracy is None


def test_a_log_determinant_with_eigenvalues_at_the_floor_is_not_judged() -> None:
    inputs, targets = data(150)
    inputs[1], targets[1] = inputs[0], targets[0]  # the same gradient twice: the determinant is zero
    options: dict[str, Any] = {"measures": ["fisher_logdet(subset=20)"]}
    one, two = (saltflat.measure(network(seed), (inputs, targets), **options) for seed in (0, 1))
    (name,) = one
    assert one[name].details["floored_eigenvalues"] > 0
    assert one[name].stderr is one[name].sampling_stderr is None
    assert saltflat.compare(one, two)[name].verdicts == {"2": "not judged"}
    whole = saltflat.measure(network(), data(150), measures="fisher_logdet(subset=5)")["fisher_logdet(subset=5)"]
    assert whole.stderr is not None
    assert whole.sampling_stderr is not None


class Shared(nn.Module):
    """With an input that belongs to all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mixing: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.tanh(x @ mixing))
        return found


@pytest.mark.parametrize("examples", [5, 17, 20, 24])
def test_an_input_of_all_examples_is_not_cut_into_groups(examples: int) -> None:
    torch.manual_seed(0)
    net, inputs = Shared().double(), (torch.randn(examples, 3).double(), torch.randn(3, 4).double())
    given = inputs, torch.arange(examples) % 3
    one = saltflat.measure(net, given, measures="hessian_trace")["hessian_trace"]
    two = saltflat.measure(net, given, measures="hessian_trace", sampling=False)["hessian_trace"]
    assert one.value == pytest.approx(two.value, rel=1e-12)
    assert one.sampling_stderr is not None


def test_groups_of_ignored_examples_leave_the_others_their_errors() -> None:
    inputs, targets = data(8)
    targets[3] = -100
    found = saltflat.measure(network(), (inputs, targets), measures=["hessian_top_eigenvalue", "adaptive_sharpness"])
    assert all(reading.sampling_stderr is not None for reading in found.values())


def test_data_longer_than_it_said_has_one_split_whatever_the_memory() -> None:
    inputs, targets = data(200)
    loader = DataLoader(TensorDataset(inputs, targets), sampler=[*range(200), 0], batch_size=5)
    few, many = (saltflat.measure(network(), loader, measures="hessian_trace", memory=m) for m in ("16kB", "1GiB"))
    assert few["hessian_trace"].without_group == pytest.approx(many["hessian_trace"].without_group, rel=1e-9)
    assert sum(few.sample["groups"]) == 201


def test_reports_of_other_splits_are_no_pairs() -> None:
    class Three(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(*data(3), strict=True)

    known = saltflat.measure(network(), data(3), measures="hessian_trace")
    unknown = saltflat.measure(network(), DataLoader(Three(), batch_size=3), measures="hessian_trace")
    assert known.sample["fingerprint"] == unknown.sample["fingerprint"]
    assert not saltflat.compare(known, unknown).paired


def test_examples_of_few_classes_are_no_random_sample() -> None:
    inputs, targets = data()
    order = targets.argsort()
    few = saltflat.measure(network(), (inputs[order], targets[order]), measures="rho", limit=50)
    assert any("Only 1 of the 3 classes are among these 50 examples" in note for note in few.notes)
    assert not any("are among these" in note for note in saltflat.measure(network(), data(), measures="rho").notes)
