-- Two runs of one job, tensor by tensor: what `dtrain check` and the tests of strategies mean by equal. A run is a table of
-- tensors by name: losses and norms (f64, one a step), "0 name" a parameter's first value, "3 grad:name" and "3 name" its gradient
-- in step 3 and its value after it.
local core = require "dtrain.core"
local modules = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local trace = require "dtrain.trace"

local M = {}

-- Relative to the largest element of a tensor. 16-bit activations round at 2^-9 or 2^-12; sums in another order, or in parts on
-- several ranks, round at other places, a few times in a row. From the second step on the two sides' values differ by rounding, which
-- an adaptive optimizer makes larger where a gradient is small: f32 gradients may then differ by `later`.
M.allowed = { f32 = 2e-5, bf16 = 5e-2, f16 = 2e-2 }
M.later = { f32 = 2e-4, bf16 = 5e-2, f16 = 2e-2 }

-- Where the values before a step are further apart than by rounding, because the optimizer took steps of full size from the
-- rounding of gradients that are nearly zero, f32 gradients may differ by so many times the rest. (A GPT of three narrow blocks
-- under AdamW has 320.) Values are compared by themselves: what the optimizer does wrong is found there.
M.rounding = 5e-7
M.magnified = { f32 = 1e3, bf16 = 0, f16 = 0 }

-- A gradient that is zero but for rounding (a key's bias before softmax, a convolution's before batch norm) has no digits to compare.
-- It is one whose largest element, on both sides, is within this part of the whole gradient's norm, from which that rounding comes.
M.zero = { f32 = 1e-6, bf16 = 4e-3, f16 = 1e-3 }

