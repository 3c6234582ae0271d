-- LAMB (You et al. 2020): Adam's direction, scaled for each parameter by the ratio of its norm to the direction's.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"

--- optim.LAMB{ lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-6, weight_decay = 0 }; the ratio is 1 where a norm is 0.
return define {
  name = "LAMB",
  defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-6, weight_decay = 0 },
  kinds = { betas = "decay", eps = "nonnegative", weight_decay = "nonnegative" },
  state = { "m", "v" },
  update = function(p, g, s, h)
    local b1, b2 = h.betas[1], h.betas[2]
    s.m = s.m * b1 + g * (1 - b1)
    s.v = s.v * b2 + ops.square(g) * (1 - b2)
    local direction = s.m / (1 - b1 ^ h.t) / (ops.sqrt(s.v / (1 - b2 ^ h.t)) + h.eps)
    if h.weight_decay ~= 0 then direction = direction + p * h.weight_decay end
    local size, length = ops.norm(p), ops.norm(direction)
    local usable = ops.gt(ops.minimum(size, length), 0)
    local ratio = ops.where(usable, size / ops.where(usable, length, 1), 1)
    return p - direction * (ratio * h.lr)
  end,
}
