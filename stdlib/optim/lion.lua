-- Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled decay.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"

--- optim.Lion{ lr = 1e-4, betas = { 0.9, 0.99 }, weight_decay = 0 }
return define {
  name = "Lion",
  defaults = { lr = 1e-4, betas = { 0.9, 0.99 }, weight_decay = 0 },
  kinds = { betas = "decay", weight_decay = "nonnegative" },
  state = { "m" },
  update = function(p, g, s, h)
    local b1, b2 = h.betas[1], h.betas[2]
    local direction = ops.sign(s.m * b1 + g * (1 - b1))
    s.m = s.m * b2 + g * (1 - b2)
    if h.weight_decay ~= 0 then p = p * (1 - h.lr * h.weight_decay) end
    return p - direction * h.lr
  end,
}
