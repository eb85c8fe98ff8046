"""Tiny versions of the networks people train, written as they write them: what the search for rescalings is shown on.

Float64, seeded, and some hundred parameters each: few enough for a dense decomposition over all of them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from cases import Case, integers, problem, reals, with_history
from torch import Tensor, nn

NETWORKS: dict[str, Callable[[], Case]] = {}

# The kinds of networks every rescaling is promised for; the others in the registry are there to be hard.
LISTED = (
    "biased_mlp",
    "lenet5",
    "vgg_with_batch_norm",
    "resnet20_with_padded_shortcuts",
    "resnet18_with_convolutional_shortcuts",
    "preactivation_wide_resnet",
    "densenet_block",
    "mobilenet_like",
    "unet_like",
    "vit_block",
    "gpt_like_decoder",
    "gelu_only",
)


def network(seed: int) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Enter a builder in ``NETWORKS``; each call builds the same problem anew and leaves the random state alone.

    The seeds are such that no unit is dead on all of the data.
    """

    def enter(build: Callable[[], Case]) -> Callable[[], Case]:
        def seeded() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return replace(build(), name=build.__name__)

        NETWORKS[build.__name__] = seeded
        return seeded

    return enter


def of_images(model: nn.Module, channels: int, side: int, classes: int = 3) -> Case:
    """Classes of small square images; BatchNorms have seen data and their statistics are nothing special."""
    seen = with_history(model, 8, channels, side, side)
    return problem(seen, reals(12, channels, side, side), integers(classes, 12))


def of_tokens(model: nn.Module, vocabulary: int, length: int) -> Case:
    """The next token at every position; every token of the vocabulary occurs."""
    count = 6
    tokens = torch.cat([torch.arange(vocabulary), integers(vocabulary, count * length - vocabulary)])
    tokens = tokens[torch.randperm(len(tokens))].view(count, length)
    return problem(model, tokens, integers(vocabulary, count, length))


# Chains.


@network(seed=19)
def biased_mlp() -> Case:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))
    return problem(model, reals(10, 5), integers(4, 10))


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.conv2 = nn.Conv2d(3, 4, 2)
        self.fc1 = nn.Linear(4 * 2 * 2, 8)
        self.fc2 = nn.Linear(8, 6)
        self.fc3 = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), (2, 2))
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x).relu_()
        out: Tensor = self.fc3(x)
        return out


@network(seed=99)
def lenet5() -> Case:
    return of_images(LeNet5(), 1, 12, classes=4)


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*self.block(2, 4), *self.block(4, 6))
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(6 * 2 * 2, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))

    @staticmethod
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        out: Tensor = self.classifier(torch.flatten(x, 1))
        return out


@network(seed=46)
def vgg_with_batch_norm() -> Case:
    return of_images(VGG(), 2, 8)


@network(seed=0)
def gelu_only() -> Case:
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
    return problem(model, reals(10, 5), integers(4, 10))


