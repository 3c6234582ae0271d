-- Where the stages of a pipeline begin, from what a script says: nothing (balanced), numbers of blocks, or names.
local util = require "dtrain.util"

local M = {}

--- Checks `stages` for so many stages.
function M.check(stages, n)
  if type(stages) == "string" then
    if stages ~= "auto" then
      util.fail("dt.job: parallel: stages wants \"auto\", numbers of blocks or names, got %s", util.show(stages))
    end
    return stages
  end
  local kind = type(stages[1])
  for i, s in ipairs(stages) do
    if type(s) ~= kind or (kind == "number" and (s < 1 or s % 1 ~= 0)) or not (kind == "number" or kind == "string") then
      util.fail("dt.job: parallel: stages[%d] is %s; give numbers of blocks (at least 1) or names, not both", i, util.show(s))
    end
  end
  if kind == "number" and #stages ~= n then
    util.fail("dt.job: parallel: stages has %d numbers of blocks, but there are %d stages; give one for each", #stages, n)
  elseif kind ~= "number" and #stages ~= n - 1 then
    util.fail("dt.job: parallel: stages has %d name%s, but %d stages; name where stages 1 to %d begin", #stages,
      #stages == 1 and "" or "s", n, n - 1)
  end
  return stages
end

-- The entry of a list that a parameter belongs to: "blocks.3" of "blocks.3.mlp.up.weight".
local function block(name) return name:match "^(.-%f[%d]%d+)%." end

local function even(blocks, stages)
  local out = {}
  for k = 1, stages do out[k] = blocks * k // stages - blocks * (k - 1) // stages end
  return util.show(out)
end

--- Lists of parameters at whose first use stages 1, 2, ... begin; nil: the stage pass balances.
function M.starts(stages, graph)
  if stages == "auto" then return nil end
  local names = util.map(graph:params(), function(p) return p.name end)
  if type(stages[1]) ~= "number" then
    return util.map(stages, function(pattern)
      local found = {}
      for _, name in ipairs(names) do if name:find(pattern) then found[#found + 1] = name end end
      if #found == 0 then
        util.fail("dt.job: parallel: stages: no parameter's name matches %q; did you mean %q?", pattern,
          util.nearest(pattern, names))
      end
      return found
    end)
  end
  local blocks, members, sum = {}, {}, 0
  for _, name in ipairs(names) do
    local b = block(name)
    if b and not members[b] then
      blocks[#blocks + 1] = b
      members[b] = {}
    end
    if b then table.insert(members[b], name) end
  end
  for _, n in ipairs(stages) do sum = sum + n end
  if sum ~= #blocks then
    util.fail("dt.job: parallel: stages = %s are %d blocks, but the model has %d%s; %s", util.show(stages), sum, #blocks,
      #blocks > 0 and (" (%s to %s)"):format(blocks[1], blocks[#blocks]) or "",
      #blocks >= #stages and even(#blocks, #stages) .. " would do" or "name parameters instead")
  end
  local out, at = {}, 0
  for k = 1, #stages - 1 do
    at = at + stages[k]
    out[k] = members[blocks[at + 1]]
  end
  return out
end

return M
