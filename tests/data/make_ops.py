#!/usr/bin/env python3
"""Makes ops.safetensors with PyTorch (2.15 was used): inputs, outputs, upstream gradients and input gradients of each case,
computed in f64 and stored in f32. Usage: python make_ops.py OUT. Needs torch and safetensors; tests only read the result."""
import sys, os, torch, torch.nn.functional as F
from safetensors.torch import save_file
OUT = sys.argv[1]; HELD = False; SEED = 1234
torch.manual_seed(SEED); torch.set_num_threads(1)
os.makedirs(OUT, exist_ok=True)

# ---- ops: computed in f64, stored in f32 -----------------------------------------------------------
tens, cases = {}, []
def case(name, op, attrs, fn, inputs, ints=(), nograd=()):
    torch.manual_seed(SEED + len(cases))
    ins = {k: (v if k in ints else v.double()) for k, v in inputs.items()}
    for k, v in ins.items():
        if k not in ints and k not in nograd: v.requires_grad_(True)
    out = fn(**ins); outs = out if isinstance(out, tuple) else (out,)
    gys = [torch.randn_like(o) for o in outs]
    sum((o * g).sum() for o, g in zip(outs, gys)).backward()
    c = dict(name=name, op=op, attrs=attrs, inputs=list(ins), outputs=len(outs), grads=[])
    for k, v in ins.items():
        tens[f"{name}.in.{k}"] = v.detach().to(torch.int64 if k in ints else torch.float32).contiguous()
        if k not in ints and v.grad is not None:
            tens[f"{name}.grad.{k}"] = v.grad.float().contiguous(); c["grads"].append(k)
    for i, (o, g) in enumerate(zip(outs, gys)):
        tens[f"{name}.out.{i}"] = o.detach().float().contiguous(); tens[f"{name}.gout.{i}"] = g.float().contiguous()
    cases.append(c)
