"""transformers' Trainer with jitrope: a tiny Qwen3 with random weights, trained stock and with jitrope.

python examples/transformers_trainer.py

Only the `with enable(...)` line is jitrope's. Losses and trained weights of both runs are compared, and the saved model
is loaded without jitrope. Nothing is downloaded. It needs transformers and accelerate, and runs on a GPU in bf16 or on
a CPU in fp32.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # for several GPUs use torchrun, and enable() in each process

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Trainer, TrainingArguments

from jitrope.integrations import transformers as jitrope_transformers

GPU = torch.cuda.is_available()
VOCABULARY, STEPS, BATCH, TOKENS = 256, 4, 8, 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}


def train(folder: str, jitrope: bool) -> tuple[float, PreTrainedModel]:
    """The mean loss of all steps, and the trained model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.bfloat16 if GPU else torch.float32)
    texts = (torch.randint(VOCABULARY, (STEPS * BATCH, 1)) + torch.arange(TOKENS)) % VOCABULARY  # each counts up
    data = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3, use_cpu=not GPU,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=GPU,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    # Until the block ends. Without one: report = enable(model), and disable() if ever.
    with jitrope_transformers.enable(model) if jitrope else contextlib.nullcontext() as report:
        loss = trainer.train().training_loss
    if report:
        print(report)
        layers = SIZES["num_hidden_layers"] * STEPS
        say(f"norms and rope were one launch in each of {layers} calls", report.calls["fused"] == layers)
        say("no call was left to transformers", report.calls["host"] == 0)
        trainer.save_model(folder)
    return loss, model.eval()


def say(what: str, right: bool) -> None:
    print(f"{what}: {'yes' if right else 'NO'}")
    if not right:
        raise SystemExit(f"not so: {what}")


def main(folder: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    loss, stock = train(folder, jitrope=False)
    our_loss, ours = train(folder, jitrope=True)
    limit = 1e-2 if GPU else 1e-5  # gradients are rounded once, and added in another order
    a, b = (torch.cat([p.detach().float().flatten() for p in model.parameters()]) for model in (stock, ours))
    say(f"the mean loss of {STEPS} steps is the stock run's, within {limit} of it", abs(our_loss / loss - 1) < limit)
    say(f"so are the trained weights, within {limit}", float((a - b).norm() / a.norm()) < limit)

    loaded = AutoModelForCausalLM.from_pretrained(folder).to(ours.device).eval()
    text = torch.arange(TOKENS, device=ours.device)[None]
    with torch.no_grad():
        same = torch.equal(loaded(text).logits, ours(text).logits)
    say("the saved model, loaded without jitrope, gives the same logits", same)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="jitrope-example-") as name:
        main(name)
