-- Schedules of the learning rate: functions of (step, total, base), step from 0, asked before each step.
-- Their values are PyTorch's (torch.optim.lr_scheduler) and transformers' for the same arguments, also beyond
-- `total`. A schedule of one's own is a Lua function(step, total) that returns a factor on the optimizer's lr, as
-- LambdaLR's.
local util = require "dtrain.util"

local Schedule = { __name = "schedule" }
Schedule.__index = Schedule

local S = {}

function S.is(x) return getmetatable(x) == Schedule end

local function make(name, total, at)
  return setmetatable({ name = name, total = total, value = at, where = util.frame() }, Schedule)
end

--- schedule.make(name, total or nil, function(step, total, base) -> rate)
S.make = make

-- total of a schedule: its own, else the job's number of steps
local function of(total, steps, what)
  local n = total or steps
  if not n then util.fail("optim.%s needs total = number of steps", what) end
  return n
end

--- Learning rate at `step` (from 0) for a run of `total` steps and an optimizer's lr of `base`.
function Schedule:at(step, total, base) return self.value(step, total, base) end

--- optim.constant{ factor = 1, total_iters = 0 }: lr * factor for the first total_iters steps, then lr.
function S.constant(options)
  local o = util.options("optim.constant", options,
    { { "factor", "nonnegative", 1 }, { "total_iters", "nonnegative", 0 } })
  local s = make("constant", nil, function(step, _, base) return step < o.total_iters and base * o.factor or base end)
  s.settles = o.total_iters -- from this step on nothing changes: nobody need ask again
  return s
end

