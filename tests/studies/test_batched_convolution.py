"""Convolutions of many networks at once: every way gives the numbers of one convolution after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from saltflat.studies.training.batched_convolution import (
    NARROW,
    WAYS,
    choose_convolution_method,
    set_convolution_method,
)

NETWORKS, BATCH = 3, 4
# Channels in and out, height and width of images, then what nn.Conv2d takes.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "square": (3, 4, 9, 9, {"kernel_size": 5}),
    "padded": (1, 6, 12, 12, {"kernel_size": 5, "padding": 2}),
    "one column of outputs": (2, 3, 6, 5, {"kernel_size": 5}),
    "strides that leave columns out": (2, 3, 8, 7, {"kernel_size": (3, 5), "stride": (2, 3), "padding": (1, 2)}),
    "stride above the kernel": (4, 4, 7, 7, {"kernel_size": 1, "stride": 3}),
    "padding above the kernel": (2, 2, 4, 3, {"kernel_size": 2, "padding": 3}),
    "without biases": (2, 2, 7, 6, {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False}),
}


def run(convolution: nn.Conv2d, way: str, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    set_convolution_method(nn.Sequential(convolution), way)
    found: Tensor = vmap(lambda own, x: functional_call(convolution, own, (x,)))(weights, images)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_single_convolutions(case: str, way: str) -> None:
    channels, outputs, height, width, words = CASES[case]
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, outputs, **words).double()
    images = torch.randn(NETWORKS, BATCH, channels, height, width, dtype=torch.float64, requires_grad=True)
    weights = {
        name: torch.randn(NETWORKS, *each.shape, dtype=torch.float64, requires_grad=True)
        for name, each in convolution.named_parameters()
    }
    want = torch.stack(
        [
            F.conv2d(x, weights["weight"][place], weights["bias"][place] if "bias" in weights else None,
                     convolution.stride, convolution.padding)
            for place, x in enumerate(images)
        ]
    )  # fmt: skip
    got = run(convolution, way, weights, images)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(want)
    leaves = [images, *weights.values()]
    for mine, other in zip(
        torch.autograd.grad(got, leaves, slope), torch.autograd.grad(want, leaves, slope), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_images_that_all_networks_share_are_convolved_once(way: str) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, 5, padding=1).double()
    weights = {
        name: torch.randn(NETWORKS, *each.shape, dtype=torch.float64) for name, each in convolution.named_parameters()
    }
    images = torch.randn(BATCH, 2, 8, 8, dtype=torch.float64)
    want = run(convolution, way, weights, images.expand(NETWORKS, *images.shape))
    got = vmap(lambda own, x: functional_call(convolution, own, (x,)), in_dims=(0, None))(weights, images)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Look(nn.Module):
    """Notes how its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.straight = x.is_contiguous()
        return x


def test_only_layers_that_are_known_to_take_it_get_channels_last() -> None:
    # BatchNorm on a GPU fails under vmap where channels are last in memory.
    weights = {"0.weight": torch.randn(NETWORKS, 3, 2, 5, 5), "0.bias": torch.randn(NETWORKS, 3)}
    images = torch.randn(NETWORKS, BATCH, 2, 8, 8)
    for known in (True, False):
        look = Look()
        layers = nn.Sequential(nn.Conv2d(2, 3, 5), nn.ReLU() if known else nn.Tanh())
        set_convolution_method(layers, "banded")
        layers.append(look)
        vmap(lambda own, x: functional_call(layers, own, (x,)))(weights, images)  # noqa: B023
        assert look.straight is not known


def test_on_a_cpu_large_kernels_are_taken_one_by_one() -> None:
    images = torch.zeros(NETWORKS, BATCH, 2, 8, 5 * NARROW)
    assert choose_convolution_method(images, torch.zeros(NETWORKS, 3, 2, 5, 5)) == "each"
    assert choose_convolution_method(images, torch.zeros(NETWORKS, 3, 2, 7, 3)) == "each"
    assert choose_convolution_method(images, torch.zeros(NETWORKS, 3, 2, 3, 3)) == "grouped"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_wide_images_are_not_made_into_bands() -> None:
    kernels = torch.zeros(NETWORKS, 3, 2, 5, 5, device="cuda")
    for width, way in ((5 * NARROW, "banded"), (5 * NARROW + 1, "grouped")):
        assert choose_convolution_method(torch.zeros(NETWORKS, BATCH, 2, 8, width, device="cuda"), kernels) == way
