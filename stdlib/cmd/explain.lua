-- dtrain explain script.lua [--ranks n]: the collectives and messages of a step, in order, one a line; a pipeline as a chart.
local chart = require "dtrain.cmd.chart"
local core = require "dtrain.core"
local planned = require "dtrain.cmd.planned"
local util = require "dtrain.util"

return function(words)
  local job, ranks = planned.job(words)
  local plans = planned.plans(job, ranks, 0)
  if core.rank() ~= 0 then return 0 end
  local p = job.parallel.p
  if p.pipeline > 1 then
    local micro = chart.micros(job, job:where_is(0, ranks))
    print(table.concat(util.at(job.where, chart.lines, p, micro), "\n"))
  end
  local text = plans.main:collectives()
  if plans.meet then -- replicas that step by themselves
    local prefix = ("every %d steps: "):format(job.parallel.p.sync.every)
    text = text .. plans.meet:collectives():gsub("[^\n]+", function(line) return prefix .. line end)
  end
  if text == "" then
    print(ranks == 1 and "1 rank: no collectives; --ranks 2 shows what two would do" or "no collectives")
  else
    io.write(text, text:sub(-1) == "\n" and "" or "\n")
  end
  return 0
end
