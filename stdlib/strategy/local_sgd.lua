-- Replicas that step by themselves. sync = { every = H }: local SGD, parameters are averaged every H steps (Stich 2019); with an
-- outer optimizer DiLoCo (Douillard et al. 2023): it sees how far the average has moved from the last common point, the
-- anchor, as a gradient. independent = true: replicas exchange nothing, each sees every sample; losses are averaged.
local collective = require "dtrain.collective"
local define = require "dtrain.optim.define"
local util = require "dtrain.util"

local L = { name = "local_sgd", options = { { "sync", "table" }, { "independent", "boolean", false } } }

--- parallel = { sync = { every = steps, outer = optim.SGD { lr = 0.7, momentum = 0.9, nesterov = true } } | independent = true }
function L.check(p)
  if p.sync then
    p.sync = util.options("dt.job: parallel: sync", p.sync, { { "every", "count", required = true }, { "outer", "any" } })
    if p.sync.outer and not define.is(p.sync.outer) then
      util.fail("dt.job: parallel: sync: outer wants an optimizer such as optim.SGD { lr = 0.7, momentum = 0.9, nesterov = true }")
    end
  end
  local what = p.sync and "sync" or p.independent and "independent"
  if not what then return end
  if p.sync and p.independent then
    util.fail("dt.job: parallel has both sync and independent; replicas either meet now and then or never: leave one out")
  end
  local gradient = p.gradient or {}
  if (p.zero or 0) > 0 then
    util.fail("dt.job: parallel: %s and zero = %d: shares belong to replicas that are equal in each step; set zero = 0", what, p.zero)
  elseif gradient.hook or gradient.every == "micro" then
    util.fail("dt.job: parallel: %s and gradient.%s: no gradients are exchanged; leave one out", what,
      gradient.hook and "hook" or "every = \"micro\"")
  elseif p.sync and p.sync.outer and ((p.tensor or 1) > 1 or (p.pipeline or 1) > 1) then
    util.fail("dt.job: parallel: sync.outer works on whole models; set tensor = 1 and pipeline = 1, or leave outer out")
  end
end

function L.replicas(p) return p.sync and "differ" or p.independent and "alone" or nil end

-- A replica's own gradient, as if it were the mean of all.
function L.reduce(bucket, info, p) if p.sync or p.independent then return bucket * info.ranks end end

-- One parameter's new value, from the replicas' mean.
local function outer_step(graph, outer, q, s, mean)
  local h = util.copy(outer.h)
  h.lr, h.t = outer.lr, 2
  local new = setmetatable({}, { __index = s, __newindex = function(_, k, v) graph:assign(s[k], v) end })
  local value = outer.def.update(s.anchor, s.anchor - mean, new, h)
  graph:assign(s.anchor, value)
  graph:assign(q.symbol, value)
end

L.between = { every = function(p) return p.sync and p.sync.every end }

--- In the training graph and in that of the meeting: memory for anchors and the outer optimizer's states.
function L.between.declare(graph, p)
  local outer, out = p.sync and p.sync.outer, {}
  if not outer then return out end
  local list = outer.def.state
  if type(list) == "function" then list = list(outer.h) end
  for _, q in ipairs(util.filter(graph:params(), function(q) return q.trainable end)) do
    out[q.name] = {}
    for _, name in ipairs { "anchor", table.unpack(list) } do
      local fill = outer.def.fill[name] or 0
      out[q.name][name] = graph:local_state(("outer.%s:%s"):format(q.name, name), q.shape, { shared = true,
        init = { "const", type(fill) == "string" and outer.h[fill] or fill } })
    end
  end
  return out
end

--- The first common point: anchors are the parameters' first values.
function L.between.start(exec)
  for _, name in ipairs(exec:names()) do
    local of = name:match "^state:outer%.(.*):anchor$"
    if of then exec:set(name, exec:get(of)) end
  end
end

--- The meeting: parameters become their mean over the replicas, or take the outer optimizer's step towards it.
function L.between.trace(graph, p, axes)
  local states = L.between.declare(graph, p)
  local list = util.filter(graph:params(), function(q) return q.trainable end)
  local means = collective.means(util.map(list, function(q) return q.symbol end), axes, 6 * 2 ^ 20)
  for i, q in ipairs(list) do
    if states[q.name] then outer_step(graph, p.sync.outer, q, states[q.name], means[i]) else graph:assign(q.symbol, means[i]) end
  end
end

return L