# Residual networks.


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class PaddedBlock(nn.Module):
    """The shortcut takes every second pixel and surrounds the channels with channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or inputs != outputs:
            each = (outputs - inputs) // 2
            self.shortcut = Lambda(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, each, each), "constant", 0))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2)
        self.layer1 = nn.Sequential(PaddedBlock(2, 2, 1))
        self.layer2 = nn.Sequential(PaddedBlock(2, 4, 2))
        self.layer3 = nn.Sequential(PaddedBlock(4, 6, 2))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        logits: Tensor = self.linear(out)
        return logits


@network(seed=252)
def resnet20_with_padded_shortcuts() -> Case:
    return of_images(ResNet20(), 1, 8)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = BasicBlock(3, 3)
        downsample = nn.Sequential(nn.Conv2d(3, 5, 1, stride=2, bias=False), nn.BatchNorm2d(5))
        self.layer2 = BasicBlock(3, 5, 2, downsample)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        out: Tensor = self.fc(x)
        return out


@network(seed=248)
def resnet18_with_convolutional_shortcuts() -> Case:
    return of_images(ResNet18(), 2, 8)


class WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.equal = inputs == outputs
        self.shortcut = None if self.equal else nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x), inplace=True)
        out = F.relu(self.bn2(self.conv1(active)), inplace=True)
        out = F.dropout(out, p=0.3, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.shortcut is None else self.shortcut(active), out)


class WideResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.block1 = WideBlock(3, 4)
        self.block2 = WideBlock(4, 4)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block2(self.block1(self.conv1(x)))
        out = self.relu(self.bn(out))
        out = F.avg_pool2d(out, 4).view(-1, 4)
        logits: Tensor = self.fc(out)
        return logits


@network(seed=0)
def preactivation_wide_resnet() -> Case:
    return of_images(WideResNet(), 2, 4)


# Concatenation, depthwise convolutions, images out.


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, bottleneck, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck)
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        out: Tensor = self.conv2(F.relu(self.norm2(x)))
        return out


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.layers = nn.ModuleList([DenseLayer(4, 2, 4), DenseLayer(6, 2, 4)])
        self.transition = nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1, bias=False), nn.AvgPool2d(2)
        )
        self.norm = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        out = self.norm(self.transition(torch.cat(features, 1)))
        out = F.adaptive_avg_pool2d(F.relu(out, inplace=True), (1, 1))
        logits: Tensor = self.classifier(torch.flatten(out, 1))
        return logits


@network(seed=5)
def densenet_block() -> Case:
    return of_images(DenseNet(), 1, 6)


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *clipped(inputs, hidden, 1),
            *clipped(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


def clipped(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *clipped(2, 4, 3), InvertedResidual(4, 6, 3, 2), InvertedResidual(3, 6, 3, 1), *clipped(3, 5, 1)
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).mean([2, 3])
        out: Tensor = self.classifier(x)
        return out


@network(seed=278)
def mobilenet_like() -> Case:
    return of_images(MobileNet(), 2, 6)


class UNet(nn.Module):
    """Logits for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = nn.Conv2d(1, 3, 3, padding=1)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.conv1 = nn.Conv2d(4 + 5, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(3 + 4, 3, 3, padding=1)
        self.outc = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x).relu()
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = F.relu(self.conv1(torch.cat([x2, self.up(x3)], dim=1)))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.relu(self.conv2(torch.cat([x1, x], dim=1)))
        logits: Tensor = self.outc(x)
        return logits


@network(seed=169)
def unet_like() -> Case:
    return problem(UNet(), reals(4, 1, 8, 8), integers(3, 4, 8, 8))


