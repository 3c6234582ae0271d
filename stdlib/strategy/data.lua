-- Data parallelism: each rank of the axis "data" has its own samples; gradients are summed over it, bucket by bucket,
-- overlapped with backward (Li et al. 2020).
local core = require "dtrain.core"
local util = require "dtrain.util"

local D = { name = "data", options = { { "data", "string|count", "auto" }, { "gradient", "table" } } }

--- parallel = { data = "auto" | ranks, gradient = { bucket_mb = 25 (8 where gradients are reduced in each microbatch),
--- first_bucket_mb = 1, dtype = "f32" | "bf16" | "f16" (the job's precision), order = "ready" | "registration", every =
--- "step" | "micro", hook = function(bucket, info) } }. A hook is the verb reduce with another measure: its bucket is
--- scaled so that the MEAN over the ranks is what the optimizer would see without it, and what it returns is taken for
--- that mean.
function D.check(p)
  if type(p.data) == "string" and p.data ~= "auto" then
    util.fail("dt.job: parallel: data wants \"auto\" or a number of ranks, got %s", util.show(p.data))
  end
  p.gradient = util.options("dt.job: parallel: gradient", p.gradient, { { "bucket_mb", "positive" },
    { "first_bucket_mb", "positive" }, { "dtype", "string", choices = { "f32", "bf16", "f16" } },
    { "order", "string", "ready", choices = { "ready", "registration" } },
    { "every", "string", "step", choices = { "step", "micro" } }, { "hook", "callable" } })
  if p.gradient.hook and p.gradient.dtype then
    util.fail("dt.job: parallel: gradient has both hook and dtype; a hook decides itself in what gradients travel: "
      .. "bucket:to %q", p.gradient.dtype)
  end
end

function D.axes(p) return { { name = "data", size = p.data, splits = "samples" } } end

function D.wire(p)
  local g = p.gradient
  return { bucket_mb = g.bucket_mb, first_bucket_mb = g.first_bucket_mb, dtype = g.dtype,
    by_registration = g.order == "registration" or nil }
end

function D.reduce(bucket, info, p)
  local hook = p.gradient.hook
  if not hook then return nil end
  local at = util.defined_at(hook)
  local out = hook(bucket * info.ranks, info)
  if not core.is_symbolic(out) then
    util.fail_at(at, "the gradient hook must return the reduced bucket, got %s (%s)", util.show(out), util.kind(out))
  end
  if util.show(out:shape()) ~= util.show(bucket:shape()) or not util.contains({ "f32", "bf16", "f16", "f64" }, out:dtype()) then
    util.fail_at(at, "the gradient hook returned %s of shape %s for a bucket of shape %s; it must keep the shape, in a float "
      .. "dtype", out:dtype(), util.show(out:shape()), util.show(bucket:shape()))
  end
  return out
end

function D.keep(_, p) if p.gradient.every == "micro" and (p.zero or 0) < 1 then return { each = "micro" } end end

return D
