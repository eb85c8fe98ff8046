"""The network that 02_mnist_lenet.py trains, in its own file so that the command line can build it by name."""

from torch import nn


def lenet() -> nn.Sequential:
    """Return LeNet-5 with ReLU and max-pooling, for images of 1 x 28 x 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )
