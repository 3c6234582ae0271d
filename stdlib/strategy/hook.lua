-- The gradient hook: gradient = { hook = function(bucket, info) ... return reduced end }, traced once for each bucket, native in the
-- step. `bucket` is a symbolic vector: this rank's gradients, scaled so that their MEAN over "data" is what the default would give;
-- what the hook returns, of the same shape, is taken for that mean. So bucket:all_reduce("data", "mean") is the default itself.
--
--   info.number, info.ranks      the bucket's number; ranks on "data"
--   info.parameters              { name =, shape =, begin =, numel = } in the bucket's order; zeros lie between them
--   info:state(name, shape, o)   memory of this rank that persists and is saved; o = { init = { "zeros" }, dtype = "f32" }
--   info:assign(state, value)    writes it
-- Collectives of symbols: x:all_reduce(axis, how, o), x:reduce_scatter(axis, how, o), x:all_gather(axis, o), x:all_to_all(axis, o);
-- how: "sum" (default), "mean", "max", "min"; o.part = n: within blocks of n neighbours, -n: across such blocks.
local core = require "dtrain.core"
local util = require "dtrain.util"

local H = {}
local graph -- of the hook that runs

local Info = {}
Info.__index = Info
function Info:state(name, shape, o)
  return graph:local_state(("hook.bucket%d:%s"):format(self.number, name), shape, o)
end
function Info.assign(_, state, value) graph:assign(state, value) end

local function axes(axis) return type(axis) == "table" and axis or { axis or "data" } end
local methods, concrete = core.methods(), { all_reduce = core.all_reduce, reduce_scatter = core.reduce_scatter,
  all_gather = core.all_gather, all_to_all = core.all_to_all }
for name, f in util.sorted(concrete) do
  local reduces = name:find "reduce"
  methods[name] = function(x, axis, how, o)
    if not core.is_symbolic(x) then return f(x, axis, how) end
    if not graph then
      util.fail("%s of a symbolic tensor works in a gradient hook only; in a model the strategy inserts what ranks exchange",
        name)
    end
    if type(how) == "table" then how, o = nil, how end
    return graph:collective(name, x, axes(axis), { red = reduces and how or "sum", part = o and o.part })
  end
end

local function same(a, b)
  for i = 1, math.max(#a, #b) do if a[i] ~= b[i] then return false end end
  return true
end

--- What graph:compile calls for each bucket.
function H.traced(hook, ranks)
  local d = debug.getinfo(hook, "S")
  local where = ("%s:%d"):format(d.short_src, d.linedefined)
  return function(g, bucket, number, parameters)
    table.sort(parameters, function(a, b) return a.begin < b.begin end)
    graph = g
    local ok, out = pcall(hook, bucket, setmetatable({ number = number, ranks = ranks, parameters = parameters }, Info))
    graph = nil
    if not ok then error(out, 0) end
    if not core.is_symbolic(out) then
      util.fail_at(where, "the gradient hook must return the reduced bucket, got %s (%s)", util.show(out), util.kind(out))
    end
    if not same(out:shape(), bucket:shape()) or not util.contains({ "f32", "bf16", "f16", "f64" }, out:dtype()) then
      util.fail_at(where, "the gradient hook returned %s of shape %s for a bucket of shape %s; it must keep the shape, in a float "
        .. "dtype", out:dtype(), util.show(out:shape()), util.show(bucket:shape()))
    end
    return out
  end
end

return H