r = lambda *s: torch.randn(*s)
k = 1 if HELD else 0
B = 3 + k
case("linear", "linear", {}, lambda x, w, b: F.linear(x, w, b), dict(x=r(B, 7, 10), w=r(6 + k, 10), b=r(6 + k)))
case("matmul_batched", "matmul", {}, lambda a, b: a @ b, dict(a=r(2, 1, 5, 7 + k), b=r(3, 7 + k, 4)))
for n, a in dict(conv=dict(), conv_stride2_pad1=dict(stride=2, padding=1), conv_dil2=dict(dilation=2), conv_groups2=dict(groups=2, padding=1),
                 conv_rect=dict(stride=(1, 2), padding=(2, 0))).items():
    g = a.get("groups", 1); kh = (3, 5) if n == "conv_rect" else (3, 3)
    case(n, "conv2d", {q: v for q, v in a.items()}, lambda x, w, b, a=a: F.conv2d(x, w, b, **a), dict(x=r(2 + k, 4, 9, 11), w=r(6, 4 // g, *kh), b=r(6)))
for n, a in dict(maxpool=dict(kernel_size=2), maxpool_3s2p1=dict(kernel_size=3, stride=2, padding=1)).items():
    case(n, "max_pool2d", a, lambda x, a=a: F.max_pool2d(x, **a), dict(x=r(2, 3, 8 + k, 9)))
case("avgpool", "avg_pool2d", dict(kernel_size=2), lambda x: F.avg_pool2d(x, 2), dict(x=r(2, 3, 8, 10)))
case("adaptive_avg", "adaptive_avg_pool2d", dict(output_size=1), lambda x: F.adaptive_avg_pool2d(x, 1), dict(x=r(2, 3, 7, 5)))
case("layer_norm", "layer_norm", dict(eps=1e-5), lambda x, w, b: F.layer_norm(x, (12 + k,), w, b), dict(x=r(B, 5, 12 + k), w=r(12 + k), b=r(12 + k)))
case("rms_norm", "rms_norm", dict(eps=1e-6), lambda x, w: F.rms_norm(x, (12 + k,), w, 1e-6), dict(x=r(B, 5, 12 + k), w=r(12 + k)))
case("batch_norm_train", "batch_norm", dict(training=True, eps=1e-5), lambda x, w, b: F.batch_norm(x, None, None, w, b, True), dict(x=r(4, 3, 5, 6), w=r(3), b=r(3)))
case("group_norm", "group_norm", dict(groups=2, eps=1e-5), lambda x, w, b: F.group_norm(x, 2, w, b), dict(x=r(2, 6, 4, 5), w=r(6), b=r(6)))
case("embedding", "embedding", {}, lambda ids, w: F.embedding(ids, w), dict(ids=torch.randint(0, 11, (B, 6)), w=r(11, 8)), ints=("ids",))
for n, f in dict(relu=F.relu, gelu=F.gelu, silu=F.silu, softplus=F.softplus, tanh=torch.tanh, sigmoid=torch.sigmoid, erf=torch.erf, leaky_relu=F.leaky_relu, elu=F.elu, hardswish=F.hardswish, mish=F.mish).items():
    case(n, n, {}, lambda x, f=f: f(x), dict(x=3 * r(5, 7)))
case("gelu_tanh", "gelu", dict(approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), dict(x=3 * r(5, 7)))
case("softmax", "softmax", dict(dim=-1), lambda x: F.softmax(x, -1), dict(x=3 * r(4, 9)))
case("softmax_dim1", "softmax", dict(dim=1), lambda x: F.softmax(x, 1), dict(x=3 * r(2, 5, 3)))
case("log_softmax", "log_softmax", dict(dim=-1), lambda x: F.log_softmax(x, -1), dict(x=3 * r(4, 9)))
case("cumsum", "cumsum", dict(dim=1), lambda x: x.cumsum(1), dict(x=r(3, 6, 2)))
case("logsumexp", "logsumexp", dict(dim=-1), lambda x: torch.logsumexp(x, -1), dict(x=3 * r(4, 9)))
case("var", "var", dict(dim=-1, correction=0), lambda x: x.var(-1, correction=0), dict(x=r(4, 9)))
case("max_dim", "max", dict(dim=1), lambda x: x.max(1).values, dict(x=r(4, 9)))
for n, a in dict(sdpa=dict(is_causal=False), sdpa_causal=dict(is_causal=True)).items():
    case(n, "attention", a, lambda q, k, v, a=a: F.scaled_dot_product_attention(q, k, v, **a), dict(q=r(2, 4, 7 + k, 8), k=r(2, 4, 7 + k, 8), v=r(2, 4, 7 + k, 8)))
case("sdpa_gqa", "attention", dict(is_causal=True, note="4 query heads, 2 key/value heads"), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
     dict(q=r(2, 4, 9, 8), k=r(2, 2, 9, 8), v=r(2, 2, 9, 8)))
case("sdpa_cross", "attention", dict(is_causal=False, note="5 queries, 8 keys"), lambda q, k, v: F.scaled_dot_product_attention(q, k, v), dict(q=r(2, 2, 5, 16), k=r(2, 2, 8, 16), v=r(2, 2, 8, 16)))
tg = torch.randint(0, 9, (12,)); tg2 = tg.clone(); tg2[[1, 5]] = -100
case("cross_entropy", "cross_entropy", dict(reduction="mean"), lambda x, t: F.cross_entropy(x, t), dict(x=3 * r(12, 9), t=tg), ints=("t",))
case("cross_entropy_ignore_smooth", "cross_entropy", dict(ignore_index=-100, label_smoothing=0.1), lambda x, t: F.cross_entropy(x, t, ignore_index=-100, label_smoothing=0.1), dict(x=3 * r(12, 9), t=tg2), ints=("t",))
for n, f in dict(mse=F.mse_loss, l1=F.l1_loss, huber=F.huber_loss, smooth_l1=F.smooth_l1_loss).items():
    case(n, n, {}, lambda x, y, f=f: f(x, y), dict(x=2 * r(6, 5), y=2 * r(6, 5)), nograd=("y",))
case("bce_logits", "bce_with_logits", {}, lambda x, y: F.binary_cross_entropy_with_logits(x, y), dict(x=2 * r(6, 5), y=torch.randint(0, 2, (6, 5)).float()), nograd=("y",))
def rope(x, theta=10000.0):
    T, D = x.shape[-2:]; inv = theta ** (-torch.arange(0, D, 2).double() / D); f = torch.outer(torch.arange(T).double(), inv); c, s = torch.cat([f.cos()] * 2, -1), torch.cat([f.sin()] * 2, -1)
    return x * c + torch.cat([-x[..., D // 2:], x[..., :D // 2]], -1) * s
case("rotary_half", "rotary", dict(theta=10000.0, layout="halves"), rope, dict(x=r(2, 3, 6, 8)))
save_file(tens, f"{OUT}/ops.safetensors")
