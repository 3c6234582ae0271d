-- Collectives as methods: x:all_reduce(axes, how, o), x:reduce_scatter(axes, how, o), x:all_gather(axes, o), x:all_to_all(axes, o),
-- x:shift { axis =, by = }. On symbolic tensors, in models, losses, hooks and strategies alike, `axes` is a name of the mesh's or a
-- list of
-- names; dim 0 is cut or joined, in the order of ranks; how: "sum" (default), "mean", "max", "min"; o.part = n: within blocks of n
-- neighbours, -n: across such blocks. Over an axis of one rank each is the identity. They have gradients (of max and min none passes).
-- On concrete tensors they are dt.all_reduce and its kin, among all ranks.
local core = require "dtrain.core"
local ops = require "dtrain.ops"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local M = {}
local methods = core.methods()
local concrete = { all_reduce = core.all_reduce, reduce_scatter = core.reduce_scatter, all_gather = core.all_gather,
  all_to_all = core.all_to_all }

local function list_of(name, axes)
  if type(axes) == "string" then return { axes } end
  if type(axes) ~= "table" or type(axes[1]) ~= "string" then
    util.fail("%s of a symbolic tensor wants the name of an axis, or a list of names: x:%s \"data\"; got %s", name, name,
      util.show(axes))
  end
  return axes
end

-- A collective of symbols. One in a model makes the ranks meet in each microbatch: the engine then wants microbatches of one size.
local function together(x, name, axes, o)
  local y, in_model = core.collective(x, name, list_of(name, axes), o)
  local job = scope.current and scope.current.job
  if in_model and job then job.meets = name end
  return y
end

for name, f in util.sorted(concrete) do
  local reduces = name:find "reduce"
  methods[name] = function(x, axes, how, o)
    if not core.is_symbolic(x) then return f(x, axes, how) end
    if type(how) == "table" then how, o = nil, how end
    if how and not reduces then util.fail("%s takes no way to reduce, got %s", name, util.show(how)) end
    return together(x, name, axes, { red = how or "sum", part = o and o.part })
  end
end

--- x:shift { axis =, by = }: what a rank has goes `by` ranks further along the axis (backwards where negative), round its end.
function methods.shift(x, o)
  o = util.options("shift", o, { { "axis", "string|table", required = true }, { "by", "integer", 1 } })
  if not core.is_symbolic(x) then
    util.fail("shift of a concrete tensor: ranks shift inside of a model or a strategy; dt.all_gather shows all ranks' values")
  end
  return together(x, "shift", o.axis, { by = o.by })
end

--- The means over the ranks of `axes` of several symbolic tensors, which travel together, at most `most` elements at once (default:
--- all).
function M.means(list, axes, most)
  local out, from = {}, 1
  while from <= #list do
    local to, n = from, list[from]:numel()
    while to < #list and n + list[to + 1]:numel() <= (most or math.huge) do
      to = to + 1
      n = n + list[to]:numel()
    end
    local parts = {}
    for i = from, to do parts[#parts + 1] = list[i]:reshape { list[i]:numel() } end
    local flat, at = ops.concat(parts, 0):all_reduce(axes, "mean"), 0
    for i = from, to do
      local size = list[i]:numel()
      out[i] = flat:slice { dim = 0, start = at, stop = at + size }:reshape(list[i]:shape())
      at = at + size
    end
    from = to + 1
  end
  return out
end

return M
