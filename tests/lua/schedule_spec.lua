-- Schedules against PyTorch's and transformers' values.
local dt = require "dtrain"
local optim = dt.optim

local reference = dofile "tests/data/schedules.lua"

local cases = {
  { "StepLR", optim.step { step_size = 7, gamma = 0.5 } },
  { "MultiStepLR", optim.multistep { milestones = { 5, 20, 21 }, gamma = 0.3 } },
  { "ExponentialLR", optim.exponential { gamma = 0.95 } },
  { "CosineAnnealingLR", optim.cosine { total = 50, min = 0.01 } },
  { "LinearLR", optim.linear { start_factor = 0.2, end_factor = 1.0, total = 10 } },
  { "PolynomialLR", optim.polynomial { total = 40, power = 2 } },
  { "OneCycleLR", optim.one_cycle { max_lr = 0.5, total = 61 } },
  { "constant_with_warmup", optim.warmup { warmup = 8 } },
  { "linear_with_warmup", optim.warmup_linear { warmup = 8, total = 50 } },
  { "cosine_with_warmup", optim.warmup_cosine { warmup = 8, total = 50 } },
}

describe("schedules", function()
  for _, case in ipairs(cases) do
    it(case[1] .. " equals the reference", function()
      local got, want = optim.rates(case[2], 60, 0.1), reference[case[1]]
      for i = 1, 60 do
        assert.is_true(math.abs(got[i] - want[i]) <= 1e-12,
          ("step %d: %.17g, wanted %.17g"):format(i - 1, got[i], want[i]))
      end
    end)
  end

  it("keep PyTorch's names of arguments", function()
    assert.are.same(optim.rates(optim.cosine { T_max = 50, eta_min = 0.01 }, 60, 0.1),
      optim.rates(cases[4][2], 60, 0.1))
  end)

  it("take the run's length where they have none of their own", function()
    assert.are.same(optim.rates(optim.cosine {}, 50, 0.1, 50), optim.rates(optim.cosine { total = 50 }, 50, 0.1))
  end)

  it("warm up any other", function()
    local lr = optim.rates(optim.warmup { warmup = 4, inner = optim.step { step_size = 2, gamma = 0.1 } }, 9, 1)
    assert.are.same({ 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.1, 0.1 }, { table.unpack(lr, 1, 8) })
    assert.is_true(math.abs(lr[9] - 0.01) < 1e-15)
  end)

  it("hold min after a linear warm-down", function()
    local lr = optim.rates(optim.warmup_linear { warmup = 2, total = 6, min = 0.2 }, 10, 1)
    assert.is_true(math.abs(lr[10] - 0.2) < 1e-15)
  end)

  it("may be a function of step and total", function()
    assert.are.same({ 2.0, 1.5, 1.0, 0.5 }, optim.rates(function(step, total) return 1 - step / total end, 4, 2))
  end)

  it("refuse a function that returns no number", function()
    assert.has_error(function() optim.rates(function() return "x" end, 3, 1) end)
  end)

  it("refuse a rate that is not finite, naming the step", function()
    local ok, message = pcall(optim.rates, function(step) return 1 / (2 - step) end, 4, 1)
    assert.is_false(ok)
    assert.matches("step 2", message)
  end)

  it("starts from each group's own lr, and ends at a minimum that is absolute, as PyTorch's", function()
    local cosine = optim.cosine { total = 10, min = 0.1 }
    local mid, last = cosine:rates(5, 10, { 1, 0.5 }), cosine:rates(10, 10, { 1, 0.5 })
    for i, want in ipairs { 0.55, 0.3 } do assert.is_true(math.abs(mid[i] - want) < 1e-12) end
    for i = 1, 2 do assert.is_true(math.abs(last[i] - 0.1) < 1e-12) end
    local cycle = optim.one_cycle { max_lr = 2, total = 10 }:rates(4, 10, { 1, 0.5 })
    assert.is_true(math.abs(cycle[1] - 2 * cycle[2]) < 1e-12)
    -- and a group with another rate is trained by it
    local model = dt.nn.Linear(2, 1)
    local before = { model.weight:totable()[1][1], model.bias:totable()[1] }
    local engine = dt.engine(dt.job { model = model, loss = function(y) return y:mean() end, batch = 1, steps = 1,
      schedule = optim.cosine { total = 1, min = 0.25 },
      data = dt.data.tensors { inputs = dt.ones { 1, 2 }, targets = dt.ones { 1, 1 } },
      optimizer = optim.SGD { lr = 1, groups = { { match = "bias", lr = 3 } } } })
    for _, batch in engine:batches() do engine:step(batch) end
    assert.is_true(math.abs(engine.exec:get("weight"):totable()[1][1] - before[1] + 1) < 1e-6)
    assert.is_true(math.abs(before[2] - model.bias:totable()[1] - 3) < 1e-6)
  end)
end)