--- The names of a job's parameters, in the model's order.
function M.names(job)
  local out = {}
  for _, m in ipairs(trace.modules(job)) do
    modules.base.each_parameter(m[2], function(name, p) if p.type == "param" then out[#out + 1] = m[1] .. name end end)
  end
  return out
end

--- Takes so many steps with an engine; returns the run on rank 0, on others a part of it.
function M.record(engine, steps)
  local out, losses, norms, names = {}, {}, {}, M.names(engine.job)
  local function keep(step, what)
    for _, name in ipairs(names) do
      local t = engine:whole(what .. name)
      if core.rank() == 0 then out[("%d %s%s"):format(step, what, name)] = t end
    end
  end
  keep(0, "")
  for step in engine:batches() do
    local m = engine:step()
    losses[step], norms[step] = m.loss, m.grad_norm
    keep(step, "grad:")
    keep(step, "")
  end
  if engine.step_number < steps then error("dtrain: asked to stop before the steps were done", 0) end
  out.losses, out.norms = core.tensor(losses, "f64"), core.tensor(norms, "f64")
  return out
end

local function largest(t) return t:numel() == 0 and 0 or ops.max(ops.abs(t)):item() end

local function place_of(t, i)
  local shape, at = t:shape(), {}
  for d = #shape, 1, -1 do
    at[d] = i % shape[d]
    i = i // shape[d]
  end
  return #at > 0 and ("[%s]"):format(table.concat(at, ",")) or ""
end

--- The first difference between a run and the one that it should equal, in the order of time and of `names`, or nil; and the
--- worst { loss, gradient, later, value } relative to the largest element (gradient: in the first step; later: in those after it).
--- sides: what messages call the two, default { "on the ranks", "in one process" }.
function M.runs(got, want, names, precision, sides)
  local steps, precise = want.losses:numel(), M.allowed[precision]
  local worst = { loss = 0, gradient = 0, later = 0, value = 0 }
  local here, there = table.unpack(sides or { "on the ranks", "in one process" })
  local noise, start = {}, {} -- by parameter: how far gradients differ relative to themselves; values before the first step
  local function numbers(step, what, key, limit)
    local a, b = got[key]:totable()[step], want[key]:totable()[step]
    local r = a == b and 0 or math.abs(a - b) / math.max(math.abs(b), 1e-30)
    worst.loss = math.max(worst.loss, r == r and r or math.huge)
    if r > limit or r ~= r then
      return ("step %d: %s is %.9g %s, %.9g %s: %.3g relative (allowed %g)"):format(step, what, a, here, b, there, r, limit)
    end
  end
  -- The norm of all gradients of a step.
  local function norm_of(step)
    local sum = 0
    for _, name in ipairs(names) do
      local g = want[("%d grad:%s"):format(step, name)]
      if g then sum = sum + g:to "f64":norm():item() ^ 2 end
    end
    return sum ^ 0.5
  end
  -- How far all values are apart after a step (0: before the first), in relation to their norm.
  local function drift_of(step)
    local apart, size = 0, 0
    for _, name in ipairs(names) do
      local a, b = got[("%d %s"):format(step, name)], want[("%d %s"):format(step, name)]
      if a and b then
        a, b = a:to "f64", b:to "f64"
        apart, size = apart + (a - b):norm():item() ^ 2, size + b:norm():item() ^ 2
      end
    end
    return (apart / math.max(size, 1e-30)) ^ 0.5
  end
  -- slack: tensor of what is allowed beside the limit, or nil; floor: elements up to this size count as zero
  local function tensors(step, kind, name, key, limit, slack, floor)
    local a, b = got[key], want[key]
    if not a and not b then return end
    if not a or not b then return ("step %d: the %s of %s is only on one side"):format(step, kind, name) end
    a, b = a:to "f64", b:to "f64"
    local apart, scale = ops.abs(a - b), largest(b)
    if floor and scale <= floor and largest(a) <= floor then return end
    local over = slack and ops.maximum(apart - slack, 0) or apart
    local r = largest(over)
    r = r == 0 and 0 or r / math.max(scale, 1e-30)
    local place = kind == "gradient" and step > 1 and "later" or kind
    worst[place] = math.max(worst[place], r == r and r or math.huge)
    if r <= limit then return end
    local i = r == r and ops.argmax(over:reshape { -1 }, 0):item() or 0
    local x, y = a:reshape { -1 }:totable()[i + 1], b:reshape { -1 }:totable()[i + 1]
    return ("step %d: the %s of %s differs, most at %s: %.9g %s, %.9g %s; %.3g of its largest element (allowed %g)"):format(step,
      kind, name, place_of(b, i), x, here, y, there, r, limit)
  end
  -- An adaptive optimizer makes steps of full size from the rounding of a gradient that is zero but for it. So a value may differ by
  -- as much as the observed difference of its own gradient, in relation to that gradient, explains.
  local function slack_of(step, name)
    local a, b = got[("%d grad:%s"):format(step, name)], want[("%d grad:%s"):format(step, name)]
    if not a or not b then return end
    a, b = a:to "f64", b:to "f64"
    local now = ops.minimum(ops.abs(a - b) / (ops.abs(b) + 1e-30), 2)
    noise[name] = noise[name] and ops.maximum(noise[name], now) or now
    return noise[name] * (4 * largest(want[("%d %s"):format(step, name)]:to "f64" - start[name]))
  end
  for _, name in ipairs(names) do
    local text = tensors(0, "value", name, "0 " .. name, precise)
    if text then return text, worst end
    start[name] = want["0 " .. name]:to "f64"
  end
  for step = 1, steps do
    local limit = step == 1 and precise or M.later[precision] + M.magnified[precision] * math.max(drift_of(step - 1) - M.rounding, 0)
    local text = numbers(step, "the loss", "losses", precise)
    local floor = M.zero[precision] * norm_of(step)
    for _, name in ipairs(names) do
      text = text or tensors(step, "gradient", name, ("%d grad:%s"):format(step, name), limit, nil, floor)
    end
    text = text or numbers(step, "the gradient norm", "norms", limit)
    for _, name in ipairs(names) do
      text = text or tensors(step, "value", name, ("%d %s"):format(step, name), precise, slack_of(step, name))
    end
    if text then return text, worst end
  end
  return nil, worst
end

return M
