"""Models as they are trained: checkpointed, compiled, in half precision, with adapters, offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import saltflat
from saltflat.cli import app
from saltflat.errors import DataError, DeviceError, ModelError, ParameterError, PrecisionError

WORDS, LENGTH = 11, 5
pytestmark = pytest.mark.filterwarnings("ignore:.*generation config")
OPTIONS: dict[str, Any] = {"columns": "sampled:2", "sampling": False, "certificate": False}


def gpt(**options: Any) -> Any:
    torch.manual_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **size, **options))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def measure(model: nn.Module, data: Any = None, **options: Any) -> saltflat.Report:
    return saltflat.measure(model, data or batch(), "model", "hessian_trace", **{**OPTIONS, **options})


def checkpointed(reentrant: bool) -> Any:
    model = gpt().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "checkpointed": lambda: checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: checkpointed(reentrant=True),
    "compiled": lambda: torch.compile(gpt(), backend="eager"),
    "sdpa": lambda: gpt(attn_implementation="sdpa"),
    "eager": lambda: gpt(attn_implementation="eager"),
    "with hooks of Accelerate": lambda: dispatch_model(gpt(), {"": "cpu"}, force_hooks=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_set_ups_that_compute_the_same_function_have_the_same_trace(name: str) -> None:
    plain, found = measure(gpt()), measure(MODELS[name]())
    assert_close(float(found["hessian_trace"]), float(plain["hessian_trace"]), rtol=1e-5, atol=0)
    assert_close(found.loss, plain.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_a_copy_that_is_counted(dtype: torch.dtype) -> None:
    model = gpt().to(dtype)
    with pytest.raises(PrecisionError, match=r"Try passing dtype=torch\.float32"):
        measure(model)
    found = measure(model, dtype=torch.float32)
    meter = saltflat.Meter(model, "model", "hessian_trace", dtype=torch.float32, **OPTIONS)
    assert float(meter.measure(batch())["hessian_trace"]) == float(found["hessian_trace"])
    widened = measure(model.float())
    assert float(found["hessian_trace"]) == float(widened["hessian_trace"])
    assert found.settings["results_bytes"] == widened.settings["results_bytes"]


def test_the_command_line_names_its_option_for_half_precision() -> None:
    command = ["measure", "--model", "factories:half_mlp", "--data", "factories:pair", "--measures", "hessian_trace"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "Try --dtype float32" in " ".join(refused.output.split())
    assert CliRunner().invoke(app, [*command, "--dtype", "float32"]).exit_code == 0


def test_adapters_of_peft_are_measured_alone() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt(), config)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.1)
    found = measure(model, certificate=True)
    assert found.settings["layers"] == [name for name, each in model.named_parameters() if each.requires_grad]
    assert all("lora" in name for name in found["hessian_trace"].layers)
    # The same function, with the adapters merged into the base, has the same loss.
    assert_close(found.loss, measure(model.merge_and_unload().requires_grad_()).loss, rtol=1e-5, atol=0)


class Packed(nn.Module):
    """A layer with weights in 8 bits below an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (3, 4), dtype=torch.int8), requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ (0.01 * self.weight.to(x.dtype)).T + self.adapter(x)
        return out


def test_weights_in_8_bits_are_refused_and_adapters_on_them_measured() -> None:
    torch.manual_seed(0)
    model, data = Packed(), (torch.randn(6, 4), torch.arange(6) % 3)
    with pytest.raises(ParameterError, match=r"8- or 4-bit weights.*adapters") as caught:
        saltflat.measure(model, data, measures="hessian_trace")
    assert str(caught.value).endswith("layers=[name for name, each in model.named_parameters() if each.requires_grad].")
    named = [name for name, each in model.named_parameters() if each.requires_grad]
    found = saltflat.compute_statistics(model.double(), (data[0].double(), data[1]), layers=named)
    wide = Packed().double()
    wide.adapter, wide.weight = model.adapter, nn.Parameter(model.weight.double(), requires_grad=False)
    expected = saltflat.compute_statistics(wide, (data[0].double(), data[1]))
    assert_close(dict(found["curvature_trace"]), dict(expected["curvature_trace"]))


class QuantizedWeight(nn.Parameter):
    """Weights in 8 bits with their scales, which a layer takes from it in its first pass, as bitsandbytes does."""

    scales: Tensor | None

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> QuantizedWeight:
        made: QuantizedWeight = Tensor._make_subclass(cls, data, requires_grad)
        made.scales = None
        return made

    def __deepcopy__(self, memo: Any) -> QuantizedWeight:
        made = QuantizedWeight(self.data.clone())
        made.scales = self.scales
        return made


class QuantizedLinear(nn.Linear):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape[::-1])
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.weight = QuantizedWeight((weight / scales).round().to(torch.int8))
        self.weight.scales, self.scales = scales, None

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.scales is not None:
            self.scales, weight.scales = weight.scales, None
        assert self.scales is not None
        return nn.functional.linear(x, self.scales * weight.to(x.dtype), self.bias)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, between two more."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.start, self.base = nn.Linear(4, 64), base
        self.adapter = nn.Sequential(nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False))
        self.end = nn.Linear(64, 3)
        for name, value in self.named_parameters():
            value.requires_grad_("adapter" in name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x).tanh()
        x = (self.base(x) + self.adapter(x)).tanh()
        out: Tensor = self.end(x)
        return out


