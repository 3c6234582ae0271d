-- The plan by which replicas that step by themselves meet (local_sgd.lua): parameters become their mean over the replicas, or take
-- the outer optimizer's step towards it. Traced once; runs natively between two steps.
local local_sgd = require "dtrain.strategy.local_sgd"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local M = {}

local chunk = 6 * 2 ^ 20 -- elements that travel together

-- One parameter's new value from the replicas' mean.
local function outer_step(graph, outer, q, s, mean)
  local h = util.copy(outer.h)
  h.lr, h.t = outer.lr, 2
  local new = setmetatable({}, { __index = s, __newindex = function(_, k, v) graph:assign(s[k], v) end })
  local value = outer.def.update(s.anchor, s.anchor - mean, new, h)
  graph:assign(s.anchor, value)
  graph:assign(q.symbol, value)
end

--- The whole graph of a meeting. Parameters are declared.
function M.graph(graph, p)
  local states, list, n = local_sgd.declare(graph, p), {}, 0
  graph:between()
  local function flush()
    if #list == 0 then return end
    local flat = graph:collective("all_reduce", ops.concat(util.map(list, function(q)
      return q.symbol:reshape { q.symbol:numel() }
    end), 0), { "data" }, { red = "mean" })
    local at = 0
    for _, q in ipairs(list) do
      local size = q.symbol:numel()
      local mean = flat:slice { dim = 0, start = at, stop = at + size }:reshape(q.shape)
      at = at + size
      if states[q.name] then outer_step(graph, p.sync.outer, q, states[q.name], mean) else graph:assign(q.symbol, mean) end
    end
    list, n = {}, 0
  end
  for _, q in ipairs(graph:params()) do
    if q.trainable then
      list[#list + 1], n = q, n + q.symbol:numel()
      if n >= chunk then flush() end
    end
  end
  flush()
end

return M
