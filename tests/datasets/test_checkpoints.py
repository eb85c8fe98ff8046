"""Weights from files: what is accepted, what is refused, and that refusing does nothing."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import mlp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

from saltflat.datasets.checkpoints import WeightsError, load_weights, match_weights, put_weights, strip_wrapper_prefixes


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(WeightsError) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert re.fullmatch(r"Expected .+, but got .+\. Try .+\.", message), message
    assert "\n" not in message


def save_torch(tensors: Any, path: Path) -> None:
    torch.save(tensors, path)


def save_old(tensors: Any, path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


FORMATS = [("w.pt", save_torch), ("w.pth", save_old), ("w.bin", save_torch), ("w.safetensors", save_file)]


@pytest.mark.parametrize(("name", "save"), FORMATS)
def test_weights_come_back_as_they_were_saved(name: str, save: Callable[..., None], tmp_path: Path) -> None:
    model = mlp()
    save(model.state_dict(), tmp_path / name)
    found = load_weights(tmp_path / name)
    assert found.notes == ()
    assert_close(dict(found), dict(model.state_dict()), rtol=0, atol=0)
    other = mlp()
    assert not torch.equal(other[1].weight, model[1].weight)  # type: ignore[index]
    put_weights(other, found)
    assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("nest", ["state_dict", "model_state_dict", "model"])
def test_nested_weights_are_found_and_said(nest: str, tmp_path: Path) -> None:
    model = mlp()
    torch.save({nest: model.state_dict(), "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "checkpoint.pt")
    found = load_weights(tmp_path / "checkpoint.pt")
    assert_close(dict(found), dict(model.state_dict()), rtol=0, atol=0)
    assert found.notes == (f"Weights are those under {nest!r} in checkpoint.pt, beside epoch, optimizer.",)


def test_a_layer_called_model_is_no_nest(tmp_path: Path) -> None:
    torch.save({"model": torch.ones(2)}, tmp_path / "w.pt")
    assert list(load_weights(tmp_path / "w.pt")) == ["model"]


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_are_taken_away_and_said(prefix: str, tmp_path: Path) -> None:
    model = mlp()
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "w.pt")
    found = load_weights(tmp_path / "w.pt")
    assert_close(dict(found), dict(model.state_dict()), rtol=0, atol=0)
    (note,) = found.notes
    assert "prefixes" in note


def test_a_layer_called_module_keeps_its_name() -> None:
    names = ["module.weight", "head.weight"]
    assert strip_wrapper_prefixes(names) == {name: name for name in names}
    assert strip_wrapper_prefixes(["my_orig_mod.a", "b._orig_mod.a"]) == {
        "my_orig_mod.a": "my_orig_mod.a",
        "b._orig_mod.a": "b.a",
    }
    # Without the prefix the two would be one.
    clash = ["module.a", "module._orig_mod.a"]
    assert strip_wrapper_prefixes(clash) == {name: name for name in clash}


@pytest.mark.parametrize("wrapped", ["model", "file", "both"])
def test_wrapped_models_and_files_fit_each_other(wrapped: str, tmp_path: Path) -> None:
    model = mlp()
    inside = nn.ModuleDict({"module": mlp()})
    given = {("module." if wrapped != "model" else "") + name: value for name, value in model.state_dict().items()}
    target = mlp() if wrapped == "file" else inside
    torch.save(given, tmp_path / "w.pt")
    put_weights(target, load_weights(tmp_path / "w.pt"))
    for one, two in zip(target.parameters(), model.parameters(), strict=True):
        assert_close(one, two, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_a_tied_weight_may_be_there_once(kept: str) -> None:
    model = Tied()
    put_weights(model, {kept: torch.full((5, 3), 2.0)})
    assert_close(model.embedding.weight.detach(), torch.full((5, 3), 2.0), rtol=0, atol=0)
    assert model.head.weight is model.embedding.weight


def test_one_weight_with_two_values_is_refused() -> None:
    model = Tied()
    both = {"embedding.weight": torch.ones(5, 3), "head.weight": torch.ones(5, 3).double()}
    put_weights(model, both)
    both["head.weight"][2, 1] = 1.5
    refused(lambda: put_weights(model, both), "'embedding.weight'", "one in the model")
    assert_close(model.head.weight.detach(), torch.ones(5, 3), rtol=0, atol=0)


class Wrapper(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.backbone = inside


def numbered(model: nn.Module) -> dict[str, Tensor]:
    """Weights that tell from which name they come."""
    state = model.state_dict()
    return {name: torch.full_like(value, number + 1) for number, (name, value) in enumerate(state.items())}


@pytest.mark.parametrize("prefix", ["net.", "backbone.", "model.", "a.b.", "0.", "module.net."])
def test_a_prefix_of_all_names_is_taken_away_and_said(prefix: str, tmp_path: Path) -> None:
    wanted = numbered(mlp())
    # As Lightning keeps the weights of a module that holds the model.
    torch.save(
        {"state_dict": {prefix + name: value for name, value in wanted.items()}, "epoch": 3}, tmp_path / "w.ckpt"
    )
    model = mlp()
    (note,) = put_weights(model, load_weights(tmp_path / "w.ckpt"))
    assert_close(dict(model.state_dict()), wanted, rtol=0, atol=0)
    assert f"The prefix {prefix.removeprefix('module.')!r}" in note
    assert "removed" in note


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_that_only_the_model_has_is_added_and_said(depth: int) -> None:
    inside, model = mlp(), mlp()
    for _ in range(depth):
        model = Wrapper(model)
    (note,) = put_weights(model, numbered(inside))
    prefix = "backbone." * depth
    wanted = {prefix + name: value for name, value in numbered(inside).items()}
    assert_close(dict(model.state_dict()), wanted, rtol=0, atol=0)
    assert f"All names in the model begin with {prefix!r}" in note
    assert put_weights(model, model.state_dict()) == ()


@pytest.mark.parametrize("wrap", [False, True])
def test_a_prefix_and_a_tied_weight_go_together(wrap: bool) -> None:
    model: nn.Module = Wrapper(Tied()) if wrap else Tied()
    name = "head.weight" if wrap else "net.head.weight"
    (note,) = put_weights(model, {name: torch.full((5, 3), 2.0)})
    assert ("put before" if wrap else "removed") in note
    assert all(bool((value == 2).all()) for value in model.state_dict().values())


def test_two_ways_to_fit_are_none() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model.a = nn.Module()
    model.a.weight = model.weight
    refused(lambda: put_weights(model, {"a.a.weight": torch.ones(2)}), "in 2 ways", "'a.'", "'a.a.'")
    assert not model.weight.any()


def test_a_prefix_does_not_make_weights_of_other_shapes_fit() -> None:
    given = {f"net.{name}": value for name, value in mlp(width=7).state_dict().items()}
    refused(lambda: put_weights(mlp(), given), "'1.weight' is (7, 4) there and (3, 4) in the model")


def test_names_of_which_only_some_have_the_prefix_are_refused() -> None:
    given = {f"net.{name}": value for name, value in mlp().state_dict().items()}
    refused(lambda: put_weights(mlp(), {**given, "criterion.weight": torch.ones(3)}), "'net.'", "'criterion.weight'")
    refused(lambda: put_weights(mlp(), {**given, "1.weight": torch.ones(3, 4)}), "'net.'", "'1.weight'")
    given["1.bias"] = given.pop("net.1.bias")
    refused(lambda: put_weights(mlp(), given), "3 missing", "'net.1.weight'")


def test_lazy_layers_take_the_shape_of_the_file() -> None:
    model = nn.LazyLinear(3)
    put_weights(model, {"weight": torch.ones(3, 7), "bias": torch.zeros(3)})
    assert model.weight.shape == (3, 7)


def test_weights_that_do_not_fit_are_listed_and_leave_the_model_alone() -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {name: torch.zeros_like(value) for name, value in before.items()}
    given["1.wieght"] = given.pop("1.weight")
    given["3.weight"] = torch.zeros(7, 3)
    refused(
        lambda: put_weights(model, given),
        "1 missing: '1.weight' (nearest there: '1.wieght')",
        "1 unexpected: '1.wieght'",
        "1 of another shape: '3.weight' is (7, 3) there and (3, 3) in the model",
    )
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("complex", lambda weight: weight + 1j),
        ("sparse", lambda weight: weight.to_sparse()),
        ("meta", lambda weight: weight.to("meta")),
        ("quantized", lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch gives some of these up
def test_tensors_of_odd_kinds_are_refused_and_leave_the_model_alone(kind: str, change: Callable[..., Tensor]) -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {name: torch.zeros_like(value) for name, value in before.items()}
    given["3.weight"] = change(given["3.weight"])
    refused(lambda: put_weights(model, given), f"'3.weight' is {'on the ' * (kind == 'meta')}{kind}")
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_only_weights_that_change_are_called_rounded() -> None:
    weights = {name: torch.ones_like(value, dtype=torch.float64) for name, value in mlp().state_dict().items()}
    assert put_weights(mlp(), weights) == ()
    weights["1.bias"] /= 3
    assert put_weights(mlp(), weights) == ("Weights of type float64 were rounded to float32, the model's own.",)


@pytest.mark.parametrize("place", [0, 6])
def test_a_damaged_archive_is_refused(place: int, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(mlp().state_dict(), path)
    content = bytearray(path.read_bytes())
    # In the first entry of the table of contents: how it begins (0), and the version it needs (6).
    content[content.index(b"PK\x01\x02") + place] = 0xFF
    path.write_bytes(content)
    refused(lambda: load_weights(path), "w.pt", "saving the weights again")


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    refused(lambda: load_weights(tmp_path / "w.pt"), "no regular file")


def test_long_lists_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    refused(lambda: match_weights(model, {}), "20 missing", "'0.weight'", "and 15 more")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def pickled(found: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(found, protocol=2))


def pickled_newly(found: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("save", [save_torch, save_old, pickled, pickled_newly])
@pytest.mark.parametrize("nested", [False, True])
def test_a_hostile_file_does_nothing(save: Callable[..., None], nested: bool, tmp_path: Path) -> None:
    path, victim = tmp_path / "w.pt", tmp_path / "victim"
    found = {"weight": torch.ones(2), "more": Hostile(victim)} if save in (save_torch, save_old) else Hostile(victim)
    save({"state_dict": found} if nested else found, path)
    refused(lambda: load_weights(path), "w.pt")
    assert not victim.exists()
    # And the file is a real one.
    if save in (save_torch, save_old):
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert victim.exists()


@pytest.mark.parametrize("save", [save_torch, save_old])
def test_a_refusal_says_what_the_file_asked_for(save: Callable[..., None], tmp_path: Path) -> None:
    save(Hostile(tmp_path / "victim"), tmp_path / "w.pt")
    refused(lambda: load_weights(tmp_path / "w.pt"), "mkdir", "nothing of it was run")
    save(mlp(), tmp_path / "w.pt")
    refused(lambda: load_weights(tmp_path / "w.pt"), "Sequential", "state_dict()")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch is about to give scripts up
def test_scripts_are_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "w.pt")
    refused(lambda: load_weights(tmp_path / "w.pt"), "TorchScript", "state_dict()")


@pytest.mark.parametrize(("name", "save"), FORMATS)
def test_a_file_cut_short_is_refused(name: str, save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / name
    save(mlp().state_dict(), path)
    whole = path.read_bytes()
    for length in (1, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(lambda: load_weights(path), name, "saving the weights again")


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_what_is_no_file_of_weights_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    refused(lambda: load_weights(path), "does not exist")
    path.write_bytes(b"")
    refused(lambda: load_weights(path), "it is empty")
    path.write_text("hello, world, this is not a file of weights")
    refused(lambda: load_weights(path), name)
    path.unlink()
    path.mkdir()
    refused(lambda: load_weights(path), "a folder")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.ones(2), ("a Tensor",)),
        ([torch.ones(2)], ("a list",)),
        ({}, ("no tensors",)),
        ({"state_dict": {}}, ("no tensors",)),
        ({"weight": torch.ones(2), "epoch": 3}, ("other things than tensors: epoch",)),
        ({3: torch.ones(2)}, ("other things than tensors: 3",)),
    ],
)
def test_files_of_other_things_are_named(found: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    torch.save(found, tmp_path / "w.pt")
    refused(lambda: load_weights(tmp_path / "w.pt"), *words)


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool])
def test_whole_numbers_in_the_place_of_weights_are_refused(kind: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    given = {name: (50 * value).to(kind) for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=f"'weight' is {str(kind).removeprefix('torch.')} there and float32"):
        put_weights(model, given)
    assert torch.equal(model.weight, before)
    norm = nn.BatchNorm1d(2)  # counts its batches in whole numbers
    assert put_weights(norm, norm.state_dict()) == ()
