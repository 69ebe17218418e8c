"""transformers' `Trainer` on a tiny GPT-2, with its own checkpoints.

    torchrun --nproc-per-node=2 hf_trainer.py --output_dir out

It continues from the last checkpoint in that folder, as the examples of transformers do. `--die_at` is for
tests: the step at which the last rank kills itself, if it has not resumed.
"""

import argparse
import os
import signal

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

SAMPLES = 8  # of all ranks in a step


class Die(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_steps", type=int, default=8)
parser.add_argument("--die_at", type=int)
options = parser.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
tokens = torch.randint(0, 32, (64, 17))
data = [{"input_ids": row, "labels": row} for row in tokens]
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # its masks depend on the rank
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=17, n_embd=16, n_layer=1, n_head=2, **no_dropout)
)
arguments = TrainingArguments(
    output_dir=options.output_dir, max_steps=options.max_steps, per_device_train_batch_size=SAMPLES // ranks,
    learning_rate=1e-2, logging_steps=1, save_steps=3, save_total_limit=2, seed=0, use_cpu=True,
    report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
)  # fmt: skip
callbacks = [Print()]
last = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
if options.die_at and last is None:
    callbacks.append(Die(options.die_at))
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
trainer.train(resume_from_checkpoint=last)
