-- Numbers that scripts rely on: memory of tensors in loops, sums of many small gradients, large arguments, noise in a forward.
local dt = require "dtrain"
local support = require "support"
local nn, optim, data = dt.nn, dt.optim, dt.data

local function run(script, options, flags)
  local dir = support.folder()
  support.write(dir .. "/s.lua", script)
  local code, text = support.sh(support.dtrain .. " " .. dir .. "/s.lua " .. (flags or ""), options)
  assert.are.equal(0, code, text)
  return text
end

describe("numbers", function()
  local peak = [[
for line in io.lines "/proc/self/status" do
  local kb = line:match "VmHWM:%s+(%d+)"
  if kb and dt.rank() == 0 then print("peak " .. kb) end
end
]]
  it("of tensors that nobody holds take no memory", function()
    local text = run([[local dt = require "dtrain"
local x = dt.ones { 5000000 }
for i = 1, 60 do local y = x + i end
]] .. peak)
    assert.is_true(tonumber(text:match "peak (%d+)") < 400e3, text)
    text = run([[local dt = require "dtrain"
local x = dt.ones { 1000000 }
for i = 1, 60 do local y, z = dt.all_reduce(x, "sum"), dt.all_gather(x) end
]] .. peak, { ranks = 5 })
    assert.is_true(tonumber(text:match "peak (%d+)") < 400e3, text)
  end)

  it("of a million gradients of one row add up", function()
    local n = 1000000
    local ids = dt.zeros({ n }, "i64")
    local g = dt.full({ n, 1 }, 0.1)
    local exact = 0.100000001490116 * n
    local _, grads = dt.value_and_grad(function(m) return (dt.embedding(ids, m.w) * g):sum() end, { w = dt.ones { 2, 1 } })
    assert.is_true(math.abs(grads.w[1]:item() - exact) < 0.01)
    _, grads = dt.value_and_grad(function(m) return (dt.gather(m.w, ids:reshape { n, 1 }, 0) * g):sum() end, { w = dt.ones { 2, 1 } })
    assert.is_true(math.abs(grads.w[1]:item() - exact) < 0.01)
  end)

  it("of sine and cosine are right for any argument, on any instruction set", function()
    local script = [[local dt = require "dtrain"
local x = {}
for i = 1, 400 do x[i] = string.unpack("<f", string.pack("<f", (i % 2 * 2 - 1) * 1.37 ^ i % 3.4e38)) end
local s, c = dt.sin(dt.tensor(x)):totable(), dt.cos(dt.tensor(x)):totable()
for i = 1, 400 do
  assert(math.abs(s[i] - math.sin(x[i])) < 1.3e-7 and math.abs(c[i] - math.cos(x[i])) < 1.3e-7, x[i])
end
print "right"]]
    for _, isa in ipairs { "portable", "avx2" } do assert.matches("right", run(script, { env = "DT_ISA=" .. isa })) end
  end)

  it("that are integers are exact and wrap around as Lua's do, in every operation and chain, on any instruction set", function()
    local script = support.read "tests/dist/integers.lua"
    for _, isa in ipairs { "portable", "avx2" } do assert.matches("exact", run(script, { env = "DT_ISA=" .. isa })) end
    assert.matches("exact", run(script, { ranks = 2 }))
  end)

  it("that an integer dtype can't hold are errors", function()
    local x = dt.tensor({ 1, 2 }, "u8")
    for want, f in pairs {
      ["add: 300 does not fit the dtype u8"] = function() return x + 300 end,
      ["lt: %-1 does not fit the dtype u8"] = function() return x:lt(-1) end,
      ["tensor: 256 does not fit the dtype u8"] = function() return dt.tensor({ 256 }, "u8") end,
      ["full: 1e%+40 does not fit the dtype i64"] = function() return dt.full({ 2 }, 1e40, "i64") end,
      ["clamp: min is 0.5, but the tensor is i64"] = function() return dt.tensor({ 1 }, "i64"):clamp(0.5, 2) end,
      ["pad: value is 0.5, but the tensor is u8"] = function() return x:pad { before = { 1 }, after = { 0 }, value = 0.5 } end,
      ["clamp: max is 300, which the tensor's dtype u8 can't hold"] = function() return x:clamp(0, 300) end,
    } do
      local ok, e = pcall(f)
      assert.is_false(ok)
      assert.matches(want, e)
    end
    assert.are.same({ true, true }, ((dt.tensor { true, true } + dt.tensor { true, true })):totable())
  end)

  it("of gradients may be as large as their dtype allows: the norm is taken, and clips", function()
    local script = [[local dt = require "dtrain"
local nn, data = dt.nn, dt.data
local args = dt.args { clip = false, scale = 1e25 }
local engine = dt.engine(dt.job { model = nn.Linear(3, 1, { bias = false }), batch = 8, steps = 1,
  loss = function(y) return (y * args.scale):mean() end,
  optimizer = dt.optim.SGD { lr = args.clip and 1 or 1 / args.scale }, clip = args.clip and { norm = 1 } or nil,
  data = data.tensors { inputs = dt.ones { 8, 3 }, targets = dt.ones { 8, 1 } } })
local before = engine:state()["weight"]:totable()[1]
for _, batch in engine:batches() do
  local norm = engine:step(batch).grad_norm / args.scale
  assert(math.abs(norm - 3 ^ 0.5) < 1e-6, norm)
end
local after = engine:state()["weight"]:totable()[1]
for i = 1, 3 do assert(math.abs(before[i] - after[i] - (args.clip and 3 ^ -0.5 or 1)) < 1e-6, after[i]) end
print "taken"]]
    for _, options in ipairs { "", "--clip", "--scale 1e38", "--clip --scale 3e38" } do
      assert.matches("taken", run(script, nil, options))
      assert.matches("taken", run(script, { ranks = 2 }, options))
      assert.matches("taken", run(script, { ranks = 2 }, "--parallel zero=2 " .. options))
    end
  end)

  it("of constant rows are exact", function()
    for _, dtype in ipairs { "f32", "f64" } do
      for _, v in ipairs { 0.1, 1e8 / 3, -1e30 / 7 } do
        local x = dt.full({ 3, 1000 }, v, dtype)
        local y = dt.layer_norm(x, { dims = 1 })
        assert.are.equal(0, y:abs():max():item())
      end
    end
  end)

  it("in a nested table are parameters whose values are read like a field's", function()
    local Net = nn.module("Net")
    function Net:init() self.t = { a = nn.parameter({ 2 }, nn.init.constant(3)), l = { nn.parameter({ 2 }, nn.init.constant(4)) } } end
    function Net:forward(x) return x * self.t.a + self.t.l[1] end
    local net = Net()
    assert.are.same({ 7, 10 }, net(dt.tensor { 1.0, 2.0 }):totable())
    assert.are.equal(4, net:count())
    assert.are.same({ "t.a", "t.l.0" }, dt.value_and_grad and (function()
      local names = {}
      for name in net:named_parameters() do names[#names + 1] = name end
      return names
    end)())
    local _, grads = dt.value_and_grad(function(m, x) return m(x):sum() end, net, dt.tensor { 1.0, 2.0 })
    assert.are.same({ 1, 2 }, grads["t.a"]:totable())
  end)

  it("of a leftover microbatch of one row, with a parameter broadcast over the batch", function()
    local function losses(micro)
      local Net = nn.module("Net")
      function Net:init() self.token, self.out = nn.parameter({ 1, 1, 4 }, nn.init.normal(0, 1)), nn.Linear(4, 2) end
      function Net:forward(x)
        local b = x:size(0)
        return self.out(dt.cat({ self.token:broadcast_to { b, 1, 4 }, x:reshape { b, 1, 4 } }, 1)):mean { 1 }
      end
      local engine = dt.engine(dt.job { model = Net(), loss = nn.MSE(), steps = 4, batch = { global = 9, micro = micro },
        data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 9 }, optimizer = optim.SGD { lr = 0.1 } })
      local out = {}
      for step, batch in engine:batches() do out[step] = engine:step(batch).loss end
      return out
    end
    local whole = losses(9)
    for _, micro in ipairs { 4, 2, 8 } do
      for step, loss in ipairs(losses(micro)) do assert.is_true(math.abs(loss - whole[step]) < 1e-6) end
    end
  end)

  it("of causal attention with unequal lengths are aligned as asked", function()
    for _, case in ipairs { { 3, 5 }, { 5, 3 } } do
      local T, S = table.unpack(case)
      local m = { q = dt.randn({ 1, 1, T, 4 }, 1), k = dt.randn({ 1, 1, S, 4 }, 2), v = dt.randn({ 1, 1, S, 4 }, 3) }
      for _, align in ipairs(T <= S and { "top_left", "bottom_right" } or { "top_left" }) do
        local mask = {}
        for i = 1, T do
          mask[i] = {}
          for j = 1, S do mask[i][j] = j <= i + (align == "top_left" and 0 or S - T) and 0.0 or -1e30 end
        end
        local function plain(p)
          return dt.matmul(dt.softmax(dt.matmul(p.q, p.k, { tb = true }) / 2 + dt.tensor(mask), -1), p.v)
        end
        local function ours(p) return dt.attention(p.q, p.k, p.v, { causal = true, causal_align = align }) end
        assert.is_true(dt.allclose(ours(m), plain(m), { rtol = 1e-5, atol = 1e-6 }))
        local _, a = dt.value_and_grad(function(p) return ours(p):square():sum() end, m)
        local _, b = dt.value_and_grad(function(p) return plain(p):square():sum() end, m)
        for _, name in ipairs { "q", "k", "v" } do assert.is_true(dt.allclose(a[name], b[name], { rtol = 1e-5, atol = 1e-5 })) end
      end
    end
    local x = dt.ones { 1, 1, 2, 4 }
    assert.has_error(function() dt.attention(x, x, x, { causal_align = "x" }) end)
  end)

  it("of an evaluation with fewer samples than ranks are those of one process", function()
    local script = [[local dt = require "dtrain"
local nn, data = dt.nn, dt.data
return dt.job { model = nn.Linear(4, 3), loss = nn.CrossEntropy(), batch = 8, steps = 2, optimizer = dt.optim.SGD { lr = 0.05 },
  data = { train = data.synthetic { inputs = { 4 }, classes = 3, samples = 16 },
    valid = data.synthetic { inputs = { 4 }, classes = 3, samples = 3, seed = 4 } },
  eval = { metrics = { "accuracy", "top_2" } } }]]
    local one = run(script):match "eval 2[^\n]+"
    assert.matches("accuracy", one)
    assert.are.equal(one, run(script, { ranks = 4 }):match "eval 2[^\n]+")
    assert.are.equal(one, run(script, { ranks = 4 }, "--parallel tensor=2"):match "eval 2[^\n]+")
  end)

  it("of an id out of range are an error", function()
    assert.has_error(function() dt.one_hot(dt.tensor({ 0, 3 }, "i64"), { classes = 3 }) end)
  end)

  it("drawn outside are within their range, and each once in a permutation", function()
    local x = dt.randint(-2, 5, { 4000 }, 1)
    assert.are.same({ -2, 4 }, { x:min():item(), x:max():item() })
    assert.is_true(math.abs(x:to("f32"):mean():item() - 1) < 0.15)
    local p, seen = dt.randperm(100, 3):totable(), {}
    for _, v in ipairs(p) do seen[v] = true end
    for i = 0, 99 do assert.is_true(seen[i]) end
    assert.are_not.same(p, dt.randperm(100, 4):totable())
  end)
end)