ADAPTER = ["adapter.0.weight", "adapter.1.weight"]


def draw_base() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def draw_pair() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.arange(6) % 3


def widen(model: Adapted, weight: Tensor) -> Adapted:
    """Return the model with whole weights in place of the quantized ones."""
    base, own = draw_base(), model.base.get_parameter("bias")
    base.weight.data, base.bias.data = weight, own.data
    wide = Adapted(base)
    wide.adapter = model.adapter
    return wide


def check_adapters(model: Adapted, wide: Adapted, rtol: float) -> None:
    """Compare what is measured of adapters on quantized weights with the same on whole ones."""
    with pytest.raises(ParameterError, match=r"8- or 4-bit weights.*adapters"):
        saltflat.measure(model, draw_pair(), measures="hessian_trace")
    names = ["curvature_diagonal", "gradient_second_moment", "mean_gradient"]
    found, expected = (
        saltflat.compute_statistics(each, draw_pair(), names=names, layers=ADAPTER) for each in (model, wide)
    )
    assert_close(found.loss, expected.loss, rtol=rtol, atol=0)
    for name in names:
        for key, value in expected[name].items():
            assert_close(found[name][key], value, rtol=rtol, atol=rtol * float(value.abs().max()))


def test_quantized_weights_keep_the_scales_that_belong_to_them() -> None:
    base = QuantizedLinear(draw_base().weight.detach())
    assert isinstance(base.weight, QuantizedWeight)
    scales = base.weight.scales
    assert scales is not None
    model = Adapted(base)
    check_adapters(model, widen(model, scales * base.weight.float()), 1e-5)
    assert base.weight.scales is scales  # the model is as it was
    assert base.scales is None
    assert saltflat.measure(model, draw_pair(), layers=["base.bias", *ADAPTER], measures="hessian_trace").loss > 0


@pytest.mark.filterwarnings("ignore")
def test_adapters_on_weights_of_torchao_are_measured() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = Adapted(draw_base())
    quantization.quantize_(model.base, quantization.Int8WeightOnlyConfig())
    packed: Any = model.base.weight
    check_adapters(model, widen(model, packed.dequantize()), 1e-5)


@pytest.mark.filterwarnings("ignore")
def test_adapters_on_weights_of_bitsandbytes_are_measured_without_packing_them() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    base.weight = bitsandbytes.nn.Params4bit(draw_base().weight.detach(), requires_grad=False, quant_type="nf4")
    model = Adapted(base.to("cpu"))
    kept = base.weight.data.clone()
    whole = bitsandbytes.functional.dequantize_4bit(base.weight.data, base.weight.quant_state).clone()
    check_adapters(model, widen(model, whole), 1e-5)
    assert torch.equal(base.weight.data, kept)
    with torch.no_grad():
        model.eval()(draw_pair()[0])  # where the processor allows it, this packs the weights for inference
    if getattr(base.weight.quant_state, "packing_format_for_cpu", False):
        with pytest.raises(ParameterError, match=r"'base\.weight', packed for inference.*state_dict\(\)"):
            saltflat.measure(model, draw_pair(), measures="hessian_trace", layers=ADAPTER)
        model.state_dict()
    assert saltflat.measure(model, draw_pair(), measures="hessian_trace", layers=ADAPTER).loss > 0


def test_a_model_that_fails_on_its_labels_is_refused_with_its_own_error() -> None:
    model = gpt()
    with pytest.raises(ModelError, match=r"loss='model', which raises IndexError: .*out of range.* for these inputs"):
        measure(model, {**batch(), "input_ids": batch()["input_ids"] + WORDS})


def test_flash_attention_is_refused_by_name() -> None:
    model = gpt()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(PrecisionError, match=r"'flash_attention_2'.*Try model.set_attn_implementation\('sdpa'\)"):
        measure(model)
    model.set_attn_implementation("sdpa")
    assert float(measure(model)["hessian_trace"]) > 0


def test_models_in_parts_are_refused_with_the_part() -> None:
    with pytest.raises(DeviceError, match=r"'transformer\.wte\.weight' offloaded.*device_map"):
        measure(cpu_offload(gpt(), execution_device=torch.device("cpu")))
    model = gpt()
    model.transformer.h[0].mlp.to("meta")
    with pytest.raises(DeviceError, match=r"'transformer\.h\.0\.mlp\.c_fc\.weight' on the meta device"):
        measure(model)
    with pytest.raises(DataError, match="meta"):
        measure(gpt(), {name: value.to("meta") for name, value in batch().items()})


def test_an_encoder_decoder_without_labels_is_refused() -> None:
    config = T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(DataError, match="'labels'"):
        measure(T5ForConditionalGeneration(config), {"input_ids": batch()["input_ids"]})
