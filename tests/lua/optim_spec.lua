-- Optimizers against PyTorch's trajectories, and the ones that PyTorch lacks against their formulas in plain numbers.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local reference = dofile "tests/data/optim.lua"

-- A model of one parameter whose gradient is the sample itself.
local Dot = nn.module("Dot")
function Dot:init(values) self.p = nn.parameter({ 4, 3 }, dt.tensor(values):reshape { 4, 3 }) end
function Dot:forward(x) return dt.sum(self.p * x) end

local function flat(list) return dt.tensor(list):reshape { #list, 4, 3 } end

-- Runs an optimizer over the reference's gradients; returns the parameter after each step.
local function trajectory(optimizer, more)
  local model = Dot(reference.p0)
  local spec = {
    model = model, loss = function(y) return y end,
    data = data.tensors { inputs = flat(reference.gradients), order = { 0, 1, 2, 3, 4, 5 } },
    batch = 1, optimizer = optimizer, steps = 6,
  }
  for k, v in dt.sorted(more or {}) do spec[k] = v end
  local engine, out = dt.engine(dt.job(spec)), {}
  for step, batch in engine:batches() do
    engine:step(batch)
    out[step] = model.p:reshape { 12 }:totable()
  end
  return out
end

local function near(got, want, tolerance)
  for step = 1, 6 do
    for i = 1, 12 do
      local a, b = got[step][i], want[step][i]
      assert.is_true(math.abs(a - b) <= tolerance * math.max(1, math.abs(b)),
        ("step %d, element %d: %.9g, wanted %.9g"):format(step, i, a, b))
    end
  end
end

-- The same loop in plain numbers: f(p, g, state, t) -> p for one element.
local function by_hand(f)
  local p, states, out = table.move(reference.p0, 1, 12, 1, {}), {}, {}
  for i = 1, 12 do states[i] = {} end
  for t = 1, 6 do
    for i = 1, 12 do p[i] = f(p[i], reference.gradients[t][i], states[i], t) end
    out[t] = table.move(p, 1, 12, 1, {})
  end
  return out
end

describe("optimizers", function()
  for _, case in ipairs(reference.cases) do
    it(case.name .. " equals PyTorch", function()
      near(trajectory(optim[case.optimizer](case.args)), case.after, 2e-6)
    end)
  end

  local function lion(p, g, s)
    local m = s.m or 0
    local u = 0.9 * m + 0.1 * g
    s.m = 0.99 * m + 0.01 * g
    return p * (1 - 0.01 * 0.1) - 0.01 * (u > 0 and 1 or u < 0 and -1 or 0)
  end

  it("Lion follows its paper", function()
    near(trajectory(optim.Lion { lr = 0.01, weight_decay = 0.1 }), by_hand(lion), 2e-6)
  end)

  it("one of one's own is traced", function()
    local Own = optim.define { state = { "m" }, update = function(p, g, s, h)
      local u = dt.sign(h.beta1 * s.m + (1 - h.beta1) * g)
      s.m = h.beta2 * s.m + (1 - h.beta2) * g
      return p * (1 - h.lr * h.weight_decay) - h.lr * u
    end }
    near(trajectory(Own { lr = 0.01, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.1 }), by_hand(lion), 2e-6)
  end)

  it("LAMB scales Adam's direction by the ratio of norms", function()
    local p, m, v, want = table.move(reference.p0, 1, 12, 1, {}), {}, {}, {}
    for t = 1, 6 do
      local d, a, b = {}, 0, 0
      for i = 1, 12 do
        local g = reference.gradients[t][i]
        m[i] = 0.9 * (m[i] or 0) + 0.1 * g
        v[i] = 0.999 * (v[i] or 0) + 0.001 * g * g
        d[i] = m[i] / (1 - 0.9 ^ t) / (math.sqrt(v[i] / (1 - 0.999 ^ t)) + 1e-6) + 0.1 * p[i]
        a, b = a + p[i] ^ 2, b + d[i] ^ 2
      end
      for i = 1, 12 do p[i] = p[i] - 0.01 * math.sqrt(a / b) * d[i] end
      want[t] = table.move(p, 1, 12, 1, {})
    end
    near(trajectory(optim.LAMB { lr = 0.01, weight_decay = 0.1 }), want, 5e-6)
  end)

  it("follow a schedule", function()
    local got = trajectory(optim.SGD { lr = 0.1 }, { schedule = optim.step { step_size = 2, gamma = 0.5 } })
    local rates = { 0.1, 0.1, 0.05, 0.05, 0.025, 0.025 }
    near(got, by_hand(function(p, g, _, t) return p - rates[t] * g end), 2e-6)
  end)

  it("clip by global norm and by value", function()
    local got = trajectory(optim.SGD { lr = 0.1 }, { clip = { norm = 1 } })
    local norms = {}
    for t, g in ipairs(reference.gradients) do
      local s = 0
      for _, x in ipairs(g) do s = s + x * x end
      norms[t] = math.sqrt(s)
    end
    near(got, by_hand(function(p, g, _, t) return p - 0.1 * g * math.min(1, 1 / (norms[t] + 1e-6)) end), 3e-6)
    got = trajectory(optim.SGD { lr = 0.1 }, { clip = { value = 0.5 } })
    near(got, by_hand(function(p, g) return p - 0.1 * math.max(-0.5, math.min(0.5, g)) end), 2e-6)
  end)

  it("treat groups by name", function()
    local model = nn.Sequential { nn.Linear(3, 2), nn.LayerNorm(2) }
    local before = {}
    for name, t in dt.sorted(model:state()) do before[name] = t:totable() end
    local job = dt.job {
      model = model, loss = function(y) return dt.mean(y) * 0 end,
      data = data.tensors { inputs = dt.ones { 4, 3 } }, batch = 4, steps = 1,
      optimizer = optim.AdamW { lr = 0.1, weight_decay = 0.5,
        groups = { { match = "^1%.", lr = 0 }, { match = { "bias$" }, weight_decay = 0 } } },
    }
    local engine = dt.engine(job)
    engine:step()
    local after = model:state()
    assert.is_true(math.abs(after["0.weight"]:totable()[1][1] - 0.95 * before["0.weight"][1][1]) < 1e-6)
    assert.are.same(before["0.bias"], after["0.bias"]:totable())
    assert.are.same(before["1.weight"], after["1.weight"]:totable())
  end)

  it("leave biases and norms undecayed with no_decay", function()
    local model = nn.Linear(3, 2)
    local before = model.bias:totable()
    local engine = dt.engine(dt.job {
      model = model, loss = function(y) return dt.mean(y) * 0 end,
      data = data.tensors { inputs = dt.ones { 4, 3 } }, batch = 4, steps = 1,
      optimizer = optim.AdamW { lr = 0.1, weight_decay = 0.5, no_decay = true },
    })
    engine:step()
    assert.are.same(before, model.bias:totable())
  end)
end)

describe("optimizer options", function()
  local function message(f, ...)
    local ok, e = pcall(f, ...)
    assert.is_false(ok)
    return e
  end

  it("name the nearest known key and the line", function()
    local e = message(function() optim.AdamW { lr = 1e-3, weigth_decay = 0.1 } end)
    assert.matches("optim_spec%.lua:%d+: ", e)
    assert.matches("did you mean 'weight_decay'", e)
  end)
  it("want the right types", function()
    assert.matches("wants a table", message(optim.AdamW, { lr = 1e-3, betas = 0.9 }))
    assert.matches("wants 2 numbers", message(optim.AdamW, { lr = 1e-3, betas = { 0.9 } }))
    assert.matches("lr", message(optim.SGD, { lr = "big" }))
  end)
  it("want a learning rate", function()
    local Own = optim.define { update = function(p) return p end }
    assert.matches("learning rate", message(Own, {}))
  end)
  it("refuse nesterov without momentum", function()
    assert.matches("nesterov", message(optim.SGD, { lr = 0.1, nesterov = true }))
  end)
  it("refuse an update that returns no tensor, and unknown states", function()
    local function train(update)
      return message(trajectory, optim.define { state = { "m" }, update = update } { lr = 0.1 })
    end
    assert.matches("must return the new parameter", train(function() end))
    assert.matches("no state 'n'", train(function(p, g, s) s.n = g return p end))
    assert.matches("h%.beta", train(function(p, g, _, h) return p - g * h.beta end))
  end)
end)