describe("noise in a forward", function()
  local script = support.read "tests/dist/noise.lua"
  local function losses(options, flags)
    local out = {}
    for loss in run(script, options, "--quiet " .. (flags or "")):gmatch "loss ([%d.]+)" do out[#out + 1] = tonumber(loss) end
    assert.are.equal(6, #out)
    return out
  end
  local function near(a, b, tolerance)
    for i = 1, 6 do assert.is_true(math.abs(a[i] - b[i]) <= tolerance * a[i], ("%g, %g"):format(a[i], b[i])) end
  end
  it("is drawn anew in each step, and is the same for any number of ranks, microbatches and parts", function()
    local one = losses()
    for i = 2, 6 do assert.is_true(math.abs(one[i] - one[i - 1]) > 1e-4) end
    near(one, losses({ ranks = 2 }), 1e-5)
    near(one, losses({ ranks = 4 }), 1e-5)
    near(one, losses(nil, "--micro 3"), 1e-5)
    near(one, losses({ ranks = 2 }, "--tensor 2"), 1e-5)
    local other = losses(nil, "--seed 5")
    assert.is_true(math.abs(other[1] - one[1]) > 1e-4)
  end)
  it("is drawn in 16 bits", function()
    for _, precision in ipairs { "bf16", "f16" } do
      near(losses(nil, "--precision " .. precision), losses({ ranks = 2 }, "--precision " .. precision), 1e-3)
    end
  end)
  it("is of its distribution", function()
    local Net = nn.module("Net")
    function Net:init() self.w = nn.parameter({ 1 }, nn.init.ones()) end
    function Net:forward(x)
      local n = dt.randn(x:shape())
      self.seen = true
      return dt.stack({ n:mean(), n:square():mean(), (n * n * n):mean(), dt.rand(x:shape()):mean() }, 0) * self.w
    end
    local engine = dt.engine(dt.job { model = Net(), steps = 2,
      loss = function(y) return ((y - dt.tensor { 0.0, 1.0, 0.0, 0.5 }):abs()):max() end,
      batch = 100, data = data.synthetic { inputs = { 1001 }, targets = { 1 }, samples = 100 }, optimizer = optim.SGD { lr = 0 } })
    for _, batch in engine:batches() do assert.is_true(engine:step(batch).loss < 0.03) end
  end)
end)
