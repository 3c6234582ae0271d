-- Data parallelism: each rank of the axis "data" has its own samples; gradients are summed over it, bucket by bucket,
-- overlapped with backward (Li et al. 2020).
local hooks = require "dtrain.strategy.hook"
local util = require "dtrain.util"

local D = { name = "data", options = { { "data", "string|count", "auto" }, { "gradient", "table" } } }

--- parallel = { data = "auto" | ranks, gradient = { bucket_mb = 25 (8 with zero = 2, 3), first_bucket_mb = 1, dtype = "f32" |
--- "bf16" | "f16" (the job's precision), order = "ready" | "registration", every = "step" | "micro",
--- hook = function(bucket, info), see hook.lua } }
function D.check(p)
  if type(p.data) == "string" and p.data ~= "auto" then
    util.fail("dt.job: parallel: data wants \"auto\" or a number of ranks, got %s", util.show(p.data))
  end
  p.gradient = util.options("dt.job: parallel: gradient", p.gradient, { { "bucket_mb", "positive" },
    { "first_bucket_mb", "positive", 1 }, { "dtype", "string", choices = { "f32", "bf16", "f16" } },
    { "order", "string", "ready", choices = { "ready", "registration" } },
    { "every", "string", "step", choices = { "step", "micro" } }, { "hook", "callable" } })
  if p.gradient.hook and p.gradient.dtype then
    util.fail("dt.job: parallel: gradient has both hook and dtype; a hook decides itself in what gradients travel: "
      .. "bucket:to %q", p.gradient.dtype)
  end
  if p.gradient.hook and p.pipeline > 1 then
    util.fail("dt.job: parallel: gradient.hook and pipeline = %d: each stage has buckets of its own, of which a hook's states know "
      .. "nothing; set pipeline = 1, or leave the hook out", p.pipeline)
  end
end

function D.axes(p) return { { name = "data", size = p.data, splits = "samples" } } end

function D.compile(o, p, mesh)
  local g = p.gradient
  o.bucket_mb, o.first_bucket_mb = g.bucket_mb or (p.zero >= 2 and 8 or 25), g.first_bucket_mb
  o.comm_dtype = g.dtype or o.precision
  for _, axis in ipairs(mesh) do
    if axis.name == "data" and axis.size > 1 and g.hook and o.train then o.hook = hooks.traced(g.hook, axis.size) end
  end
  o.by_registration, o.every_micro = g.order == "registration", g.every == "micro"
end

return D
