-- Modules: paths, initial values, shapes, the printed tree, layers against formulas, gradients on concrete tensors.
local dt = require "dtrain"
local nn = dt.nn

local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  return e
end

local function names(model)
  local out = {}
  for name in model:named_parameters() do out[#out + 1] = name end
  return out
end

local function close(got, want, tolerance)
  assert.are.same(want:shape(), got:shape())
  assert.is_true(dt.allclose(got, want, { rtol = tolerance or 1e-5, atol = tolerance or 1e-6 }),
    ("got %s\nwanted %s"):format(tostring(got), tostring(want)))
end

describe("nn.module", function()
  local Block = nn.module("Block")
  function Block:init(n)
    self.zeta = nn.Linear(n, n)
    self.alpha = nn.Linear(n, n, { bias = false })
    self.list = { nn.LayerNorm(n), nn.ReLU(), nn.LayerNorm(n) }
    self.scale = nn.parameter({ n }, nn.init.ones())
    self.seen = nn.buffer({ 1 })
  end
  function Block:forward(x) return self.zeta(x) * self.scale end

  it("names parameters in the order of assignment, lists from 0", function()
    assert.are.same({ "zeta.weight", "zeta.bias", "alpha.weight", "list.0.weight", "list.0.bias", "list.2.weight",
      "list.2.bias", "scale", "seen" }, names(Block(3)))
  end)
  it("counts a shared module once", function()
    local Tied = nn.module("Tied")
    function Tied:init()
      self.a = nn.Linear(4, 4)
      self.b = self.a
    end
    assert.are.equal(20, Tied():count())
    assert.are.same({ "a.weight", "a.bias" }, names(Tied()))
  end)
  it("runs on concrete tensors", function()
    local b = Block(3)
    local x = dt.rand({ 2, 3 }, 1)
    close(b(x), dt.matmul(x, b.zeta.weight:t()) + b.zeta.bias)
  end)
  it("loads values by name and refuses wrong ones", function()
    local m = nn.Linear(2, 2)
    m:load { weight = dt.tensor { { 1.0, 2.0 }, { 3.0, 4.0 } }, bias = dt.tensor { 0.5, 0.5 } }
    close(m(dt.tensor { { 1.0, 1.0 } }), dt.tensor { { 3.5, 7.5 } })
    assert.matches("did you mean 'weight'", message(m.load, m, { weigth = dt.ones { 2, 2 } }))
    assert.matches("no value for the parameter 'bias'", message(m.load, m, { weight = dt.ones { 2, 2 } }))
    assert.matches("shape", message(m.load, m, { weight = dt.ones { 3, 2 }, bias = dt.ones { 2 } }))
  end)
  it("explains a missing forward", function()
    local Empty = nn.module("Empty")
    assert.matches("Empty has no forward", message(Empty(), dt.ones { 1 }))
  end)
  it("prints its tree with counts", function()
    local text = tostring(nn.GPT { vocab = 256, layers = 6, heads = 6, width = 384, context = 256 })
    assert.matches("blocks%.0%-5: 6 x Block", text)
    assert.matches("10,844,160 parameters", text)
  end)
end)

describe("layers", function()
  it("begin as PyTorch's do", function()
    local w = nn.Linear(100, 400).weight
    assert.is_true(dt.abs(w):max():item() <= 0.1)
    assert.is_true(dt.abs(w):max():item() > 0.099)
    assert.is_true(math.abs(dt.std(nn.Embedding(100, 100).weight):item() - 1) < 0.05)
    assert.is_true(math.abs(dt.std(nn.GPT { vocab = 64, layers = 2, heads = 2, width = 64,
      context = 8 }.blocks[1].attn.proj
      .weight):item() - 0.01) < 0.001)
  end)
  it("compute layer norm, RMS norm and group norm", function()
    local x = dt.randn({ 3, 8 }, 1)
    local mean, var = dt.mean(x, { dims = { 1 }, keepdim = true }), dt.var(x, { 1 }, { correction = 0, keepdim = true })
    close(nn.LayerNorm(8)(x), (x - mean) / dt.sqrt(var + 1e-5), 1e-5)
    close(nn.RMSNorm(8)(x), x / dt.sqrt(dt.mean(dt.square(x), { dims = { 1 }, keepdim = true }) + 1e-6), 1e-5)
    close(dt.group_norm(x, 1), (x - mean) / dt.sqrt(var + 1e-5), 1e-5)
  end)
  it("keep batch norm's running statistics", function()
    local m = nn.BatchNorm2d(2)
    local x = dt.randn({ 4, 2, 3, 3 }, 2)
    m:train()
    local y = m(x)
    m:eval()
    assert.is_true(math.abs(y:mean():item()) < 1e-5)
    local mean = dt.mean(x, { dims = { 0, 2, 3 } })
    close(m.running_mean, mean * 0.1, 1e-4)
    close(m.running_var, dt.var(x, { 0, 2, 3 }) * 0.1 + 0.9, 1e-4)
  end)
  it("convolve, pool and flatten to the right shapes", function()
    local net = nn.Sequential { nn.Conv2d(1, 4, 3, { padding = 1, stride = { 1, 2 } }), nn.ReLU(), nn.MaxPool2d(2),
      nn.AvgPool2d({ 2, 1 }), nn.Flatten(), nn.Linear(24, 5) }
    assert.are.same({ 2, 5 }, net(dt.rand({ 2, 1, 8, 12 }, 3)):shape())
  end)
  it("average to sizes that do not divide", function()
    local y = dt.adaptive_avg_pool2d(dt.arange(15):to "f32":reshape { 1, 1, 3, 5 }, { 2, 3 })
    close(y:reshape { 6 }, dt.tensor { 3.0, 4.5, 6.0, 8.0, 9.5, 11.0 })
  end)
  it("attend causally, and with fewer key heads", function()
    local attn = nn.Attention { width = 16, heads = 4, kv_heads = 2, rotary = true }
    local x = dt.randn({ 1, 6, 16 }, 4)
    local y = attn(x)
    local head = attn(x:slice { dim = 1, start = 0, stop = 3 })
    close(y:slice { dim = 1, start = 0, stop = 3 }, head, 1e-4)
  end)
  it("drop only while training", function()
    local x = dt.ones { 100 }
    close(nn.Dropout(0.5)(x), x)
  end)
  it("compute the activations that are compositions", function()
    local x = dt.tensor { -4.0, -1.0, 0.0, 2.0, 5.0 }
    close(dt.leaky_relu(x), dt.tensor { -0.04, -0.01, 0.0, 2.0, 5.0 })
    close(dt.elu(x), dt.tensor { math.exp(-4) - 1, math.exp(-1) - 1, 0.0, 2.0, 5.0 })
    close(dt.hardswish(x), dt.tensor { 0.0, -1 / 3, 0.0, 5 / 3, 5.0 })
    close(dt.logsumexp(x), dt.tensor(math.log(math.exp(-4) + math.exp(-1) + 1 + math.exp(2) + math.exp(5))))
  end)
  it("stack, split, squeeze and flatten as PyTorch does", function()
    local a, b = dt.tensor { 1.0, 2.0 }, dt.tensor { 3.0, 4.0 }
    close(dt.stack({ a, b }, 1), dt.tensor { { 1.0, 3.0 }, { 2.0, 4.0 } })
    close(dt.cat({ a, b }, 0), dt.tensor { 1.0, 2.0, 3.0, 4.0 })
    local p, q = dt.chunk(dt.arange(5), 2)
    assert.are.same({ { 3 }, { 2 } }, { p:shape(), q:shape() })
    local x, sizes, at = dt.rand({ 2, 90 }, 1), {}, 0 -- more pieces than one operation makes
    for i = 1, 70 do sizes[i] = i % 10 == 0 and 3 or i % 7 == 0 and 0 or 1 end
    sizes[70] = 90
    for i = 1, 69 do sizes[70] = sizes[70] - sizes[i] end
    local pieces = { x:split(sizes, 1) }
    assert.are.equal(70, #pieces)
    for i, piece in ipairs(pieces) do
      close(piece, x:slice { dim = 1, start = at, stop = at + sizes[i] })
      at = at + sizes[i]
    end
    assert.are.equal(9, select("#", x:chunk(9, 1)))
    assert.has_error(function() x:split({ 1, 1, 1, 1, 1, 1, 1, 1, 83 }, 1) end,
      "split: the sizes [8,83] add up to 91, but dim 1 of [2,90] has 90")
    assert.are.same({ 2, 1, 6 }, dt.rand({ 2, 1, 2, 3 }, 1):flatten(2):shape())
    assert.are.same({ 2, 3 }, dt.rand({ 2, 1, 3 }, 1):squeeze(1):unsqueeze(0):squeeze():shape())
  end)
end)

describe("losses", function()
  local y, t = dt.tensor { { 0.5, -2.0 }, { 3.0, 0.0 } }, dt.tensor { { 0.0, 1.0 }, { 1.0, 0.0 } }
  it("equal their formulas", function()
    close(nn.mse(y, t), dt.tensor((0.25 + 9 + 4) / 4))
    close(nn.l1(y, t), dt.tensor((0.5 + 3 + 2) / 4))
    close(nn.huber(y, t), dt.tensor((0.125 + 2.5 + 1.5) / 4))
    close(nn.Huber { delta = 2 }(y, t), dt.tensor((0.125 + 4 + 2) / 4))
    local function bce(x, z) return math.max(x, 0) - x * z + math.log(1 + math.exp(-math.abs(x))) end
    close(nn.bce_with_logits(y, t), dt.tensor((bce(0.5, 0) + bce(-2, 1) + bce(3, 1) + bce(0, 0)) / 4))
  end)
  it("count the labels of cross entropy", function()
    local loss, count = nn.cross_entropy(y, dt.tensor({ 1, -100 }, "i64"))
    assert.are.equal(1, count:item())
    close(loss, dt.tensor(math.log(1 + math.exp(2.5))))
  end)
  it("want equal shapes", function()
    assert.matches("shapes must be equal", message(nn.mse, y, dt.ones { 2 }))
  end)
end)

describe("dt.value_and_grad", function()
  it("gives the gradient of each parameter", function()
    local model = nn.Linear(3, 2)
    local x, t = dt.randn({ 5, 3 }, 1), dt.randn({ 5, 2 }, 2)
    local loss, grads = dt.value_and_grad(function(m, b) return nn.mse(m(b.x), b.t) end, model, { x = x, t = t })
    local d = (model(x) - t) * (2 / 10)
    close(loss, nn.mse(model(x), t))
    close(grads.weight, dt.matmul(d:t(), x), 1e-5)
    close(grads.bias, dt.sum(d, { dims = { 0 } }), 1e-5)
  end)
  it("takes a table of tensors", function()
    local _, grads = dt.value_and_grad(function(p) return dt.sum(p.a * p.b) end, { a = dt.tensor { 2.0 },
      b = dt.tensor { 5.0 } })
    assert.are.same({ 5, 2 }, { grads.a:item(), grads.b:item() })
  end)
  it("wants a scalar", function()
    assert.matches("scalar", message(dt.value_and_grad, function(m, x) return m(x) end, nn.Linear(2, 2),
      dt.ones { 1, 2 }))
  end)
end)

describe("dt.allclose", function()
  it("compares shapes and values", function()
    local a = dt.tensor { 1.0, 2.0 }
    assert.is_true(dt.allclose(a, a * (1 + 1e-6)))
    assert.is_false(dt.allclose(a, a * 1.01))
    assert.is_false(dt.allclose(a, dt.ones { 3 }))
    assert.is_true(dt.allclose(dt.tensor { math.huge }, dt.tensor { math.huge }))
    local nan = dt.tensor { 0 / 0 }
    assert.is_false(dt.allclose(nan, nan))
    assert.is_true(dt.allclose(nan, nan, { equal_nan = true }))
  end)
end)