--- optim.step{ step_size =, gamma = 0.1 }: times gamma after every step_size steps.
function S.step(options)
  local o = util.options("optim.step", options,
    { { "step_size", "count", required = true, alias = "every" }, { "gamma", "nonnegative", 0.1 } })
  return make("step", nil, function(step, _, base) return base * o.gamma ^ (step // o.step_size) end)
end

--- optim.multistep{ milestones = { steps, ascending }, gamma = 0.1 }: times gamma at each milestone.
function S.multistep(options)
  local o = util.options("optim.multistep", options,
    { { "milestones", "table", required = true, alias = "at" }, { "gamma", "nonnegative", 0.1 } })
  for _, m in ipairs(o.milestones) do util.check("optim.multistep: milestones", m, "integer") end
  return make("multistep", nil, function(step, _, base)
    local n = 0
    for _, m in ipairs(o.milestones) do if step >= m then n = n + 1 end end
    return base * o.gamma ^ n
  end)
end

--- optim.exponential{ gamma = }: lr * gamma^step.
function S.exponential(options)
  local o = util.options("optim.exponential", options, { { "gamma", "positive", required = true } })
  return make("exponential", nil, function(step, _, base) return base * o.gamma ^ step end)
end

--- optim.linear{ start_factor = 1/3, end_factor = 1, total = steps }: the factor moves evenly from one to the other.
function S.linear(options)
  local o = util.options("optim.linear", options,
    { { "start_factor", "nonnegative", 1 / 3 }, { "end_factor", "nonnegative", 1 },
    { "total", "count", alias = "total_iters" } })
  return make("linear", o.total, function(step, steps, base)
    local n = of(o.total, steps, "linear")
    local share = math.min(step, n) / n
    return base * (o.start_factor + (o.end_factor - o.start_factor) * share)
  end)
end

--- optim.polynomial{ total = steps, power = 1 }: lr * (1 - step / total)^power, then 0.
function S.polynomial(options)
  local o = util.options("optim.polynomial", options,
    { { "total", "count", alias = "total_iters" }, { "power", "positive", 1 } })
  return make("polynomial", o.total, function(step, steps, base)
    local n = of(o.total, steps, "polynomial")
    return base * (1 - math.min(step, n) / n) ^ o.power
  end)
end

--- optim.cosine{ total = steps, min = 0 }: half a cosine from lr to min (Loshchilov and Hutter 2017), periodic beyond
--- total.
function S.cosine(options)
  local o = util.options("optim.cosine", options, { { "total", "count", alias = "T_max" },
    { "min", "nonnegative", 0, alias = "eta_min" } })
  return make("cosine", o.total, function(step, steps, base)
    local n = of(o.total, steps, "cosine")
    return o.min + (base - o.min) * (1 + math.cos(math.pi * step / n)) / 2
  end)
end

--- optim.warmup{ warmup = steps, inner = schedule }: lr * step / warmup, then the inner schedule, whose step 0 is the
--- first after the warm-up and whose total, unless it has its own, is what is left.
function S.warmup(options)
  local o = util.options("optim.warmup", options, { { "warmup", "count", required = true, alias = "steps" },
    { "inner", "schedule|function" } })
  local inner = S.of(o.inner or S.constant())
  local s = make("warmup", inner.total and inner.total + o.warmup, function(step, steps, base)
    if step < o.warmup then return base * step / o.warmup end
    return inner:at(step - o.warmup, steps and math.max(1, steps - o.warmup), base)
  end)
  s.absolute = inner.absolute
  return s
end

local function warm(name, inner_of)
  return function(options)
    local what = "optim." .. name
    local o = util.options(what, options, { { "warmup", "count", required = true }, { "total", "count" },
      { "min", "nonnegative", 0 } })
    if o.total and o.total <= o.warmup then
      util.fail("%s: total %d must be more than warmup %d; total counts the warm-up too", what, o.total, o.warmup)
    end
    local s = S.warmup { warmup = o.warmup, inner = inner_of(o.total and o.total - o.warmup, o.min) }
    s.name, s.where = name, util.frame()
    return s
  end
end

--- optim.warmup_cosine{ warmup =, total = steps (with the warm-up), min = 0 }
S.warmup_cosine = warm("warmup_cosine", function(total, min) return S.cosine { total = total, min = min } end)

--- optim.warmup_linear{ warmup =, total = steps (with the warm-up), min = 0 }: down a straight line to min.
S.warmup_linear = warm("warmup_linear", function(total, min)
  return make("linear", total, function(step, steps, base)
    local n = of(total, steps, "warmup_linear")
    return min + (base - min) * math.max(0, n - step) / n
  end)
end)

--- optim.warmup_constant{ warmup = }
function S.warmup_constant(options)
  local o = util.options("optim.warmup_constant", options, { { "warmup", "count", required = true } })
  return S.warmup { warmup = o.warmup }
end

--- optim.one_cycle{ max_lr =, total = steps, pct_start = 0.3, div_factor = 25, final_div_factor = 1e4, anneal = "cos"
--- | "linear", three_phase = false } (Smith and Topin 2018): up from max_lr / div_factor, then down. The momentum
--- stays as it is.
function S.one_cycle(options)
  local o = util.options("optim.one_cycle", options, { { "max_lr", "positive", required = true },
    { "total", "count", alias = "total_steps" }, { "pct_start", "fraction", 0.3 }, { "div_factor", "positive", 25 },
    { "final_div_factor", "positive", 1e4 },
    { "anneal", "string", "cos", alias = "anneal_strategy", choices = { "cos", "linear" } },
    { "three_phase", "boolean", false } })
  local low = o.max_lr / o.div_factor
  local final = low / o.final_div_factor
  local function move(a, b, share)
    if o.anneal == "cos" then return b + (a - b) / 2 * (1 + math.cos(math.pi * share)) end
    return a + (b - a) * share
  end
  local s = make("one_cycle", o.total, function(step, steps)
    local n = of(o.total, steps, "one_cycle")
    local phases
    if o.three_phase then
      phases = { { o.pct_start * n - 1, low, o.max_lr }, { 2 * o.pct_start * n - 2, o.max_lr, low },
        { n - 1, low, final } }
    else
      phases = { { o.pct_start * n - 1, low, o.max_lr }, { n - 1, o.max_lr, final } }
    end
    local start = 0
    for i, phase in ipairs(phases) do
      if step <= phase[1] or i == #phases then
        local share = phase[1] > start and (step - start) / (phase[1] - start) or 1
        return move(phase[2], phase[3], math.min(1, share))
      end
      start = phase[1]
    end
  end)
  s.absolute = true
  return s
end

--- A schedule from what a job may hold: a schedule, a function(step, total) -> factor, or nil (constant).
function S.of(x)
  if x == nil then return S.constant() end
  if S.is(x) then return x end
  if not util.callable(x) then
    util.fail("schedule wants a schedule such as optim.cosine{} or a function(step, total), got %s (%s)", util.show(x),
      util.kind(x))
  end
  local where = util.frame()
  return make("function", nil, function(step, total, base)
    local factor = x(step, total)
    if type(factor) ~= "number" then
      util.fail_at(where, "the schedule's function must return a number (a factor on lr), got %s at step %d",
        util.show(factor), step)
    end
    return base * factor
  end)
end

--- Learning rate at a step, which must be finite.
function Schedule:rate(step, total, base)
  local lr = self.value(step, total, base)
  if lr - lr ~= 0 then
    util.fail_at(self.where, "schedule %s gives a learning rate of %s at step %d", self.name, tostring(lr), step)
  end
  return lr
end

--- Learning rates of an optimizer's groups at a step: from each group's own lr, as in PyTorch (so a least rate is absolute). A
--- schedule that knows no lr but its own (one_cycle) keeps the ratio of a group's lr to the first.
function Schedule:rates(step, total, bases)
  local out = {}
  for i, base in ipairs(bases) do
    if self.absolute then
      out[i] = self:rate(step, total, bases[1]) * (i == 1 and 1 or base / bases[1])
    else
      out[i] = self:rate(step, total, base)
    end
  end
  return out
end

--- The steps at which a schedule of n steps is tried before it runs: the first ones, some between, the last.
function S.tried(n)
  local out, few = {}, math.min(n, 64)
  for step = 0, few - 1 do out[#out + 1] = step end
  for i = 1, n > few and 64 or 0 do out[#out + 1] = few + (n - 1 - few) * i // 64 end
  return out
end

--- The learning rates of steps 0 .. n - 1 as a list.
function S.table(schedule, n, base, total)
  local s, out = S.of(schedule), {}
  for step = 0, n - 1 do out[step + 1] = s:rate(step, total or n, base) end
  return out
end

return S
