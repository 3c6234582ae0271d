-- The dtype in which an operation computes: a job's, the script's own by x:to, and a strategy's by its verb precision. One number goes
-- through a model, so that what comes out is known to the bit: exp(1) in f32, or rounded to 16 bits (a sum reads it, because a chain
-- of elementwise operations rounds at its end alone).
local dt = require "dtrain"
local support = require "support"

local e = math.exp(1)
local function rounded(v, dtype) return dt.tensor({ v }, "f32"):to(dtype):to "f32":item() end

-- The loss of f(w) with w = 1, and its derivative by w, in a job of this precision.
local function run(precision, f, verb)
  local Net = dt.nn.module "Net"
  function Net:init() self.w = dt.nn.parameter({ 1, 1 }, dt.nn.init.ones()) end
  function Net:forward(x) return f(x * self.w):sum { dims = { 0 } } end
  local engine = dt.engine(dt.job { model = Net(), loss = function(y) return y:mean() end, batch = 1,
    precision = precision == "f16" and { dtype = "f16", loss_scale = 128 } or precision,
    data = dt.data.tensors { inputs = dt.ones { 2, 1 }, targets = dt.zeros { 2, 1 } }, optimizer = dt.optim.SGD { lr = 0.1 },
    steps = 1, parallel = verb and { strategies = { { precision = verb } } } or {} })
  local loss = engine:step().loss
  local gradient = engine:whole("grad:w"):item()
  engine.exec:close()
  return loss, gradient
end

local function near(want, got, relative)
  assert.is_true(math.abs(got - want) <= relative * math.abs(want), ("%.9g, not %.9g"):format(got, want))
end

for _, job in ipairs { "bf16", "f16" } do
  local coarse = job == "bf16" and 2 ^ -8 or 2 ^ -11
  describe(("in a job of %s,"):format(job), function()
    it("an operation computes in 16 bits", function()
      assert.are.equal(rounded(e, job), (run(job, dt.exp)))
    end)
    it('what x:to "f32" gives is computed in f32, and its gradient goes back in 16 bits', function()
      local loss, gradient = run(job, function(y) return dt.exp(y:to "f32") end)
      near(e, loss, 1e-6)
      near(e, gradient, coarse)
    end)
    it('softmax, too, after x:to "f32"', function()
      local loss = run(job, function(y) return dt.softmax(dt.concat({ y:to "f32", y * 2 }, 1), -1):slice { dim = 1, stop = 1 } end)
      near(1 / (1 + e), loss, 1e-6)
    end)
    it("x:to takes it back", function()
      assert.are.equal(rounded(e, job), (run(job, function(y) return dt.exp(y:to "f32"):to(job) end)))
    end)
    it("x:to of the job's dtype before a layer changes nothing", function()
      local weight = dt.tensor({ { 1 / 3 } }, "f32")
      local function layer(convert) return (run(job, function(y) return dt.linear(convert(y), y * 0 + weight) end)) end
      local plain = layer(function(y) return y end)
      assert.are.equal(rounded(rounded(1 / 3, job), job), plain)
      assert.are.equal(plain, layer(function(y) return y:to(job) end))
      assert.are.equal(plain, layer(function(y) return y:to "f32":to(job) end))
    end)
    it("x:dtype() is what a value will have", function()
      local seen
      run(job, function(y)
        local wide = y:to "f32"
        seen = { y:dtype(), wide:dtype(), dt.exp(wide):dtype(), (y * wide):dtype(), wide:to(y:dtype()):dtype(),
          wide:matmul(y):dtype(), wide:matmul(wide):dtype(), y:mean():dtype(), y:gt(0):dtype() }
        return y
      end)
      assert.are.same({ job, "f32", "f32", "f32", job, job, "f32", "f32", "bool" }, seen)
    end)
    it("a strategy's verb precision has an operation and its backward computed in f32", function()
      local loss, gradient = run(job, dt.exp, function(n) return n.op == "exp" and "f32" or nil end)
      near(e, loss, 1e-6)
      near(e, gradient, 1e-6)
    end)
  end)
end

describe("in a job of f32,", function()
  it("a strategy's verb precision has an operation computed in 16 bits", function()
    for _, low in ipairs { "bf16", "f16" } do
      assert.are.equal(rounded(e, low), (run("f32", dt.exp, function(n) return n.op == "exp" and low or nil end)))
    end
  end)
  it('x:to "f32" is x', function() near(e, (run("f32", function(y) return dt.exp(y:to "f32") end)), 1e-6) end)
end)

describe("an example's strategy in bf16 equals one process:", function()
  local dir = support.folder()
  for _, name in ipairs { "conv_channels", "ring_attention" } do
    it(name, function()
      local text, n = support.read("examples/strategies/" .. name .. ".lua"):gsub("(return dt.job {)", '%1 precision = "bf16",')
      assert.are.equal(1, n)
      support.write(dir .. "/low.lua", text)
      local code, said = support.run(("check %s/low.lua --ranks 2"):format(dir), { seconds = 120 })
      assert.are.equal(0, code, said)
    end)
  end
end)

describe("norms and heads in f32 in a job of bf16", function()
  local dir = support.folder()
  support.write(dir .. "/gpt.lua", [[
local dt = require "dtrain"
local careful = {}
function careful.precision(node) if node.op == "layer_norm" or node.op == "cross_entropy" then return "f32" end end
return dt.job { model = dt.nn.GPT { vocab = 64, layers = 2, heads = 4, width = 32, context = 16 }, loss = dt.nn.CrossEntropy(),
  data = dt.data.synthetic { tokens = 64, context = 16, samples = 64 }, batch = { global = 8, micro = 2 }, precision = "bf16",
  optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = 3,
  parallel = { strategies = dt.args { careful = 1 }.careful > 0 and { careful } or {} } }]])
  for _, c in ipairs { { 2, "zero=3" }, { 2, "pipeline=2" }, { 4, "tensor=2,sequence=true,zero=1" } } do
    it(("equal one process with %s on %d ranks"):format(c[2], c[1]), function()
      local code, text = support.run(("check %s/gpt.lua --ranks %d --parallel %s"):format(dir, c[1], c[2]), { seconds = 120 })
      assert.are.equal(0, code, text)
    end)
  end
  it("are planned, to the byte: more activations than without", function()
    local function activations(words)
      local code, text = support.run(("plan %s/gpt.lua --ranks 1 %s"):format(dir, words))
      assert.are.equal(0, code, text)
      return tonumber((text:match "activations%s+([%d,]+)":gsub(",", "")))
    end
    assert.is_true(activations "" > activations "--careful 0")
  end)
end)
