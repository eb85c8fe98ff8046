"""The group of rescalings as a table and as a picture."""

import io
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NETWORKS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console
from scipy.sparse import csr_array
from torch import Tensor, nn

from saltflat.render.symmetry import make_table_rows as table_rows
from saltflat.render.symmetry_blocks import FIXED, SymmetrySummary, summarize_symmetries
from saltflat.render.symmetry_graph import make_picture_rows, place_bars
from saltflat.results.text import render_text
from saltflat.symmetry.find import find_symmetries
from saltflat.symmetry.group import Symmetries
from saltflat.symmetry.tracing.trace import Obstacle


def group_of(name: str) -> Symmetries:
    case = NETWORKS[name]()
    batch: Any = case.batches[0]
    return find_symmetries(case.model, batch[0])


def chain(*widths: int) -> Symmetries:
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
    return find_symmetries(nn.Sequential(*layers[:-1]), torch.randn(1, widths[0]))


def kinds(found: SymmetrySummary) -> dict[str, tuple[int, str]]:
    return {block.name: (block.scales, block.kind) for block in found.blocks}


def words(text: str) -> str:
    """Without line breaks."""
    return " ".join(text.split())


# What it says.


def test_a_residual_stream_is_told_apart_from_the_branches_beside_it() -> None:
    found = summarize_symmetries(group_of("resnet20_with_padded_shortcuts"))
    assert kinds(found) == {
        "conv1": (2, "absorbed"),
        "bn1": (2, "tied"),  # the stream of all stages
        "layer1.0.conv1": (2, "absorbed"),
        "layer1.0.bn1": (2, "free"),
        "layer1.0.conv2": (2, "absorbed"),
        "layer2.0.conv1": (4, "absorbed"),
        "layer2.0.bn1": (4, "free"),
        "layer2.0.conv2": (4, "absorbed"),
        "layer2.0.bn2": (2, "tied"),  # what the second stage adds to it
        "layer3.0.conv1": (6, "absorbed"),
        "layer3.0.bn1": (6, "free"),
        "layer3.0.conv2": (6, "absorbed"),
        "layer3.0.bn2": (2, "free"),  # and the third
    }
    stream = found.blocks[1]
    assert stream.layers == ("bn1", "layer1.0.bn2", "layer2.0.bn2", "layer3.0.bn2")
    assert stream.outgoing == tuple(
        f"{each}.weight" for each in ("layer1.0.conv1", "layer2.0.conv1", "layer3.0.conv1", "linear")
    )
    assert found.blocks[2].absorbed_by == ("layer1.0.bn1",)


def test_queries_and_keys_are_opposite() -> None:
    found = summarize_symmetries(group_of("gpt_like_decoder"))
    opposite, value = found.blocks[1:3]
    assert (opposite.name, opposite.kind, opposite.scales) == ("block.attn.c_attn", "opposite", 6)
    assert not opposite.outgoing
    assert (value.name, value.kind) == ("block.attn.c_attn (2)", "free")
    assert value.outgoing == ("block.attn.c_proj.weight",)
    assert "opposite within block.attn.c_attn" in render_text(group_of("gpt_like_decoder"), 200)


def test_layers_lie_between_the_blocks_they_connect() -> None:
    found = summarize_symmetries(group_of("unet_like"))
    names = [block.name for block in found.blocks]
    inc, down1, down2, conv1, conv2 = (names.index(each) for each in ("inc", "down1.1", "down2.1", "conv1", "conv2"))
    assert {layer.name: (set(layer.tails), set(layer.heads)) for layer in found.layers} == {
        "inc": ({FIXED}, {inc}),
        "down1.1": ({inc}, {down1}),
        "down2.1": ({down1}, {down2}),
        "conv1": ({down1, down2}, {conv1}),
        "conv2": ({inc, conv1}, {conv2}),
        "outc": ({conv2}, {FIXED}),
    }


@pytest.mark.parametrize("kind", ["unit", "layer"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_block_names_exactly_the_parameters_that_its_scales_move(name: str, kind: str) -> None:
    group = group_of(name) if kind == "unit" else group_of(name).restrict_to_layers()
    wanted: Counter[frozenset[str]] = Counter()
    for one in np.eye(group.scales):
        moved = group.compute_factor_logs(one)
        wanted[frozenset(each for each in moved if moved[each].any() and group.members[each].kind == "parameter")] += 1
    found: Counter[frozenset[str]] = Counter()
    for block in summarize_symmetries(group).blocks:
        found[frozenset((*block.incoming, *block.outgoing, *block.opposite))] += block.scales
    assert found == wanted


@pytest.mark.parametrize("name", NETWORKS)
def test_the_counts_are_those_of_the_group(name: str) -> None:
    group = group_of(name)
    found = summarize_symmetries(group)
    moving = {
        each: mask for each, mask in group.find_movable_entries().items() if group.members[each].kind == "parameter"
    }
    assert (found.scales, found.layer_scales) == (group.scales, group.restrict_to_layers().scales)
    assert (found.moving, found.entries) == (
        sum(m.sum() for m in moving.values()),
        sum(m.size for m in moving.values()),
    )
    assert dict(found.fixed) == {each: mask.size for each, mask in moving.items() if not mask.any()}


# The table.


def test_a_chain_prints_as_a_row_for_each_hidden_layer() -> None:
    assert render_text(chain(3, 5, 4, 2), 120).splitlines() == [
        "9 independent scales; 52 of 54 parameter entries can move; 2 scales if every parameter has one factor.",
        "",
        "units of   scales   incoming         outgoing",
        "------------------------------------------------",
        "0               5   .weight, .bias   2",
        "2               4   .weight, .bias   4",
        "",
        "Cannot move: 1 parameter with 2 entries: 4.bias.",
    ]


def test_str_rich_and_html_say_the_same() -> None:
    group = group_of("vgg_with_batch_norm")
    console = Console(file=io.StringIO(), width=100)
    console.print(group)
    assert words(console.file.getvalue()) == words(render_text(group, 100)) == words(str(group))  # type: ignore[attr-defined]
    page = group._repr_html_()
    assert all(each in page for each in ("28 independent scales", "features.0", "absorbed by features.1"))
    assert repr(group).startswith("<Symmetries: 28 independent scales")


def test_what_batch_norm_absorbs_is_said_with_what_to_do() -> None:
    told = words(render_text(group_of("vgg_with_batch_norm"), 120))
    assert "10 scales absorbed by BatchNorm" in told
    assert "saltflat.fold(model)" in told
    assert "saltflat.fold" not in render_text(group_of("lenet5"), 120)


def test_a_network_without_symmetry_gets_an_answer_that_says_why() -> None:
    told = words(render_text(group_of("gelu_only"), 120))
    assert told.startswith("No rescaling leaves this network's function unchanged")
    assert "gelu in 1 and 3: 14 scales" in told
    told = words(render_text(group_of("no_symmetry"), 120))
    assert "all its parameters connect inputs to outputs" in told
    told = render_text(Symmetries({}, csr_array((2, 0)), ()), 120)
    assert told.strip() == "This model has no parameters: there is nothing to rescale."


def test_an_operation_without_a_rule_is_marked_and_comes_first() -> None:
    known = Obstacle("aten.gelu", "act", "", True, 3)
    unknown = Obstacle("aten.strange", "block", "model.py:7: strange(x)", False, 0)
    told = render_text(replace(chain(2, 3, 1), obstacles=(known, unknown)), 200).splitlines()
    assert told[-2:] == [
        "  UNKNOWN aten.strange in block: has no rule, so everything it touches counts as fixed"
        " (model.py:7: strange(x))",
        "  gelu in act: 3 scales",
    ]


def test_one_factor_per_parameter_is_said_where_it_is_so() -> None:
    told = render_text(chain(3, 5, 2).restrict_to_layers(), 120).splitlines()[0]
    assert told == "1 independent scale; 30 of 32 parameter entries can move; every parameter has one factor."


def test_many_similar_layers_share_a_row() -> None:
    rows, left_out = table_rows(summarize_symmetries(chain(*[4] * 41)).blocks)
    assert rows == [("*", "39 x 4", ".weight, .bias", "*", "")]
    assert not left_out


def test_of_many_different_layers_the_largest_are_shown_in_the_order_of_the_network() -> None:
    widths = [*range(2, 21), *range(40, 20, -1)]
    rows, left_out = table_rows(summarize_symmetries(chain(1, *widths, 1)).blocks)
    assert [int(row[1]) for row in rows] == [width for width in widths if width > 10]
    assert left_out.startswith("... and 9 more rows")


@pytest.mark.parametrize("width", [24, 60, 80, 140])
@pytest.mark.parametrize("name", ["resnet20_with_padded_shortcuts", "gpt_like_decoder", "mobilenet_like", "gelu_only"])
def test_the_table_fits_into_any_width(name: str, width: int) -> None:
    assert max(map(len, render_text(group_of(name), width).splitlines())) <= width


class Hostile(nn.Module):
    """Names that a page, a terminal or a formula would take for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<b>$x_{1}^", nn.Linear(2, 3))
        self.add_module("\x1b[31m", nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.children()
        out: Tensor = second(first(x).relu())
        return out


def test_names_are_shown_as_they_are() -> None:
    group = find_symmetries(Hostile(), torch.randn(1, 2))
    assert "\x1b" not in str(group)
    assert "<b>" in str(group)
    assert "<b>" not in group._repr_html_()
    shown = [each.get_text() for each in group.plot().axes[0].texts]
    assert "<b>$x_{1}^" in shown
    assert "\\x1b[31m" in shown
    group.plot().savefig(io.BytesIO(), format="png")


# The picture.


@pytest.mark.parametrize("name", NETWORKS)
def test_no_text_of_the_picture_covers_another_or_leaves_it(name: str) -> None:
    figure = group_of(name).plot()
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [*figure.axes[0].texts, *figure.legends[0].get_texts()]
    boxes = [each.get_window_extent(canvas.get_renderer()) for each in texts if each.get_text()]
    for number, one in enumerate(boxes):
        assert figure.bbox.x0 <= one.x0 < one.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= one.y0 < one.y1 <= figure.bbox.y1
        assert not any(one.overlaps(two) for two in boxes[number + 1 :])


@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_has_a_bar_and_no_bar_covers_another(name: str) -> None:
    found = summarize_symmetries(group_of(name))
    bars = place_bars(found.blocks, make_picture_rows(found))
    assert sorted(bars) == list(range(len(found.blocks)))
    placed = list(bars.values())
    for number, one in enumerate(placed):
        for two in placed[number + 1 :]:
            assert one.column != two.column or one.last < two.first or two.last < one.first


def test_branches_stand_to_the_right_of_the_stream() -> None:
    found = summarize_symmetries(group_of("resnet20_with_padded_shortcuts"))
    bars = {bar.block.name: bar for bar in place_bars(found.blocks, make_picture_rows(found)).values()}
    stream = bars["bn1"]
    assert stream.column == 1
    assert all(bar.column > stream.column for name, bar in bars.items() if name != "bn1")
    names = [row.label for row in make_picture_rows(found)]
    assert (names[stream.first], names[stream.last]) == ("bn1", "linear")


def test_an_operation_that_holds_scales_stands_where_it_is_in_the_model() -> None:
    rows = make_picture_rows(summarize_symmetries(group_of("gelu_only")))
    assert [row.label for row in rows] == ["0", "gelu in 1", "2", "gelu in 3", "4"]
    rows = make_picture_rows(summarize_symmetries(group_of("gpt_like_decoder")))
    labels = [row.label for row in rows]
    assert labels[:3] == ["wte and wpe", "layer_norm in block.ln_1", "block.ln_1"]
    assert [row.obstacle for row in rows[:3]] == [False, True, False]


def test_a_deep_network_is_drawn_up_to_a_point_that_is_named() -> None:
    group = chain(*[2] * 201)
    rows = make_picture_rows(summarize_symmetries(group))
    assert rows[-1].label == "... and 50 rows more"
    assert len(group.plot().axes[0].patches) > 150


def test_the_picture_has_no_window_to_close() -> None:
    assert chain(2, 3, 1).plot().canvas.manager is None
