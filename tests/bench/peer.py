"""PyTorch's side of a piece of work: peer.py gpt|mlp4|linear|mlp128|cnn [--compile] (under torchrun: DDP over gloo, or --fsdp).

Prints the median step and the peak memory in the form of work.lua. Models, batch sizes and optimizers are those of work.lua."""
import os
import resource
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

WORK, COMPILE, DDP = sys.argv[1], "--compile" in sys.argv, "RANK" in os.environ
LAYERS, HEADS, WIDTH, CONTEXT, VOCAB = 6, 6, 384, 256, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for b in self.blocks:
            h = b(h)
        return F.linear(self.norm(h), self.wte.weight).view(-1, VOCAB)


def adam(ps):
    return torch.optim.Adam(ps, lr=3e-4, fused=True)


def adamw(ps):
    return torch.optim.AdamW(ps, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


ranks = int(os.environ.get("WORLD_SIZE", "1"))
clip, group = None, 1
if WORK == "gpt":
    rows = 8 // ranks
    model, loss, clip, make = GPT(), F.cross_entropy, 1.0, adamw
    x, y = torch.randint(0, VOCAB, (rows, CONTEXT)), torch.randint(0, VOCAB, (rows * CONTEXT,))
elif WORK == "mlp4":
    parts = [z for i in range(4) for z in ([nn.Linear(1024, 1024)] + ([nn.ReLU()] if i < 3 else []))]
    model, loss, make, group = nn.Sequential(*parts), F.mse_loss, adamw, 5
    x, y = torch.randn(64, 1024), torch.randn(64, 1024)
elif WORK == "linear":
    model, loss, make, group = nn.Linear(10, 5), F.mse_loss, lambda ps: torch.optim.SGD(ps, lr=0.01), 300
    x, y = torch.randn(32, 10), torch.randn(32, 5)
elif WORK == "mlp128":
    model, loss, make, group = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), F.cross_entropy, adam, 100
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))
elif WORK == "cnn":
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                          nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    loss, make, group = F.cross_entropy, adam, 3
    x, y = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
else:
    sys.exit(f"no work named {WORK}")

torch.manual_seed(0)
if DDP:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "--fsdp" in sys.argv:  # FSDP2 is ZeRO-3
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
optimizer = make(model.parameters())
run = torch.compile(model) if COMPILE else model


def step():
    value = loss(run(x), y)
    optimizer.zero_grad(set_to_none=True)
    value.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


for _ in range(3):
    step()
times = []
for _ in range(7):
    begin = time.perf_counter()
    for _ in range(group):
        step()
    times.append((time.perf_counter() - begin) / group)
if not DDP or dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024 / 1000
    print(f"RESULT step_us={statistics.median(times) * 1e6:.2f} peak_mb={peak:.1f}", flush=True)
if DDP:
    dist.destroy_process_group()
