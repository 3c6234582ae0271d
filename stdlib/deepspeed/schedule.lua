-- DeepSpeed's schedulers (deepspeed/runtime/lr_schedules.py) as schedules: the rate of update i, from 0, is the one after
-- i calls of their step(). Each is { rows, function(params, base) -> function(i) -> rate }.
local schedule = require "dtrain.optim.schedule"
local util = require "dtrain.util"

local M = {}

local number, count = { "nonnegative" }, { "count" }

local function warmup_rows(more)
  local rows = { warmup_num_steps = count, warmup_type = { "string" } }
  for key, row in util.sorted(more) do rows[key] = row end
  return rows
end

-- Share of the warm-up that is done after `last` + 1 steps; nil behind it.
local function warming(o)
  local n, kind = math.max(2, o.warmup_num_steps or 1000), o.warmup_type or "log"
  return n, function(last)
    if last >= n then return nil end
    if kind == "log" then return math.log(last + 1) / math.log(n) end
    return last / n
  end
end

local function warm(o, base, after)
  local low, high = o.warmup_min_lr or 0, o.warmup_max_lr or base
  local n, share = warming(o)
  return function(i)
    if i == 0 then return low end
    return low + (high - low) * (share(i - 1) or after(i - 1, n))
  end
end

M.WarmupLR = { warmup_rows { warmup_min_lr = number, warmup_max_lr = number }, function(o, base)
  return warm(o, base, function() return 1 end)
end }

M.WarmupDecayLR = { warmup_rows { warmup_min_lr = number, warmup_max_lr = number, total_num_steps = count },
  function(o)
    local total = o.total_num_steps
    return warm(o, 0.001, function(last, n) return math.max(0, (total - last) / math.max(1, total - n)) end)
  end, needs = { "total_num_steps" } }

M.WarmupCosineLR = { warmup_rows { warmup_min_ratio = number, cos_min_ratio = number, total_num_steps = count },
  function(o, base)
    local low, floor, total = o.warmup_min_ratio or 0, o.cos_min_ratio or 0.0001, o.total_num_steps
    local n, share = warming(o)
    return function(i)
      if i == 0 then return 0 end
      local s = share(i - 1)
      if s then return base * (low + (1 - low) * s) end
      local done = math.min(1, (i - n) / math.max(1, total - n))
      return base * math.max(0, floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)
    end
  end, needs = { "total_num_steps" } }

M.OneCycle = { { cycle_min_lr = number, cycle_max_lr = number, decay_lr_rate = number, cycle_first_step_size = count,
  cycle_second_step_size = count, cycle_first_stair_count = number, cycle_second_stair_count = number,
  decay_step_size = number, cycle_momentum = { "boolean" }, cycle_min_mom = number, cycle_max_mom = number,
  decay_mom_rate = number }, function(o)
  local first = o.cycle_first_step_size or 2000
  local second = o.cycle_second_step_size or first
  local stairs1 = o.cycle_first_stair_count or 0
  local stairs2 = o.cycle_second_stair_count or stairs1
  local total, every, rate = first + second, o.decay_step_size or 0, o.decay_lr_rate or 0
  return function(i)
    if i > total then
      if every == 0 or rate == 0 then return o.cycle_min_lr end
      return o.cycle_min_lr / (1 + rate * (i - total) / every)
    end
    local at = i % total
    local share, stairs = at / first, stairs1
    if at > first then share, stairs = (total - at) / second, stairs2 end
    if stairs > 0 then share = math.floor(share * stairs) / stairs end
    return o.cycle_min_lr + (o.cycle_max_lr - o.cycle_min_lr) * share
  end
end, needs = { "cycle_min_lr", "cycle_max_lr" } }

M.LRRangeTest = { { lr_range_test_min_lr = number, lr_range_test_step_size = count, lr_range_test_step_rate = number,
  lr_range_test_staircase = { "boolean" } }, function(o)
  return function(i)
    local x = i / (o.lr_range_test_step_size or 2000)
    if o.lr_range_test_staircase then x = math.floor(x) end
    return (o.lr_range_test_min_lr or 1e-3) * (1 + (o.lr_range_test_step_rate or 1) * x)
  end
end }

--- The schedule that a `scheduler` object names.
return function(reader, section, optimizer)
  local s = reader:object("scheduler", section, { type = { "string" }, params = { "object" } })
  local def = s.type and M[s.type]
  if not def then
    local known = { "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR" }
    reader:fail("scheduler.type", "%s is unknown; %s", tostring(s.type),
      util.suggest(tostring(s.type), known))
  end
  local o = reader:object("scheduler.params", s.params or {}, def[1])
  for _, key in ipairs(def.needs or {}) do
    if not o[key] then reader:fail("scheduler.params." .. key, "is missing; %s needs it", s.type) end
  end
  if o.warmup_type and o.warmup_type ~= "log" and o.warmup_type ~= "linear" then
    reader:fail("scheduler.params.warmup_type", "%s is unknown; log and linear work", o.warmup_type)
  end
  if s.type == "OneCycle" and o.cycle_momentum ~= false and optimizer.h.betas then
    reader:fail("scheduler.params.cycle_momentum", "Adam's betas stay as they are in dtrain; write \"cycle_momentum\": false")
  end
  local rate = def[2](o, optimizer.lr)
  return schedule.make(s.type, nil, function(step) return rate(step) end)
end
