-- dtrain explain script.lua [--ranks n]: the collectives of a step, in order, one a line.
local core = require "dtrain.core"
local planned = require "dtrain.cmd.planned"

return function(words)
  local job, ranks = planned.job(words)
  local plan = planned.plans(job, ranks, 0).main
  if core.rank() ~= 0 then return 0 end
  local text = plan:collectives()
  if text == "" then
    print(ranks == 1 and "1 rank: no collectives; --ranks 2 shows what two would do" or "no collectives")
  else
    io.write(text, text:sub(-1) == "\n" and "" or "\n")
  end
  return 0
end
