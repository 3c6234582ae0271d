-- Gradient hooks, and replicas that step by themselves.
local dt = require "dtrain"
local support = require "support"

local dir = support.folder()

local function model(words, ranks)
  local code, text = support.run(("tests/dist/zero.lua --quiet --report %s/m.safetensors %s"):format(dir, words), { ranks = ranks })
  assert(code == 0, text)
  return dt.load(dir .. "/m.safetensors")
end
local function line(words, ranks)
  local code, text = support.run(("tests/dist/regress.lua --quiet --report %s/r.safetensors %s"):format(dir, words),
    { ranks = ranks })
  assert(code == 0, text)
  return tonumber(text:match "loss ([%d.e+-]+)"), dt.load(dir .. "/r.safetensors")
end
local function distance(a, b)
  a, b = a:to "f64", b:to "f64"
  local d = a - b
  return math.sqrt((d * d):sum():item()) / math.max(math.sqrt((b * b):sum():item()), 1e-30)
end
local function near(got, want, tolerance)
  for name, w in dt.sorted(want) do
    if not name:find "qkv%.bias" then
      local d = distance(got[name], w)
      assert.is_true(d <= tolerance, ("%s: %g"):format(name, d))
    end
  end
end

describe("a gradient hook", function()
  local want
  setup(function() want = model("--clip 0.5", 4) end)
  for zero = 0, 3 do
    for _, c in ipairs { { "mean", 2e-5 }, { "hierarchical", 2e-5 }, { "bf16", 1e-2 } } do
      it(("%s equals the default, zero %d"):format(c[1], zero), function()
        near(model(("--clip 0.5 --hook %s --zero %d"):format(c[1], zero), 4), want, c[2])
      end)
    end
  end
  it("that forgets to average is seen", function()
    assert.is_true(distance(model("--clip 0.5 --hook greatest", 4)["wpe.weight"], want["wpe.weight"]) > 1e-3)
  end)
  it("works after each microbatch", function()
    near(model("--clip 0.5 --hook mean --every micro", 3), want, 2e-5)
  end)
end)

describe("with error feedback", function()
  local plain
  setup(function() plain = line("", 3) end)
  for _, hook in ipairs { "topk", "powersgd", "one_bit" } do
    it(hook .. " converges", function() assert.is_true(line("--hook " .. hook, 3) < 1.1 * plain) end)
    it(hook .. "'s state survives a restart, bit by bit", function()
      local a, b = support.folder(), support.folder()
      local function run(d, words)
        local code, text = support.run(("tests/dist/regress.lua --quiet --hook %s --dir %s %s"):format(hook, d, words),
          { ranks = 3 })
        assert(code == 0, text)
      end
      run(a, "--steps 9")
      run(b, "--steps 4")
      run(b, "--steps 9 --resume auto")
      for _, file in ipairs { "model", "optim" } do
        local name = ("/step-00000009/%s.safetensors"):format(file)
        assert.is_true(support.read(a .. name) == support.read(b .. name))
      end
      local state = dt.load(a .. "/step-00000009/optim.safetensors")["hook.bucket0:error"]
      assert.are.equal(3, state:shape()[1])
    end)
  end
  it("adasum converges", function() assert.is_true(line("--hook adasum", 3) < plain) end)
end)

describe("local steps", function()
  it("that meet after each equal data parallelism", function()
    local _, want = line("--steps_of_job 10", 3)
    local _, got = line("--steps_of_job 10 --every 1", 3)
    near({ weight = got.weight, bias = got.bias }, { weight = want.weight, bias = want.bias }, 1e-6)
  end)
  it("with an outer SGD of rate 1 equal plain averaging", function()
    local _, want = line("--steps_of_job 10 --every 5", 3)
    local _, got = line("--steps_of_job 10 --every 5 --outer 1.0", 3)
    near({ weight = got.weight, bias = got.bias }, { weight = want.weight, bias = want.bias }, 1e-6)
  end)
  it("with momentum outside converge faster here", function()
    assert.is_true(line("--steps_of_job 40 --every 4 --outer 0.7 --momentum 0.9", 3) < line("--steps_of_job 40 --every 4", 3))
  end)
  it("differ between meetings and are saved as they are", function()
    local _, got = line("--steps_of_job 7 --every 4", 2)
    local rows = got["state:weight:replica"]
    assert.are.same({ 2, 8, 12 }, rows:shape())
    assert.is_true(distance(rows:slice { dim = 0, start = 0, stop = 1 }, rows:slice { dim = 0, start = 1, stop = 2 }) > 1e-4)
  end)
  for _, words in ipairs { "--every 4", "--every 4 --outer 0.7 --momentum 0.9", "--independent" } do
    it(words .. " continues with the same bits", function()
      local a, b = support.folder(), support.folder()
      local function run(d, more)
        local code, text = support.run(("tests/dist/regress.lua --quiet --dir %s %s %s"):format(d, words, more), { ranks = 3 })
        assert(code == 0, text)
      end
      run(a, "--steps 9")
      run(b, "--steps 6")
      run(b, "--steps 9 --resume auto")
      for _, file in ipairs { "model", "optim" } do
        local name = ("/step-00000009/%s.safetensors"):format(file)
        assert.is_true(support.read(a .. name) == support.read(b .. name))
      end
    end)
  end
end)

describe("independent replicas", function()
  it("see every sample; the first trains as one process does", function()
    local _, want = line("--steps_of_job 10")
    local _, got = line("--steps_of_job 10 --independent", 2)
    near({ weight = got.weight }, { weight = want.weight }, 1e-6)
  end)
end)

describe("what cannot be", function()
  local function message(script, words, want)
    local code, text = support.run(("plan tests/dist/%s.lua --ranks 2 %s"):format(script, words))
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find(want, 1, true), text)
  end
  it("says so", function()
    message("zero", "--hook shape", "tests/dist/zero.lua:35: the gradient hook returned f32 of shape {8}")
    message("zero", "--hook number", "tests/dist/zero.lua:36: the gradient hook must return the reduced bucket, got 3 (number)")
    message("zero", "--hook hierarchical --ranks 3", "blocks of 2 do not divide 3 ranks")
    message("zero", "--hook bf16 --dtype f32", "gradient has both hook and dtype")
    message("regress", "--every 4 --zero 1", "sync and zero = 1: shares belong to replicas that are equal in each step")
    message("regress", "--every 4 --hook topk", "sync and gradient.hook: no gradients are exchanged")
    message("regress", "--every 4 --independent", "has both sync and independent")
  end)
  it("a step inside dt.no_sync", function()
    support.write(dir .. "/no_sync.lua", [[
      local dt = require "dtrain"
      local nn, data = dt.nn, dt.data
      local engine = dt.engine(dt.job { model = nn.Linear(3, 2), loss = nn.MSE(), batch = 4, steps = 3,
        data = data.synthetic { inputs = { 3 }, targets = { 2 }, samples = 20 }, optimizer = dt.optim.SGD { lr = 0.1 } })
      dt.no_sync(function() engine:step() end)]])
    local code, text = support.run(dir .. "/no_sync.lua")
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find("engine:step inside dt.no_sync", 1, true), text)
  end)
end)
