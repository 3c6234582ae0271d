-- dtrain plan script.lua [--ranks n]: what each rank allocates, in bytes by class, and what the largest one sends. The run checks that
-- it allocates exactly this. Ranks need not be there: thousands are planned for by one process.
local chart = require "dtrain.cmd.chart"
local closed = require "dtrain.cmd.closed"
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local memory = require "dtrain.memory"
local planned = require "dtrain.cmd.planned"
local strategies = require "dtrain.strategy"
local traffic = require "dtrain.traffic"
local util = require "dtrain.util"

-- What the table says of one rank.
local function column(job, ranks, rank, traced)
  local plans = planned.plans(job, ranks, rank, traced)
  local exec = engines.executor(plans)
  local c = { memory = exec:memory(), flops = plans.main:flops() }
  c.again, c.more = plans.main:recomputed()
  c.totals = traffic.totals(traffic.list(job, plans, planned.micros(job, job:where_is(rank, ranks))))
  exec:close()
  return c
end

-- Ranks with equal memory share a column. Ranks with equal plans: one of them is compiled, and the model is traced once for all.
local function columns(job, ranks)
  local out, known, sizes, traced = {}, {}, {}, {}
  local function same(a, b)
    for _, class in ipairs(memory.classes) do if a[class] ~= b[class] then return false end end
    return true
  end
  for rank = 0, ranks - 1 do
    local where = job:where_is(rank, ranks)
    local key = engines.plan_key(job, where, sizes)
    known[key] = known[key] or column(job, ranks, rank, traced)
    local c, last = known[key], out[#out]
    if last and same(last.memory, c.memory) then
      last.to = rank
    else
      out[#out + 1] = setmetatable({ from = rank, to = rank }, { __index = c })
    end
  end
  return out
end

local function ranks_of(c) return c.from == c.to and ("rank %d"):format(c.from) or ("ranks %d-%d"):format(c.from, c.to) end

return function(words)
  local job, ranks = planned.job(words)
  local list = columns(job, ranks)
  if core.rank() ~= 0 then return 0 end
  local replicas = job:where_is(0, ranks).replicas
  local micro = job:rows(replicas)
  local steps = -(-job.batch.global // (micro * replicas))
  local idle = job:without_samples(job:where_is(0, ranks))
  print(("%d rank%s, %s, batch %d: %d microbatch%s of %d on %s"):format(ranks, ranks == 1 and "" or "s", job.precision,
    job.batch.global, steps, steps == 1 and "" or "es", micro, idle and "those that have samples" or "each rank"))
  if idle then print("note: " .. idle) end
  local p, where = job.parallel.p, job:where_is(0, ranks)
  local _, stages = strategies.among(where.mesh, 0, "stages")
  if stages > 1 then
    local order = job.parallel:schedule()
    local share, s = util.at(job.where, chart.bubble, order, stages, planned.micros(job, where))
    print(("pipeline of %d stages, schedule %s: bubble %.1f %% of a step; at most %s microbatches' activations on the stages"):format(
      stages * order.chunks, order.name, 100 * share, table.concat(s:in_flight(), ", ")))
  end
  print(("%.4g GFLOP of matrix products in a microbatch"):format(list[1].flops / 1e9))
  if p.recompute then
    print(("backward repeats %d operations: %.4g GFLOP of these"):format(list[1].again, list[1].more / 1e9))
  end
  print(memory.table(util.map(list, function(c) return { ranks_of(c), c.memory } end)))
  local most = list[1]
  for _, c in ipairs(list) do if memory.sum(c.memory) > memory.sum(most.memory) then most = c end end
  if ranks > 1 then
    print(("the largest: %s, %s bytes (%.4g GiB)"):format(ranks_of(most), util.commas(memory.sum(most.memory)),
      memory.sum(most.memory) / 2 ^ 30))
  end
  local form = closed.line(job, micro, replicas)
  if form then print(form) end
  if #most.totals > 0 then
    print(("\n%s in a step:"):format(most.from == most.to and ranks_of(most) or ("rank %d"):format(most.from)))
    print(table.concat(traffic.table(most.totals), "\n"))
  end
  return 0
end
