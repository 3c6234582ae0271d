-- dtrain explain script.lua [--ranks n]: the collectives and messages of a step, in order, one a line; a pipeline as a chart.
local chart = require "dtrain.cmd.chart"
local core = require "dtrain.core"
local planned = require "dtrain.cmd.planned"
local util = require "dtrain.util"

return function(words)
  local job, ranks = planned.job(words)
  local plan = planned.plans(job, ranks, 0).main
  if core.rank() ~= 0 then return 0 end
  local p = job.parallel.p
  if p.pipeline > 1 then
    local micro = chart.micros(job, job:where_is(0, ranks))
    print(table.concat(util.at(job.where, chart.lines, p, micro), "\n"))
  end
  local text = plan:collectives()
  if text == "" then
    print(ranks == 1 and "1 rank: no collectives; --ranks 2 shows what two would do" or "no collectives")
  else
    io.write(text, text:sub(-1) == "\n" and "" or "\n")
  end
  return 0
end
