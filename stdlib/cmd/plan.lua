-- dtrain plan script.lua [--ranks n]: what each rank allocates, in bytes by class. The run checks that it allocates
-- exactly this.
local chart = require "dtrain.cmd.chart"
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local memory = require "dtrain.memory"
local planned = require "dtrain.cmd.planned"
local util = require "dtrain.util"

-- Ranks with equal memory share a column. Ranks with equal microbatches have equal plans: one of them is traced.
local function columns(job, ranks)
  local out, known, sizes, graphs = {}, {}, {}, {}
  local function same(a, b)
    for _, class in ipairs(memory.classes) do if a[class] ~= b[class] then return false end end
    return true
  end
  for rank = 0, ranks - 1 do
    local where = job:where_is(rank, ranks)
    local key = engines.plan_key(job, where, sizes)
    if not known[key] then
      local plans = planned.plans(job, ranks, rank, graphs)
      local again, more = plans.main:recomputed()
      known[key] = { engines.executor(plans):memory(), plans.main:flops(), again, more }
    end
    local m, flops, last = known[key][1], known[key][2], out[#out]
    if last and same(last.memory, m) then
      last.to = rank
    else
      out[#out + 1] = { from = rank, to = rank, memory = m, flops = flops, again = known[key][3], more = known[key][4] }
    end
  end
  return out
end

return function(words)
  local job, ranks = planned.job(words)
  local list = columns(job, ranks)
  if core.rank() ~= 0 then return 0 end
  local replicas = job:where_is(0, ranks).replicas
  local micro = job:rows(replicas)
  local steps = -(-job.batch.global // (micro * replicas))
  print(("%d rank%s, %s, batch %d: %d microbatch%s of %d on each rank"):format(ranks, ranks == 1 and "" or "s",
    job.precision,
    job.batch.global, steps, steps == 1 and "" or "es", micro))
  local p = job.parallel.p
  if p.pipeline > 1 then
    local share, s, name = util.at(job.where, chart.bubble, p, chart.micros(job, job:where_is(0, ranks)))
    print(("pipeline of %d stages, schedule %s: bubble %.1f %% of a step; at most %s microbatches' activations on the stages"):format(
      p.pipeline * p.chunks, name, 100 * share, table.concat(s:in_flight(), ", ")))
  end
  print(("%.4g GFLOP of matrix products in a microbatch"):format(list[1].flops / 1e9))
  if job.parallel.p.recompute then
    print(("backward repeats %d operations: %.4g GFLOP of these"):format(list[1].again, list[1].more / 1e9))
  end
  print(memory.table(util.map(list, function(c)
    return { c.from == c.to and ("rank %d"):format(c.from) or ("ranks %d-%d"):format(c.from, c.to), c.memory }
  end)))
  return 0
end
