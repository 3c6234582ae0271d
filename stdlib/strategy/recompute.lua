-- Recompute: backward makes activations again instead of keeping them from forward (Chen et al. 2016). A block is an entry of
-- a list of modules in the model: GPT's `blocks`, Sequential's children.
local budget = require "dtrain.strategy.budget"
local util = require "dtrain.util"

local R = { name = "recompute", options = { { "recompute", "string|table", "none" } } }

--- parallel = { recompute = "none" | "full" | { every = 2 } | { budget = "400MB" } | { ops = { "gelu_tanh" } } }. full keeps only what
--- enters each block, every only what enters a run of so many, budget recomputes as few blocks (the first ones) as keep the
--- planned activations within so many bytes, ops what these operations make. In a table also match = { "blocks%.[0-5]" },
--- Lua patterns of whole names: only these blocks; and communication = true: collectives are repeated too.
function R.check(p)
  local r = p.recompute
  if type(r) == "string" then
    if r ~= "none" and r ~= "full" then
      util.fail("dt.job: parallel: recompute = %q is unknown; %s, or a table with every, budget, ops or match", r,
        util.suggest(r, { "none", "full" }))
    end
    r = r == "full" and {} or nil
  else
    r = util.options("dt.job: parallel: recompute", r, { { "every", "count" }, { "budget", "count|string" }, { "ops", "table" },
      { "match", "string|table" }, { "communication", "boolean", false } })
    if (r.every and 1 or 0) + (r.budget and 1 or 0) + (r.ops and 1 or 0) > 1 then
      util.fail("dt.job: parallel: recompute has more than one of every, budget and ops; give one")
    end
    if type(r.match) == "string" then r.match = { r.match } end
    r.bytes = r.budget and budget.bytes(r.budget)
  end
  p.recompute = r
end

local function chosen(r, name)
  for _, pattern in ipairs(r.match or { ".*" }) do
    if name:find("^" .. pattern .. "$") then return true end
  end
end

function R.recompute(graph, p)
  local r = p.recompute
  if not r then return nil end
  local names, segments, n = graph:blocks(), {}, 0
  local wants = not r.ops or r.match
  if wants and #names == 0 then
    util.fail("parallel: recompute: the model has no blocks (a list of modules, as nn.GPT's and nn.Sequential's); name "
      .. "operations instead: recompute = { ops = { \"gelu_tanh\" } }")
  end
  for i, name in ipairs(names) do
    local take = chosen(r, name) and n < (r.first or math.huge)
    if take then n = n + 1 end
    segments[i] = take and (n - 1) // (r.every or 1) + 1 or 0
  end
  if n == 0 and r.first ~= 0 and wants then
    util.fail("parallel: recompute: match: no block is named so; %s", util.suggest(r.match[1], names))
  end
  r.count = n
  return { ops = r.ops, segments = wants and segments or nil, communication = r.communication }
end

--- A budget: as many blocks as it takes.
function R.fit(p, how, make)
  local r = p.recompute
  if not r or not r.bytes or how.layout then return make() end
  return budget.fit(r, make)
end

return R
