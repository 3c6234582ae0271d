-- What tensor.lua asks of a traced graph (graph:nodes()): which products feed which, and who uses a value.
local util = require "dtrain.util"

local M = {}

--- Node -> the nodes that use it.
function M.users(nodes)
  local users = {}
  for i, n in ipairs(nodes) do
    for _, k in ipairs(n.inputs) do
      users[k] = users[k] or {}
      table.insert(users[k], i)
    end
  end
  return users
end

-- operations that a value passes divided by its last dim or by heads; others end a chain
local inside = {}
for name in ([[reshape permute split copy attention rotary dropout cast relu gelu gelu_tanh silu tanh sigmoid softplus
  add sub mul div square abs sqrt neg exp maximum minimum clamp stop_gradient place]]):gmatch "%S+" do inside[name] = true end

--- The products whose outputs reach node `n`'s input through such operations, and all nodes between; nil when
-- something else does.
function M.feeders(nodes, n)
  local found, between, queue = {}, {}, { n.inputs[1] }
  while #queue > 0 do
    local id = table.remove(queue)
    local x = nodes[id]
    if x.op == "linear" then
      if not between[id] then found[#found + 1] = id end
      between[id] = true
    elseif inside[x.op] and #x.inputs > 0 then
      between[id] = true
      for _, k in ipairs(x.inputs) do if not between[k] then queue[#queue + 1] = k end end
    elseif not (x.op == "full" or (x.op == "param" and #x.shape == 0)) then
      return nil
    end
  end
  return found, between
end

--- Whether what lies between is used nowhere else than there and by `last`.
function M.only(users, between, last)
  for id in util.sorted(between) do
    for _, u in ipairs(users[id]) do if u ~= last and not between[u] then return false end end
  end
  return true
end

return M