# Attention.


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, width))

    def forward(self, input: Tensor) -> Tensor:
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = x + input
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(2, 6, kernel_size=3, stride=3)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, 5, 6))
        self.block = EncoderBlock(6, 2, 8)
        self.ln = nn.LayerNorm(6, eps=1e-6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x)
        x = x.reshape(x.shape[0], 6, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.ln(self.block(x + self.pos_embedding))
        out: Tensor = self.head(x[:, 0])
        return out


@network(seed=0)
def vit_block() -> Case:
    return of_images(VisionTransformer(), 2, 6)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        out: Tensor = self.c_proj(y)
        return out


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, hidden)
        self.c_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.c_proj(F.relu(self.c_fc(self.ln_2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 6)
        self.wpe = nn.Embedding(5, 6)
        self.block = DecoderBlock(6, 2, 10)
        self.ln_f = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 7, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        logits: Tensor = self.lm_head(self.ln_f(self.block(x)))
        return logits


@network(seed=0)
def gpt_like_decoder() -> Case:
    return of_tokens(GPT(tied=False), 7, 5)


@network(seed=0)
def tied_embedding_decoder() -> Case:
    return of_tokens(GPT(tied=True), 7, 5)


# One layer in two places, and units whose size is a sum of several logarithms.


class Shared(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5, bias=bias)
        self.layer = nn.Linear(5, 5, bias=bias)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for _ in range(2):
            x = F.relu(self.layer(x))
        out: Tensor = self.head(x)
        return out


@network(seed=0)
def shared_layer() -> Case:
    return problem(Shared(bias=True), reals(10, 4), integers(3, 10))


@network(seed=4)
def shared_layer_without_biases() -> Case:
    # Sizes may grow by one factor from use to use.
    return problem(Shared(bias=False), reals(10, 4), integers(3, 10))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w12 = nn.Linear(4, 12)
        self.w3 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        out: Tensor = self.w3(F.relu(gate) * value)
        return out


@network(seed=1)
def gated() -> Case:
    return problem(Gated(), reals(10, 4), integers(3, 10))


class Mixer(nn.Module):
    """Layers along the channels and along the positions: a size for each channel times one for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 4)
        self.positions = nn.Linear(4, 5, bias=False)
        self.channels = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).relu()
        x = self.positions(x.mT).relu().mT
        x = self.channels(x).relu()
        out: Tensor = self.head(x.flatten(1))
        return out


@network(seed=8)
def mixer_without_biases() -> Case:
    return problem(Mixer(), reals(10, 4, 3), integers(3, 10))


class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.fc1 = nn.Conv2d(4, 3, 1)
        self.fc2 = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        gate = torch.sigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1)))))
        out: Tensor = self.head((gate * x).amax((-2, -1)))
        return out


@network(seed=0)
def squeeze_and_excitation() -> Case:
    return of_images(SqueezeExcitation(), 2, 4)


# Other layers and norms.


@network(seed=0)
def prelu_and_leaky() -> Case:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 5), nn.LeakyReLU(0.1, inplace=True), nn.Linear(5, 5), nn.PReLU()
    )
    return problem(nn.Sequential(model, nn.Linear(5, 3)), reals(10, 4), integers(3, 10))


@network(seed=5)
def transposed_and_grouped() -> Case:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2, bias=False),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return of_images(model, 4, 4)


class Generator(nn.Module):
    """Every position of the first image has weights of its own, so its size can be its own too."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2 * 4)
        self.deconv = nn.ConvTranspose1d(2, 2, 3, stride=2, bias=bias)
        self.head = nn.Linear(2 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc(x)).view(-1, 2, 4)
        x = F.relu(self.deconv(x))
        out: Tensor = self.head(x.flatten(1))
        return out


@network(seed=4)
def generator() -> Case:
    return problem(Generator(bias=True), reals(10, 3), integers(3, 10))


@network(seed=48)
def generator_without_biases() -> Case:
    # Sizes may grow by one factor from position to position, as powers of it along the kernel.
    return problem(Generator(bias=False), reals(10, 3), integers(3, 10))


def normed(eps: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2),
        nn.GroupNorm(2, 4, eps=eps),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.RMSNorm(6, eps=eps),
        nn.Linear(6, 5),
        nn.LayerNorm(5, eps=eps),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


@network(seed=3)
def group_and_rms_norm() -> Case:
    return of_images(normed(1e-5), 2, 3)


@network(seed=3)
def norms_without_eps() -> Case:
    return of_images(normed(0.0), 2, 3)


@network(seed=0)
def no_symmetry() -> Case:
    return problem(nn.Linear(5, 4), reals(10, 5), integers(4, 10))


# Weights that no layer of torch has: what their axes count is seen from their use only.


class Experts(nn.Module):
    """Weights with inputs first, and stacks of them for heads and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Parameter(torch.randn(4, 5))
        self.heads = nn.Parameter(torch.randn(2, 5, 3) / 2)
        self.gate = nn.Linear(4, 2)
        self.experts = nn.Parameter(torch.randn(2, 6, 4) / 2)
        self.shifts = nn.Parameter(torch.randn(2, 1, 4))
        self.back = nn.Parameter(torch.randn(2, 4, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("nd,hdk->nhk", (x @ self.lift).relu(), self.heads).relu().flatten(1)
        each = torch.baddbmm(self.shifts, hidden.expand(2, -1, -1), self.experts).relu() @ self.back
        return torch.einsum("ne,eno->no", self.gate(x).softmax(1), each)


@network(seed=6)
def heads_and_experts() -> Case:
    return problem(Experts(), reals(10, 4), integers(3, 10))


class Tokens(nn.Module):
    """A class token and positions as parameters, pairs of features, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 5)
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        self.position = nn.Parameter(torch.randn(1, 5, 5))
        self.pairs = nn.Parameter(torch.randn(6, 5, 5) / 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.lift(x)], 1) + self.position
        x = x.relu()
        pairs = torch.einsum("ni,oij,nj->no", x[:, 0], self.pairs, x[:, 1:].amax(1))
        out: Tensor = self.last(F.glu(pairs))
        return out


@network(seed=0)
def tokens_and_pairs() -> Case:
    return problem(Tokens(), reals(10, 4, 3), integers(3, 10))
