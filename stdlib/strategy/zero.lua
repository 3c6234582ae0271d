-- ZeRO (Rajbhandari et al. 2020) on the axis "data": what every replica would hold alike is cut into shares. 1: optimizer
-- states (and, in 16 bits, the f32 parameters); 2: gradients too, reduced after each microbatch; 3: parameters too,
-- gathered around each use, one bucket ahead. Each rank owns an equal share of every bucket.
local util = require "dtrain.util"

local Z = { name = "zero", options = { { "zero", "integer", 0 }, { "resident", "integer" } } }

--- parallel = { zero = 0 .. 3, resident = 1e5 }: with 3, parameters of fewer elements than `resident` stay whole.
function Z.check(p)
  if p.zero < 0 or p.zero > 3 then
    util.fail("dt.job: parallel: zero is 0 (off), 1, 2 or 3, got %d", p.zero)
  end
  if p.resident and p.zero ~= 3 then
    util.fail("dt.job: parallel: resident belongs to zero = 3, but zero is %d; leave it out", p.zero)
  end
  if p.resident and p.resident < 0 then
    util.fail("dt.job: parallel: resident is a number of elements, got %d; 0 keeps nothing whole", p.resident)
  end
end

local axes = { "data" }

function Z.keep(parameter, p)
  if p.zero == 0 then return nil end
  local use = p.zero == 3 and parameter.numel >= (p.resident or 100000)
  local gradient = p.gradient or {}
  return { states = axes, gradients = p.zero >= 2 and axes or nil, parameters = axes, gather = use and "use" or "step",
    each = gradient.every }
end

--- Buckets that are reduced in each microbatch, or gathered around each use, are smaller than those of a whole step.
function Z.wire(p)
  if p.zero >= 2 and not (p.gradient and p.gradient.bucket_mb) then return { bucket_mb = 8 } end
end

return Z
