"""Data sets by name, files of arrays, functions of the user's; and files that are not what they say."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import pair
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset, TensorDataset

from saltflat.cli.inputs import move_data
from saltflat.datasets import READERS, cifar, find_reader, mnist, read_data
from saltflat.datasets.arrays import read_verified_bytes
from saltflat.engine.read_data import DeviceBatches
from saltflat.errors import DataError, EmptyDataError, OptionError, SaltflatError, UnknownNameError
from saltflat.studies.data import DataSource

DATA = Path(os.environ.get("SALTFLAT_DATA", "data"))

real_mnist = pytest.mark.skipif(not (DATA / "MNIST").is_dir(), reason="MNIST is not in the folder SALTFLAT_DATA")
real_cifar10 = pytest.mark.skipif(
    not (DATA / "cifar-10-batches-py").is_dir(), reason="CIFAR-10 is not in the folder SALTFLAT_DATA"
)
real_cifar100 = pytest.mark.skipif(
    not (DATA / "cifar-100-python").is_dir(), reason="CIFAR-100 is not in the folder SALTFLAT_DATA"
)


def refused(kind: type[SaltflatError], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert re.fullmatch(r"Expected .+, but got .+\. Try .+\.", message), message


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
LABELS = np.array([7, 0, 9], dtype=np.uint8)
ROWS = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)


def write_idx(folder: Path, *, zipped: bool = False) -> dict[str, str]:
    """Small files under the names of MNIST's; their md5."""
    folder.mkdir(parents=True)
    checksums = {}
    for stem in ("train", "t10k"):
        for kind, array in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
            content = gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array)
            name = f"{stem}-{kind}-ubyte" + ".gz" * zipped
            (folder / name).write_bytes(content)
            checksums[name] = hashlib.md5(content).hexdigest()
    return checksums


