-- Replicas that step by themselves. sync = { every = H }: local SGD, parameters are averaged every H steps (Stich 2019); with an
-- outer optimizer DiLoCo (Douillard et al. 2023): it sees how far the average has moved from the last common point, the
-- anchor, as a gradient. independent = true: replicas exchange nothing, each sees every sample; losses are averaged.
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
  if p.zero > 0 then
    util.fail("dt.job: parallel: %s and zero = %d: shares belong to replicas that are equal in each step; set zero = 0", what,
      p.zero)
  end
  if p.tensor > 1 or (p.pipeline or 1) > 1 then
    util.fail("dt.job: parallel: %s works on the axis data alone; set tensor = 1 and pipeline = 1", what)
  end
  if p.gradient.hook or p.gradient.every == "micro" then
    util.fail("dt.job: parallel: %s and gradient.%s: no gradients are exchanged; leave one out", what,
      p.gradient.hook and "hook" or "every = \"micro\"")
  end
end

function L.compile(o, p) o.apart, o.independent = p.sync ~= nil or p.independent, p.independent end

-- The names of what an outer optimizer remembers for one parameter.
local function outer_states(outer)
  local list = outer.def.state
  if type(list) == "function" then list = list(outer.h) end
  return { "anchor", table.unpack(list) }
end

--- In the training graph: memory for anchors and outer states. params: graph:params().
function L.declare(graph, p)
  local outer, out = p.sync and p.sync.outer, {}
  if not outer then return out end
  for _, q in ipairs(graph:params()) do
    if q.trainable then
      out[q.name] = {}
      for _, name in ipairs(outer_states(outer)) do
        local fill = outer.def.fill[name] or 0
        out[q.name][name] = graph:local_state(("outer.%s:%s"):format(q.name, name), q.shape, { shared = true,
          init = { "const", type(fill) == "string" and outer.h[fill] or fill } })
      end
    end
  end
  return out
end

return L
