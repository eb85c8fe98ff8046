"""Fine-tune a small GPT-2 and see whether its minimum got flatter.

A GPT-2 with random weights learns sequences that count upwards, and is then fine-tuned on sequences that count in
steps of two: all of its parameters, its last block alone, or, where peft is installed, LoRA adapters. Hugging Face's
models compare each output with the next label; so does saltflat, and the losses printed are the model's own.
"""

import os
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch
from common import parse_arguments
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import saltflat

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
STEPS = 20 if QUICK else 300
WORDS, LENGTH, EXAMPLES = 24, 12, 64
MEASURES = ("hessian_trace", "normalized_sharpness", "fisher_rao_norm")


def make_sequences(step: int, seed: int) -> dict[str, Tensor]:
    """Return sequences that count in steps, from random numbers on."""
    start = torch.randint(WORDS, (EXAMPLES, 1), generator=torch.Generator().manual_seed(seed))
    ids = (start + step * torch.arange(LENGTH)) % WORDS
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def train(model: Any, data: dict[str, Tensor], steps: int) -> float:
    """Train with Adam, and return the model's own loss at the end."""
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**data).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(model(**data).loss)


def list_ways(base: GPT2LMHeadModel) -> Iterator[tuple[str, Any]]:
    """Yield copies of the model with what is fine-tuned."""
    yield "all parameters", deepcopy(base)
    last = deepcopy(base)
    for name, each in last.named_parameters():
        each.requires_grad_(name.startswith("transformer.h.1."))
    yield "last block", last
    if find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        yield "LoRA", get_peft_model(deepcopy(base), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def main() -> None:
    out, seed = parse_arguments(__doc__, quick="training stops after 20 steps", seed="weights and sequences")
    torch.set_num_threads(1)  # more are slower for so small a model
    torch.manual_seed(seed)
    size: dict[str, Any] = {
        "loss_type": "ForCausalLM",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    base = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **size))
    train(base, make_sequences(1, seed), STEPS)
    data = make_sequences(2, seed + 1)
    print(
        f"{'fine-tuned':<22}{'parameters':>11}{'own loss':>10}{'measured':>10}" + "".join(f"{m:>24}" for m in MEASURES)
    )
    for name, model in list_ways(base):
        for steps in (0, STEPS):
            own = train(model, data, steps)
            report = saltflat.measure(model, data, "model", measures=list(MEASURES), columns="sampled:4", seed=seed)
            count = sum(each.numel() for each in model.parameters() if each.requires_grad)
            values = "".join(f"{float(report[m]):>24.4g}" for m in MEASURES)
            print(f"{name + ', after' * bool(steps):<22}{count:>11,}{own:>10.4f}{report.loss:>10.4f}{values}")
        report.save(out / f"{name.split()[0].lower()}.json")
    print(f"\nA row without 'after' is from before fine-tuning. Wrote the reports to {out}.")


if __name__ == "__main__":
    main()