def moments(name: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel over the training set, from how often each value occurs."""
    inputs, _ = find_reader(name).read(DATA, "train")
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in inputs.unbind(1)]).double()
    values = torch.arange(256).double() / find_reader(name).top
    mean = counts @ values / counts.sum(1)
    variance = counts @ values**2 / counts.sum(1) - mean**2
    return mean.tolist(), variance.sqrt().tolist()


@pytest.mark.parametrize(
    ("name", "train", "shape", "classes", "first"),
    [
        pytest.param("mnist", 60000, (1, 28, 28), 10, [5, 0, 4, 1, 9], marks=real_mnist),
        pytest.param("cifar10", 50000, (3, 32, 32), 10, [6, 9, 9, 4, 1], marks=real_cifar10),
        pytest.param("cifar100", 50000, (3, 32, 32), 100, [19, 29, 0, 11, 1], marks=real_cifar100),
    ],
)
def test_the_published_data_is_read_whole(
    name: str, train: int, shape: tuple[int, ...], classes: int, first: list[int]
) -> None:
    for split, count in (("train", train), ("test", 10000)):
        stored, labels = find_reader(name).read(DATA, split)
        assert stored.shape == (count, *shape)
        assert (int(stored.min()), int(stored.max())) == (0, 255)
        assert labels.dtype == torch.int64
        assert_close(read_data(name, DATA, split, skip=count - 9), (stored[-9:] / 255, labels[-9:]), rtol=0, atol=0)
        # Every class equally often, but for MNIST's.
        counts = labels.bincount()
        assert len(counts) == classes
        assert name == "mnist" or set(counts.tolist()) == {count // classes}
        if split == "train":
            assert labels[:5].tolist() == first


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        pytest.param("mnist", marks=real_mnist),
        pytest.param("cifar10", marks=real_cifar10),
        pytest.param("cifar100", marks=real_cifar100),
    ],
)
def test_mean_and_deviation_are_those_of_the_training_set(name: str) -> None:
    mean, std = moments(name)
    # To the digits they are given with.
    assert mean == pytest.approx(find_reader(name).mean, abs=5e-5)
    assert std == pytest.approx(find_reader(name).std, abs=5e-5)


@real_mnist
def test_a_picture_of_mnist_is_the_right_way_up() -> None:
    # The first test image is a 7: a bar above, a stroke that ends below left of the middle.
    image = read_data("mnist", DATA, "test", limit=1)[0][0, 0]
    assert float(image[8, 6:21].mean()) > 0.5
    assert float(image[25, 10:14].mean()) > 0.5
    assert float(image[18:26, 18:].max()) == 0.0


def test_digits_are_split_and_scaled() -> None:
    inputs, labels = read_data("digits")
    test, more = read_data("digits", split="test")
    assert inputs.shape == (1200, 1, 8, 8)
    assert test.shape == (597, 1, 8, 8)
    assert len(labels) + len(more) == 1797
    assert labels[:10].tolist() == list(range(10))
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    # The first digit's first row, of sixteenths.
    assert (inputs[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_skip_and_limit_take_a_part() -> None:
    inputs, labels = read_data("digits")
    part = read_data("digits", skip=10, limit=5)
    assert_close(part, (inputs[10:15], labels[10:15]), rtol=0, atol=0)
    assert len(read_data("digits", skip=1195, limit=100)[0]) == 5


def test_normalizations_do_what_they_say() -> None:
    inputs = read_data("digits")[0]
    assert_close(read_data("digits", normalize="half")[0], 2 * inputs - 1)
    standard = read_data("digits", normalize="standard")[0]
    assert float(standard.mean()) == pytest.approx(0, abs=1e-3)
    assert float(standard.std()) == pytest.approx(1, abs=1e-3)


def test_channels_are_standardized_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar-100-python" / "test"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({b"data": ROWS, b"fine_labels": [3, 99]}, protocol=3))
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setitem(cifar.CIFAR100_FILES, "test", [("cifar-100-python/test", md5)])
    inputs, labels = read_data("cifar100", tmp_path, "test", normalize="standard")
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (find_reader("cifar100").mean, find_reader("cifar100").std)
    )
    assert_close(inputs, (torch.from_numpy(ROWS.copy()).reshape(2, 3, 32, 32) / 255 - mean) / std)
    assert labels.tolist() == [3, 99]


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (UnknownNameError, ("mnst", "Try 'mnist'"), {"source": "mnst"}),
        (UnknownNameError, ("split", "'train'"), {"source": "digits", "split": "trian"}),
        (UnknownNameError, ("'standard'",), {"source": "digits", "normalize": "standart"}),
        (OptionError, ("limit=0",), {"source": "digits", "limit": 0}),
        (OptionError, ("skip=-1",), {"source": "digits", "skip": -1}),
        (EmptyDataError, ("1200 examples",), {"source": "digits", "skip": 1200}),
        (OptionError, ("split='test'",), {"source": "factories:pair", "split": "test"}),
        (OptionError, ("normalize='half'",), {"source": "factories:pair", "normalize": "half"}),
        (EmptyDataError, ("6 examples",), {"source": "factories:pair", "skip": 6}),
        (UnknownNameError, ("'loadre'", "Try 'loader'"), {"source": "factories:loadre"}),
        (OptionError, ("no module 'nowhere'",), {"source": "nowhere.at_all:data"}),
        (DataError, ("MNIST/raw/train-images-idx3-ubyte",), {"source": "mnist", "folder": "nowhere"}),
        (DataError, ("cifar-10-batches-py/data_batch_1",), {"source": "cifar10", "folder": "nowhere"}),
        (DataError, ("nowhere.npz",), {"source": "nowhere.npz"}),
        (DataError, ("nowhere.safetensors",), {"source": "nowhere.safetensors"}),
    ],
)
def test_bad_requests_are_named(kind: type[SaltflatError], words: tuple[str, ...], options: dict[str, Any]) -> None:
    refused(kind, lambda: read_data(**options), *words)


def test_without_scikit_learn_digits_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(DataError, lambda: read_data("digits"), "Expected scikit-learn", "Try pip install scikit-learn.")


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "constant", "dataset"),
    [("mnist", "MNIST_CHECKSUMS", "MNIST"), ("fashion-mnist", "FASHION_CHECKSUMS", "FashionMNIST")],
)
def test_idx_files_are_read_packed_or_not(
    name: str, constant: str, dataset: str, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = write_idx(tmp_path / dataset / "raw", zipped=zipped)
    monkeypatch.setattr(mnist, constant, {**getattr(mnist, constant), **checksums})
    for split in ("train", "test"):
        inputs, labels = read_data(name, tmp_path, split)
        assert_close(inputs, torch.from_numpy(IMAGES.copy())[:, None] / 255)
        assert labels.tolist() == LABELS.tolist()


def test_without_a_folder_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = write_idx(tmp_path / "set" / "MNIST" / "raw")
    monkeypatch.setattr(mnist, "MNIST_CHECKSUMS", checksums)
    monkeypatch.setenv("SALTFLAT_DATA", str(tmp_path / "set"))
    assert read_data("mnist")[1].tolist() == [7, 0, 9]
    assert DataSource.parse("mnist").examples().train_labels.tolist() == [7, 0, 9]
    monkeypatch.delenv("SALTFLAT_DATA")
    monkeypatch.chdir(tmp_path)
    refused(DataError, lambda: read_data("mnist"), "data")
    (tmp_path / "set").rename(tmp_path / "data")
    assert read_data("mnist")[1].tolist() == [7, 0, 9]


def test_of_fashion_mnist_the_files_that_can_be_verified_are_taken(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    write_idx(raw)
    assert len(read_data("fashion-mnist", tmp_path)[0]) == 3
    (raw / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(LABELS)))
    refused(DataError, lambda: read_data("fashion-mnist", tmp_path), "train-labels-idx1-ubyte.gz", "md5")


def test_a_file_with_another_checksum_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw")
    wanted = mnist.MNIST_CHECKSUMS["train-images-idx3-ubyte"]
    refused(DataError, lambda: read_data("mnist", tmp_path), "train-images-idx3-ubyte", wanted, "download it again")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "begins with nothing"),
        (b"<html>", "3c 68 74 6d"),
        (bytes([0, 0, 13, 1]), "00 00 0d 01"),
        (bytes([0, 0, 8, 3, 0, 0]), "ends within its sizes"),
        (idx_bytes(LABELS)[:-1], "2 numbers for the shape (3,)"),
        (idx_bytes(LABELS) + b"x", "4 numbers"),
        (bytes([0, 0, 8, 200]) + 200 * struct.pack(">I", 1) + b"x", "200 axes"),
        (bytes([0, 0, 8, 4]) + struct.pack(">4I", 0, *3 * [2**32 - 1]), "4 axes"),
    ],
)
def test_broken_idx_files_are_named(content: bytes, word: str) -> None:
    refused(DataError, lambda: mnist.parse_idx(content, Path("labels")), word, "labels")


def test_an_idx_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    write_idx(raw)

    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    refused(DataError, lambda: read_data("fashion-mnist", tmp_path), "Input/output error")


def test_as_many_labels_as_images(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    write_idx(raw)
    (raw / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS[:2]))
    refused(DataError, lambda: read_data("fashion-mnist", tmp_path), "(3, 28, 28)", "(2,)")


def test_a_gzip_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "MNIST" / "raw"
    checksums = write_idx(raw, zipped=True)
    path = raw / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    checksums[path.name] = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setattr(mnist, "MNIST_CHECKSUMS", checksums)
    refused(DataError, lambda: read_data("mnist", tmp_path), path.name, "gzip")


def python2_pickle() -> bytes:
    """ROWS and the labels 4 and 2 as Python 2 pickled them, when CIFAR was published."""
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"K\x02M" + struct.pack("<H", 3072) + b"\x86"
    numbers = b"T" + struct.pack("<i", ROWS.size) + ROWS.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    state = b"(K\x01" + shape + kind + b"\x89" + numbers + b"tb"
    return b"\x80\x02}(U\x06labels](K\x04K\x02eU\x04data" + array + state + b"u."


def python3_pickle() -> bytes:
    return pickle.dumps({b"data": ROWS, b"labels": [4, 2], b"batch_label": b"one of two"}, protocol=3)


@pytest.mark.parametrize("content", [python2_pickle(), python3_pickle()], ids=["Python 2", "Python 3"])
def test_pixels_are_read_from_a_pickle(content: bytes) -> None:
    images, labels = cifar.parse_cifar(content, Path("file"), "labels")
    assert_close(images, torch.from_numpy(ROWS.copy()).reshape(2, 3, 32, 32), rtol=0, atol=0)
    assert labels.tolist() == [4, 2]


class Hostile:
    asks_for = "mkdir"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class HostileText(Hostile):
    asks_for = "eval"

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').mkdir({str(self.path)!r})",)


@pytest.mark.parametrize("kind", [Hostile, HostileText])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_does_nothing(kind: type[Hostile], protocol: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    content = pickle.dumps({"more": kind(victim), "data": ROWS, "labels": [4, 2]}, protocol=protocol)
    refused(DataError, lambda: cifar.parse_cifar(content, tmp_path / "file", "labels"), kind.asks_for, "not run")
    assert not victim.exists()
    # And the pickle is a real one.
    pickle.loads(content)
    assert victim.exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({b"data": np.array([Path], dtype=object), b"labels": [1]}, protocol=3),
        pickle.dumps({b"data": ROWS.astype(np.float64), b"labels": [4, 2]}, protocol=3),
        pickle.dumps({b"data": np.asfortranarray(ROWS), b"labels": [4, 2]}, protocol=3),
        pickle.dumps({b"data": ROWS[:, 1:], b"labels": [4, 2]}, protocol=3),
        pickle.dumps({b"data": ROWS, b"labels": [4]}, protocol=3),
        pickle.dumps({b"data": ROWS}, protocol=3),
        pickle.dumps([1, 2], protocol=3),
        pickle.dumps({b"data": ROWS, b"labels": [4, 2]}, protocol=3)[:-9],
        # BUILD on the classes that stand for numpy's: would change what a later file is read with.
        b"\x80\x02cnumpy\nndarray\n}X\x05\x00\x00\x00arrayK\x01sb.",
        b"\x80\x02cnumpy\nndarray\nN}X\x05\x00\x00\x00arrayK\x01s\x86b.",
        b"garbage",
        b"",
    ],
    ids=(
        *("objects", "reals", "columns first", "short rows", "too few labels", "no labels"),
        *("list", "cut", "build", "slots", "garbage", "empty"),
    ),
)
def test_other_pickles_are_refused(content: bytes) -> None:
    refused(DataError, lambda: cifar.parse_cifar(content, Path("file"), "labels"), "'file'")
    # Nothing stays behind that would change how the next file is read.
    assert cifar.parse_cifar(python2_pickle(), Path("file"), "labels")[1].tolist() == [4, 2]


def test_a_pickle_with_another_checksum_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "victim")))
    monkeypatch.setattr(cifar, "parse_cifar", lambda *_: pytest.fail("it was opened"))
    wanted = cifar.CIFAR10_FILES["test"][0][1]
    refused(DataError, lambda: read_data("cifar10", tmp_path, "test"), "test_batch", wanted)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    refused(DataError, lambda: read_verified_bytes(tmp_path, ""), str(tmp_path), "cannot be read")


def save_npz(path: Path, **arrays: Any) -> None:
    np.savez(path, **arrays)


def save_safe(path: Path, **arrays: Any) -> None:
    save_file({name: torch.tensor(array) for name, array in arrays.items()}, path)


@pytest.mark.parametrize(("suffix", "save"), [(".npz", save_npz), (".safetensors", save_safe)])
@pytest.mark.parametrize("names", [("inputs", "targets"), ("x", "y")])
def test_arrays_come_from_files(suffix: str, save: Callable[..., None], names: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    values, classes = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 1, 2, 0, 1], dtype=np.int32)
    save(path, **dict(zip(names, (values, classes), strict=True)), other=np.zeros(2))
    inputs, targets = read_data(str(path), skip=1, limit=3)
    assert_close(inputs, torch.from_numpy(values)[1:4], rtol=0, atol=0)
    assert_close(targets, torch.tensor([1, 2, 0]), rtol=0, atol=0)


@pytest.mark.parametrize(("suffix", "save"), [(".npz", save_npz), (".safetensors", save_safe)])
def test_bytes_are_pixels_and_other_integers_tokens(suffix: str, save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    save(path, x=np.array([[0, 255, 51]], dtype=np.uint8), y=np.array([1.5], dtype=np.float16))
    inputs, targets = read_data(str(path))
    assert_close(inputs, torch.tensor([[0, 1, 0.2]]))
    assert_close(targets, torch.tensor([1.5]))
    save(path, x=np.array([[3, 1]], dtype=np.int16), y=np.array([True]))
    assert_close(read_data(str(path)), (torch.tensor([[3, 1]]), torch.tensor([1])))


def test_big_endian_arrays_are_turned(tmp_path: Path) -> None:
    save_npz(tmp_path / "data.npz", x=np.array([[1.0, 2.0]], dtype=">f4"), y=np.array([3], dtype=">i8"))
    assert_close(read_data(str(tmp_path / "data.npz")), (torch.tensor([[1.0, 2.0]]), torch.tensor([3])))


@pytest.mark.parametrize(("suffix", "save"), [(".npz", save_npz), (".safetensors", save_safe)])
def test_files_of_arrays_that_cannot_be_used_are_named(suffix: str, save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    ones = np.ones((2, 2))
    save(path, x=ones, labels=ones)
    refused(DataError, lambda: read_data(str(path)), "labels, x", "'targets' or 'y'")
    save(path, x=ones, inputs=ones, y=ones)
    refused(DataError, lambda: read_data(str(path)), "one of each")
    save(path, x=ones, y=ones)
    path.write_bytes(path.read_bytes()[:60])
    refused(DataError, lambda: read_data(str(path)), str(path), "whole")
    path.write_bytes(b"")
    refused(DataError, lambda: read_data(str(path)), str(path))
    path.unlink()
    path.mkdir()
    refused(DataError, lambda: read_data(str(path)), str(path))


def test_an_npz_with_pickled_objects_does_nothing(tmp_path: Path) -> None:
    path, victim = tmp_path / "data.npz", tmp_path / "victim"
    np.savez(path, x=np.array([Hostile(victim)], dtype=object), y=np.ones(1))
    refused(DataError, lambda: read_data(str(path)), "pickle")
    assert not victim.exists()
    np.savez(path, x=np.array(["text"]), y=np.ones(1))
    refused(DataError, lambda: read_data(str(path)), "not numbers")
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(DataError, lambda: read_data(str(path)), "without a name")


def member(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip with good targets and one other member."""
    file = io.BytesIO()
    np.savez(file, y=np.ones(2))
    with zipfile.ZipFile(file, "a", method) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


HUGE = header("{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999999,), }")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (member("x.npy", HUGE + bytes(8)), "allocate"),
        (member("x.npy", header("{'descr': (((")), "data.npz"),
        (member("x", b"no array"), "'x' is not an array"),
        (member("x.npy", HUGE).replace(b"\x00\x00\x00\x00x.npy", b"\x01\x00\x00\x00x.npy"), "data.npz"),
        (member("x.npy", HUGE, zipfile.ZIP_DEFLATED).replace(b"\x08\x00", b"\x63\x00"), "data.npz"),
    ],
    ids=["no memory", "header", "text", "damaged", "packed in an unknown way"],
)
def test_npz_files_that_fail_in_odd_ways_are_named(content: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    refused(DataError, lambda: read_data(str(tmp_path / "data.npz")), word)


@pytest.mark.parametrize(("suffix", "save"), [(".npz", save_npz), (".safetensors", save_safe)])
@pytest.mark.parametrize(
    ("inputs", "targets", "word"),
    [
        (np.array(1.0), np.ones(1), "inputs are one number"),
        (np.ones(1), np.array(1.0), "targets are one number"),
        (np.ones((1, 2), dtype=np.complex64), np.ones(1), "inputs are complex"),
        (np.ones((1, 2)), np.array([2**63], dtype=np.uint64), "2^63"),
    ],
)
def test_arrays_of_odd_kinds_are_named(
    inputs: Any, targets: Any, word: str, suffix: str, save: Callable[..., None], tmp_path: Path
) -> None:
    save(tmp_path / f"data{suffix}", x=inputs, y=targets)
    refused(DataError, lambda: read_data(str(tmp_path / f"data{suffix}")), word)


def test_files_of_other_kinds_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("1,2")
    refused(DataError, lambda: read_data(str(path)), "data.csv", ".npz")


def test_a_factory_gives_what_it_gives() -> None:
    assert_close(read_data("factories:pair"), pair(), rtol=0, atol=0)
    assert_close(read_data("factories:pair", skip=1, limit=2), tuple(part[1:3] for part in pair()), rtol=0, atol=0)
    assert isinstance(read_data("factories:loader"), DataLoader)
    part = read_data("factories:dataset", skip=1, limit=2)
    assert isinstance(part, Subset)
    assert [int(part[n][1]) for n in range(len(part))] == [1, 2]
    (_, targets), (_, rest) = read_data("factories:loader", skip=1, limit=4)
    assert torch.cat([targets, rest]).tolist() == [1, 2, 0, 1]


def test_what_a_users_module_lacks_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SaltflatError, match=r"ModuleNotFoundError: .*surely_not_installed.*needs_more.py:1") as caught:
        read_data("needs_more:data")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_data_is_put_where_the_model_is() -> None:
    found = move_data(pair(), torch.device("cpu"), torch.float64)
    assert isinstance(found, tuple)
    inputs, targets = found
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    batches = [pair()]
    assert move_data(batches, torch.device("cpu"), torch.float64) is batches
    meta = torch.device("meta")
    for data in (batches, TensorDataset(*pair()), DataLoader(TensorDataset(*pair()), 4)):
        moved = move_data(data, meta, torch.float32)
        assert isinstance(moved, DeviceBatches)
        for _ in range(2):
            leaves = [leaf for batch in moved for leaf in (*batch.args, batch.targets)]
            assert leaves
            assert all(isinstance(leaf, Tensor) and leaf.device == meta for leaf in leaves)


def test_every_reader_says_what_it_reads() -> None:
    assert set(READERS) == {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100"}
    for name, each in READERS.items():
        assert each.name == name
        assert each.meaning
        assert len(each.mean) == len(each.std) == (3 if name.startswith("cifar") else 1)
