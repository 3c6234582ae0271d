-- dtrain explain script.lua [--ranks n] [--rank r] [--json | --passes]: the collectives and messages of a rank's step,
-- in order, one a line, and their sums; a pipeline as a chart; a warning for each divided value that is gathered for want of a rule.
local chart = require "dtrain.cmd.chart"
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local planned = require "dtrain.cmd.planned"
local strategies = require "dtrain.strategy"
local traffic = require "dtrain.traffic"
local util = require "dtrain.util"

return function(words)
  local job, ranks = planned.job(words)
  local rank = cli.given.rank or 0
  if rank < 0 or rank >= ranks then
    error(("dtrain: --rank %d is none of the %d ranks; 0 to %d are"):format(rank, ranks, ranks - 1), 0)
  end
  local plans = planned.plans(job, ranks, rank)
  if core.rank() ~= 0 then return 0 end
  if cli.given.passes then
    local total = 0
    print(("%-10s %7s %7s %10s"):format("pass", "before", "after", "ms"))
    for _, pass in ipairs(plans.main:passes()) do
      print(("%-10s %7d %7d %10.2f"):format(pass.name, pass.before, pass.after, 1e3 * pass.seconds))
      total = total + pass.seconds
    end
    print(("%-10s %7s %7s %10.2f"):format("together", "", "", 1e3 * total))
    return 0
  end
  local where = job:where_is(rank, ranks)
  local micro, order = planned.micros(job, where), job.parallel:schedule()
  local _, stages = strategies.among(where.mesh, rank, "stages")
  local list = traffic.list(job, plans, micro)
  local totals = traffic.totals(list)
  if cli.given.json then
    local out = { ranks = ranks, rank = rank, microbatches = micro, mesh = util.array(strategies.wide(where.mesh)), collectives = list,
      totals = totals, gathered = util.array(plans.main:gathered()) }
    if stages > 1 then out.pipeline = util.at(job.where, chart.data, order, stages, micro) end
    print(util.json(out, { "ranks", "rank", "mesh", "microbatches", "pipeline", "collectives", "totals", "gathered" }))
    return 0
  end
  if stages > 1 then
    print(table.concat(util.at(job.where, chart.lines, order, stages, micro), "\n"))
    local hint = chart.hint(order, stages, job:rows(where.replicas), function(rows) return planned.micros(job, where, rows) end)
    if hint then print("note: " .. hint) end
  end
  for _, e in ipairs(list) do print(traffic.line(e)) end
  if #list == 0 then
    print(ranks == 1 and "1 rank: no collectives; --ranks 2 shows what two would do" or "no collectives")
  else
    print(("\nrank %d in a step of %d microbatch%s:"):format(rank, micro, micro == 1 and "" or "es"))
    print(table.concat(traffic.table(totals), "\n"))
  end
  for _, line in ipairs(planned.warnings(plans.main)) do print(line) end
  return 0
end
