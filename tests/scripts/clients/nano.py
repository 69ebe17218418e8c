"""One file that trains a small language model, in the manner of nanoGPT: a configuration of globals, an own
checkpoint, `--init_from=resume`, and DDP if RANK is set. Written from nanoGPT's public description.

    torchrun --nproc-per-node=2 nano.py --max_iters=20 --out_dir=out
"""

import math
import os
import sys
from ast import literal_eval

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
init_from = "scratch"
max_iters = 20
eval_interval = 5
batch_size = 8  # of all ranks
block_size = 16
n_embd = 16
learning_rate = 3e-3
compile = False
die_at = -1  # for tests: the process kills itself before this iteration, if it has not resumed

for word in sys.argv[1:]:
    key, _, value = word.removeprefix("--").partition("=")
    assert key in globals(), key
    try:
        globals()[key] = type(globals()[key])(literal_eval(value))
    except (SyntaxError, ValueError):
        globals()[key] = value

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
else:
    rank, ranks = 0, 1
if rank == 0:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
text = " ".join(f"{a} plus {b} is {a + b}." for a in range(20) for b in range(20))
symbols = sorted(set(text))
data = torch.tensor([symbols.index(symbol) for symbol in text])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(len(symbols), n_embd)
        self.block = torch.nn.TransformerEncoderLayer(n_embd, 2, 4 * n_embd, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(n_embd, len(symbols))

    def forward(self, tokens, targets):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(iteration):
    """The same samples whatever the number of ranks; each rank takes its share."""
    generator = torch.Generator().manual_seed(iteration)
    starts = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    starts = starts[rank * batch_size // ranks : (rank + 1) * batch_size // ranks]
    return (
        torch.stack([data[start : start + block_size] for start in starts]),
        torch.stack([data[start + 1 : start + 1 + block_size] for start in starts]),
    )


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
first = 0
checkpoint = os.path.join(out_dir, "ckpt.pt")
if init_from == "resume":
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["iter_num"]
    print(f"resuming after iter {first}")
raw_model = model
if ddp:
    model = DistributedDataParallel(model)
for iter_num in range(first, max_iters):
    if iter_num == die_at and init_from == "scratch" and rank == ranks - 1:
        os.kill(os.getpid(), 9)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    loss = model(*batch(iter_num))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    mean = loss.detach() / ranks
    if ddp:
        dist.all_reduce(mean)
    if rank == 0:
        print(f"iter {iter_num}: loss {mean.item():.6f}")
        if (iter_num + 1) % eval_interval == 0:
            state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "iter_num": iter_num + 1}, f"{checkpoint}.part")
            os.replace(f"{checkpoint}.part", checkpoint)
    if ddp:
        dist.barrier()
if ddp:
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo abort some processes at a plain exit (torch 2.13, docs/own-script.md)
